"""The errors of shardstore, grouped by what the caller does next.

```
ShardstoreError                      exit code
├── InvalidArgument (ValueError)         2      fix the call
├── UnsupportedState (TypeError)         1      the state holds what can't be stored; nothing was written
├── CheckpointNotFound (FileNotFoundError) 5    there is nothing at that place
│   └── Unfinished                       4      a save is under way there, or died
├── CheckpointExists (FileExistsError)   6      choose another place, or overwrite=True
│   └── Superseded                       6      somebody else replaced the index meanwhile
├── UnsupportedVersion (ValueError)      7      written by a newer or unknown version
├── Mismatch (ValueError, KeyError)      1      checkpoint and target differ; nothing was touched
├── Damaged (ValueError)                 3      bytes are not what was saved: use another checkpoint
├── StoreError (OSError)                 1      the store failed; `errno` and `filename` as in OSError
│   ├── StoreUnavailable                 1      a hiccup: trying again may help
│   └── KeyMissing (FileNotFoundError)   5      no file or object of that name
├── NothingToResume                      3      a run has had checkpoints, and none of them can be loaded
├── Fenced                               1      another process has taken the run over, or holds it
├── PeerError                            1      another rank failed, died or did not come
└── CommitUnknown                        1      can't tell whether the checkpoint was committed
```

Every error can be pickled, so that it can cross process borders whole.
"""

from __future__ import annotations

import errno as _errno
from typing import Any


class ShardstoreError(Exception):
    """Root of the tree. `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(details)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(cls: type[ShardstoreError], details: dict[str, Any]) -> ShardstoreError:
    """Make an error again from its class and its details (for pickle)."""
    return cls(**details)


class InvalidArgument(ShardstoreError, ValueError):
    """A call asks for something that can't be; nothing was done."""

    exit_code = 2


class UnsupportedState(ShardstoreError, TypeError):
    """The state holds something that can't be stored. `path` says where; nothing was written."""

    path: str = ""


class CheckpointNotFound(ShardstoreError, FileNotFoundError):
    """There is no checkpoint at that place."""

    exit_code = 5


class Unfinished(CheckpointNotFound):
    """Files of a save lie there, but no index: it is under way, or it died."""

    exit_code = 4


class CheckpointExists(ShardstoreError, FileExistsError):
    """A checkpoint lies there already; nothing of it was changed."""

    exit_code = 6


class Superseded(CheckpointExists):
    """The index changed between the moment it was seen and the moment it was to be replaced or read."""


class UnsupportedVersion(ShardstoreError, ValueError):
    """The schema is newer than this version of shardstore, or unknown."""

    exit_code = 7


class Mismatch(ShardstoreError, ValueError, KeyError):
    """Checkpoint and target don't fit. All differences at once; nothing was touched.

    `missing`: wanted, not in the checkpoint. `unexpected`: in the checkpoint, not wanted.
    `different`: path and what differs (shape, dtype, kind, groups).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


class Damaged(ShardstoreError, ValueError):
    """Bytes are not what was saved.

    `file`: relative path. `blocks`: numbers of the bad 4 MiB blocks. `tensors`: paths that lie in them.
    `overwritten`: paths of target tensors that had been filled, wholly or partly, before the damage was met.
    """

    exit_code = 3
    file: str = ""
    blocks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()


class NothingToResume(ShardstoreError):
    """A run has had checkpoints and none of them can be loaded. It is not started from zero without being asked."""

    exit_code = 3


class StoreError(ShardstoreError, OSError):
    """The store failed for good: full, read-only, forbidden, broken. `errno` and `filename` as in OSError."""

    def __init__(self, message: str, *, errno: int | None = None, filename: str | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.errno = errno  # OSError keeps these two in slots of its own, not in the instance's dict
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {**self.__dict__, "errno": self.errno, "filename": self.filename})


class StoreUnavailable(StoreError):
    """The store failed in a way that may pass; the same call may be made again."""


class KeyMissing(StoreError, FileNotFoundError):
    """The store has no file or object of that name."""

    exit_code = 5


class Fenced(ShardstoreError):
    """Another process holds the run: a newer owner has taken it over, so that this one may commit nothing more to it.

    `epoch`: ours, None where this process is no owner. `by`: that of the other owner, with its `host` and `pid`.
    """

    epoch: int | None = None
    by: int = 0
    host: str = ""
    pid: int = 0


class PeerError(ShardstoreError):
    """Another rank failed, died, or did not come in time.

    `ranks`: which, by their numbers in the group. `phase`: what was going on. `settled`: rank 0 has given up, too.
    `lost`: rank 0 had this rank's result and can't be heard any more, so that it may have gone on.
    """

    ranks: tuple[int, ...] = ()
    phase: str = ""
    settled: bool = False
    lost: bool = False


class CommitUnknown(ShardstoreError):
    """The answer to the commit was lost and can't be found out. No file was removed.

    Look again with `shardstore verify` when the store answers.
    """


_SENTENCES = {
    _errno.ENOSPC: "no space is left",
    _errno.EDQUOT: "the disk quota is used up",
    _errno.EIO: "the device reported an I/O error",
    _errno.EROFS: "the file system is read-only",
    _errno.EACCES: "permission is denied",
    _errno.EPERM: "the operation is not permitted",
    _errno.ENAMETOOLONG: "the name is too long",
    _errno.ENOTDIR: "a part of the path is not a folder",
    _errno.EISDIR: "it is a folder",
    _errno.ELOOP: "a link was found where a plain file must be",
}
# EIO passes too: on shared disks it often is one hiccup, and a whole file written anew is the only sound answer to it.
_PASSING = {_errno.EIO, _errno.ESTALE, _errno.EAGAIN, _errno.EINTR, _errno.ETIMEDOUT, _errno.EBUSY}


def from_os_error(error: OSError, doing: str, path: str) -> StoreError:
    """Turn an OSError into one of ours, which says what was being done to which path, and why it failed."""
    if isinstance(error, StoreError):
        return error
    why = _SENTENCES.get(error.errno or 0) or error.strerror or str(error)
    cls: type[StoreError] = StoreError
    if error.errno == _errno.ENOENT:
        cls = KeyMissing
    elif error.errno in _PASSING:
        cls = StoreUnavailable
    return cls(f"{doing} {path!r} failed: {why}", errno=error.errno, filename=path)


def brief(value: object) -> str:
    """A short text of any value, for messages; `repr` fails for integers of thousands of digits."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises
        text = f"a {type(value).__name__} that can't be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004


def exit_code(error: BaseException) -> int:
    """The exit code of the command line for an error (design: 0 ok, 1 error, 2 usage, 3 corrupt, ...)."""
    return error.exit_code if isinstance(error, ShardstoreError) else 1
