"""From written files to a committed checkpoint: the point of no return, and how an unclear answer is cleared up."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

from shardstore import strictjson
from shardstore.check import MARK_SCHEMA, find_index
from shardstore.errors import CheckpointExists, CommitUnknown, Damaged, KeyMissing, StoreError, StoreUnavailable
from shardstore.index import NAME, Index, mark_name
from shardstore.storage import Bytes, Store

REFRESH_SECONDS = 60.0
OVERDUE_SECONDS = 3600.0
_TRIES = 5


def utc_now() -> str:
    """The time, as stored: ISO 8601, UTC, microseconds."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Mark:
    """The mark of a save under way: written at the start, refreshed each minute on a thread, removed at the end."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store = store
        self._key = mark_name(attempt)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="shardstore-mark", daemon=True)
        self._content = mark_content(attempt, "writing")

    def __enter__(self) -> Self:
        self._put()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def renew(self) -> None:
        """Refresh the mark if the thread could not: a process that was stopped for hours must not commit under it."""
        if time.monotonic() - self._put_at > OVERDUE_SECONDS:
            self._put()

    def _put(self) -> None:
        self._store.put(self._key, Bytes(self._content))
        self._put_at = time.monotonic()

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            with contextlib.suppress(StoreError):  # the next minute tries again; the limit is 24 hours
                self._put()


def mark_content(attempt: str, state: str, **more: Any) -> bytes:
    """The JSON of a mark. `state`: `writing`, or `superseded` with the `files` that are no longer needed."""
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    return strictjson.dumps(
        {"schema": MARK_SCHEMA, "attempt": attempt, "state": state, "time": utc_now(), "stripe": [0, 1], **who, **more}
    )


def check_written(store: Store, index: Index) -> None:
    """That every file the index names is in the store, with its size. Raises StoreError."""
    for file in index.files:
        found = store.stat(file.path)
        if found.nbytes != file.nbytes:
            raise StoreError(f"{file.path!r} has {found.nbytes} bytes after it was written, {file.nbytes} were sent")


def commit(store: Store, attempt: str, data: bytes, replaces: str | None) -> None:
    """Write the index, last and atomically. `replaces`: the version that it may replace, None for none.

    Raises CheckpointExists where another save was first, CommitUnknown where it can't be found out.
    """
    for _ in range(_TRIES):
        try:
            store.put(NAME, Bytes(data), if_absent=replaces is None, if_match=replaces)
        except (StoreUnavailable, CheckpointExists, KeyMissing) as error:
            if _resolved(store, attempt, replaces, error):
                return
        else:
            return
    raise CommitUnknown(f"{store.url}: the store did not say whether the checkpoint was committed; no file was removed")


def _resolved(store: Store, attempt: str, replaces: str | None, error: StoreError | CheckpointExists) -> bool:
    """Look what is there after an unclear answer: True for ours, False to try again; raises for another's."""
    try:
        found = find_index(store)
    except StoreUnavailable:
        raise CommitUnknown(f"{store.url}: whether the checkpoint was committed is unknown: {error}") from error
    except Damaged:
        found = None
    if found is not None and found.index.attempt == attempt:
        return True
    if isinstance(error, StoreUnavailable) and (found.version if found else None) == replaces:
        return False
    raise CheckpointExists(
        f"{store.url} was saved by another process at the same time; nothing of it was changed"
    ) from error
