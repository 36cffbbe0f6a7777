"""Who writes to a run. Each owner takes the next epoch; whoever has an older one is fenced off.

An owner that is fenced off may still be committing: that harms nothing, since checkpoints sort by the owner's epoch.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from shardstore.check import utc_now
from shardstore.errors import Damaged, Fenced, StoreError, UnsupportedVersion
from shardstore.run import documents
from shardstore.run.documents import fetch, put_if
from shardstore.storage import Bytes, Store

FOLDER = "owners/"
SCHEMA = "shardstore-owner/1"
HEARTBEAT_SECONDS = 30.0
LIVE_SECONDS = 120.0
EPOCH_DIGITS = 8
_TRIES = 64
_NAME = re.compile(r"owners/([0-9]{8,18})\.json")
_MEMBERS: documents.Members = {
    "epoch": (int,), "host": (str,), "pid": (int,), "since": (str,), "ended": (bool,), "token": (str,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """What the store says of an owner. `age`: seconds since its last heartbeat, by the store's clock."""

    epoch: int
    host: str
    pid: int
    since: str
    ended: bool
    age: float

    @property
    def live(self) -> bool:
        """Whether it may still be at work: not ended, heard of within two minutes, and not known to be dead."""
        if self.ended or self.age >= LIVE_SECONDS:
            return False
        return self.host != socket.gethostname() or _alive(self.pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def key_of(epoch: int) -> str:
    """The file of an owner."""
    return f"{FOLDER}{epoch:0{EPOCH_DIGITS}}.json"


def current_epoch(store: Store) -> int:
    """The highest epoch that anybody has taken; 0 for none. Files with other names are nobody's."""
    return max((int(match[1]) for entry in store.list(FOLDER) if (match := _NAME.fullmatch(entry.key))), default=0)


def read(store: Store, epoch: int) -> OwnerRecord | None:
    """What an owner's file says; None where there is none. Raises Damaged, UnsupportedVersion."""
    key = key_of(epoch)
    blob = fetch(store, key)
    if blob is None:
        return None
    found = documents.parse(blob.data, key, SCHEMA, _MEMBERS)
    age = store.now() - store.stat(key).modified
    return OwnerRecord(found["epoch"], found["host"], found["pid"], found["since"], found["ended"], age)


def current(store: Store) -> OwnerRecord | None:
    """The owner with the highest epoch; None where nobody has ever taken one."""
    epoch = current_epoch(store)
    return read(store, epoch) if epoch else None


def claim(store: Store, *, above: int = 0, single_writer: bool = False) -> Owner:
    """Take the next epoch, which is above `above`, too. Of those who try at once, each gets one of its own."""
    for _ in range(_TRIES):
        epoch = max(current_epoch(store), above) + 1
        owner = Owner(store, epoch)
        if put_if(store, key_of(epoch), owner.content(), None, single_writer=single_writer):
            return owner
    raise StoreError(f"{store.url}: no owner's epoch could be had, so many others take them at the same time")


class Owner:
    """The right to write to a run, until somebody takes a higher epoch. A context manager, which ends it."""

    def __init__(self, store: Store, epoch: int) -> None:
        self.epoch = epoch
        self._store = store
        self._who: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "since": utc_now()}
        self._token = secrets.token_hex(8)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def content(self, *, ended: bool = False) -> bytes:
        """The bytes of its file; no two owners have the same."""
        return documents.dump(SCHEMA, epoch=self.epoch, **self._who, ended=ended, token=self._token)

    def check(self) -> None:
        """Raise Fenced if somebody has taken a higher epoch. To be called before each commit."""
        highest = current_epoch(self._store)
        if highest <= self.epoch:
            return
        other = None
        with contextlib.suppress(Damaged, UnsupportedVersion):  # its name is what counts
            other = read(self._store, highest)
        who = f" (process {other.pid} on {other.host}, since {other.since})" if other else ""
        raise Fenced(
            f"{self._store.url} was taken over by another process{who}: epoch {highest} is above this one's "
            f"{self.epoch}; nothing more is saved from here",
            epoch=self.epoch, by=highest, host=other.host if other else "", pid=other.pid if other else 0,
        )  # fmt: skip

    def beat(self) -> None:
        """Show that this owner is alive. Raises StoreError."""
        self._store.put(key_of(self.epoch), Bytes(self.content()))

    def keep_alive(self, seconds: float = HEARTBEAT_SECONDS) -> None:
        """Beat on a thread, each `seconds`, until `release`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beats, args=[seconds], name="shardstore-owner", daemon=True)
            self._thread.start()

    def _beats(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with contextlib.suppress(StoreError):  # the next one tries again
                self.beat()

    def release(self) -> None:
        """Say that this owner is done. The epoch stays taken. Raises StoreError."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._store.put(key_of(self.epoch), Bytes(self.content(ended=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.release()
            return
        with contextlib.suppress(StoreError):  # the first error matters more
            self.release()
