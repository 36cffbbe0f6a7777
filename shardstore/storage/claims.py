"""Conditional put on POSIX file systems, also where two machines see one store: replace a file only from a known state.

On FUSE mounts, `link`, `O_EXCL` and `renameat2(NOREPLACE)` each let two writers win; only `mkdir` is exclusive there.
So:

1. Write and flush a temporary file. Give it the name of the claim: `.claims/KEY/.STATE.N-RANDOM.tmp`, where STATE is
   the state that is to be replaced ("absent", or the version of its content), and N the first number not yet claimed.
2. Claim: `mkdir .claims/KEY/STATE.N`. Exactly one wins. The folder stays for good, so that nobody wins it again later,
   not even through a mount with old caches.
3. Look freshly whether STATE still is the state; rename the temporary file onto the final name; flush the folder.

A claim is *over* when no temporary file of its name is left: it was put into place, or its owner gave up. It is *held*
as long as one is there. The owner may have died; so a claim that was held for `Patience.age` is broken: its temporary
files are removed, and the next number is claimed. That is safe at any age: a temporary file exists before its claim
does, so whoever breaks the claim finds it, and either removes it, and the owner's rename fails, or comes too late, and
sees a new state in step 3. The age only keeps the living from disturbing each other.

The last part needs a true view of the files, which FUSE and network mounts may give only after a while. So there, a
claim that exists is believed to be over only when it is old, and after a wait during which nothing has changed; and a
file is believed to be gone only when it is missing twice (SeaweedFS shows none for a moment while one is replaced).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from shardstore.errors import CheckpointExists, KeyMissing, StoreError, StoreUnavailable, from_os_error
from shardstore.storage import posix
from shardstore.storage.content import VERSION_DIGITS
from shardstore.storage.folders import Folders
from shardstore.storage.port import Body

FOLDER = ".claims"
_POLL_SECONDS = 0.05
_BLINK_SECONDS = 0.5
_MAX_NAME = 200
_CLAIM = re.compile(r"(absent|[0-9a-f]{32})\.([0-9]{1,9})")
_HOLDER = re.compile(r"\.(absent|[0-9a-f]{32})\.([0-9]{1,9})-[0-9a-f]{16}\.tmp")


def folder_of(key: str) -> str:
    """The name of the folder with the claims on a key."""
    name = key.replace("%", "%25").replace("/", "%2F")
    return name if len(name.encode()) <= _MAX_NAME else hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: `age` after which a held claim is broken, `wait` for what becomes of another one's claim.

    `coherent`: what is seen of the files is their present state.
    """

    age: float = 10.0
    wait: float = 2.0
    sleep: Callable[[float], None] = time.sleep
    coherent: bool = True


class _Hashed:
    """A body that is hashed while it passes by."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._sha256 = hashlib.sha256()
        self.nbytes = body.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        self._sha256 = hashlib.sha256()
        for buffer in self._body:
            self._sha256.update(buffer)
            yield buffer

    @property
    def version(self) -> str:
        return self._sha256.hexdigest()[:VERSION_DIGITS]


@dataclass(slots=True)
class Exchange:
    """One conditional put: `key` goes from the state `expected` (None: absent) to the content of `body`."""

    folders: Folders
    key: str
    expected: str | None
    patience: Patience
    now: Callable[[], float]
    _claims: int = -1
    _temp: str = ""
    _known: int = -1
    _random: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self, body: Body) -> None:
        """Carry it out. Raises CheckpointExists, KeyMissing, StoreUnavailable or StoreError, as the port says."""
        self._require()  # before a byte is written
        hashed = _Hashed(body)
        *parts, name = self.key.split("/")
        try:
            with (
                self.folders.open(parts, make=True) as target,
                self._claim_folder() as self._claims,
                self._temporary(hashed),
            ):
                self._claim()
                self._require()
                self._put_into_place(target, name, hashed.version)
        except posix.FolderGone:
            raise self._unavailable("its folder, or that of the claims on it, was removed meanwhile") from None

    # -- the present state

    def _require(self) -> None:
        """Raise unless the present state, seen freshly, is the expected one."""
        found = self._state(content=self.expected is not None)
        if found is None and self.expected is not None and not self.patience.coherent:
            self.patience.sleep(_BLINK_SECONDS)
            found = self._state(content=True)
        if found == self.expected:
            return
        if self.expected is None:
            raise CheckpointExists(f"{self._shown!r} exists already")
        if found is None:
            raise KeyMissing(f"{self._shown!r} does not exist any more", errno=errno.ENOENT, filename=self._shown)
        raise CheckpointExists(f"{self._shown!r} has been replaced by somebody else meanwhile")

    def _state(self, *, content: bool) -> str | None:
        """None where nothing has the name, else the version of the content, or only what kind of file it is."""
        *parts, name = self.key.split("/")
        try:
            with self.folders.open(parts, flags=os.O_RDONLY) as folder:
                os.listdir(folder)  # makes network file systems ask the server anew
                return self._look(name, folder, content=content)
        except KeyMissing:
            return None
        except StoreError:
            raise
        except OSError as error:
            raise from_os_error(error, "looking at", self._shown) from error

    def _look(self, name: str, folder: int, *, content: bool) -> str | None:
        try:
            mode = os.lstat(name, dir_fd=folder).st_mode
        except FileNotFoundError:
            return None
        if not content:
            return posix.kind_of(mode)
        fd = posix.open_plain(name, folder, self._shown)
        try:
            if not self.patience.coherent:
                posix.forget_pages(fd)
            return posix.digest_of(fd, self._shown)[:VERSION_DIGITS]
        finally:
            posix.close_quietly(fd)

    # -- the claim

    @contextmanager
    def _claim_folder(self) -> Iterator[int]:
        with self.folders.open([FOLDER, folder_of(self.key)], make=True, flush=False) as claims:
            yield claims

    @contextmanager
    def _temporary(self, body: Body) -> Iterator[None]:
        """The new content in a flushed temporary file among the claims; removed in the end if it is still there."""
        self._temp = f".{self._token}-{self._random}.tmp"
        posix.write_synced(self._temp, self._claims, body, self._shown)
        try:
            yield
        finally:
            if self._temp:
                posix.remove_quietly(self._temp, self._claims)

    def _claim(self) -> None:
        """Win the claim, if need be by breaking one of which the owner has died."""
        for turn in range(max(1, round(self.patience.wait / _POLL_SECONDS))):
            if turn:
                self.patience.sleep(_POLL_SECONDS)
            if self._try(patient=not self.patience.coherent):
                return
            self._require()
        self._break()
        if not self._try(patient=False):
            raise self._unavailable("somebody else was faster in breaking an old claim on it")

    def _try(self, *, patient: bool) -> bool:
        """Claim the next number if the last one is over (`patient`: if there is none); returns whether it was won."""
        last, holders = self._last()
        over = not holders and last >= self._known  # else we were shown something older than what we know
        if not over or (patient and last >= 0):
            return False
        self._rename(f".{self._token}.{last + 1}-{self._random}.tmp")
        self._known = last + 1
        try:
            os.mkdir(f"{self._token}.{last + 1}", dir_fd=self._claims)
        except FileExistsError:
            self._rename(f".{self._token}-{self._random}.tmp")
            return False
        except FileNotFoundError as error:
            raise self._unavailable("the folder of its claims was removed meanwhile") from error
        except OSError as error:
            raise from_os_error(error, "claiming", self._shown) from error
        return True

    def _last(self) -> tuple[int, list[str]]:
        """The last claim on the expected state, -1 for none, and the temporary files of the claims up to it."""
        names = self._names()
        numbers = [int(match[2]) for name in names if (match := _CLAIM.fullmatch(name)) and match[1] == self._token]
        last = max(numbers, default=-1)
        matches = (match for name in names if (match := _HOLDER.fullmatch(name)))
        return last, [match[0] for match in matches if match[1] == self._token and int(match[2]) <= last]

    def _names(self) -> list[str]:
        """A fresh listing of the claims; the folder is opened anew, so that network file systems ask the server."""
        try:
            with self._claim_folder() as folder:
                return os.listdir(folder)
        except StoreError:
            raise
        except OSError as error:
            raise from_os_error(error, "listing the claims on", self._shown) from error

    def _break(self) -> None:
        """Fence off the owners of a claim that is old; StoreUnavailable while it is young."""
        last, holders = self._last()
        claim = self.folders.shown(FOLDER, folder_of(self.key), f"{self._token}.{max(last, self._known)}")
        if last < self._known:
            raise self._unavailable(f"{claim!r} is held by somebody whose traces are not visible here yet")
        try:
            age = self.now() - os.lstat(f"{self._token}.{last}", dir_fd=self._claims).st_mtime
        except FileNotFoundError as error:
            raise self._unavailable(f"{claim!r} was removed meanwhile") from error
        except OSError as error:
            raise from_os_error(error, "looking at", claim) from error
        if (holders or not self.patience.coherent) and age < self.patience.age:
            raise self._unavailable(
                f"{claim!r} was taken by somebody else; try again in {self.patience.age - age:.0f} s"
            )
        for name in holders:
            with suppress(FileNotFoundError), posix.failing("breaking", claim):
                os.unlink(name, dir_fd=self._claims)

    def _rename(self, name: str) -> None:
        try:
            os.rename(self._temp, name, src_dir_fd=self._claims, dst_dir_fd=self._claims)
        except FileNotFoundError as error:
            raise self._unavailable("somebody else has broken our claim on it") from error
        except OSError as error:
            raise from_os_error(error, "claiming", self._shown) from error
        self._temp = name

    # -- the point of no return

    def _put_into_place(self, target: int, name: str, version: str) -> None:
        try:
            os.rename(self._temp, name, src_dir_fd=self._claims, dst_dir_fd=target)
        except OSError as error:
            self._resolve(error, version)
        self._temp = ""
        try:
            posix.sync_folder(target, self._shown)
        except StoreError as error:
            message = f"{self._shown!r} is in place, but may not survive a power loss: {error}"
            raise StoreError(message, errno=error.errno, filename=self._shown) from error  # trying again can't mend it

    def _resolve(self, error: OSError, version: str) -> None:
        """Find out what a rename that failed has done: returns if our content is in place; else we changed nothing."""
        if self._state(content=True) == version:
            return
        if not posix.remove_quietly(self._temp, self._claims):
            self._temp = ""
            self._require()
            raise self._unavailable("our claim on it was broken, because it was held for too long") from error
        self._temp = ""
        self._require()
        if error.errno == errno.ENOENT:
            raise self._unavailable("its folder was removed meanwhile") from error
        raise from_os_error(error, "putting into place", self._shown) from error

    # -- words

    @property
    def _token(self) -> str:
        return self.expected or "absent"

    @property
    def _shown(self) -> str:
        return self.folders.shown(*self.key.split("/"))

    def _unavailable(self, why: str) -> StoreUnavailable:
        message = f"writing {self._shown!r} did not come about: {why}"
        return StoreUnavailable(message, errno=errno.EAGAIN, filename=self._shown)
