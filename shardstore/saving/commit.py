"""From written files to a committed checkpoint: the point of no return, and how an unclear answer is cleared up."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence

from shardstore.check import find_index, mark_content
from shardstore.errors import (
    CheckpointExists,
    CommitUnknown,
    Damaged,
    KeyMissing,
    ShardstoreError,
    StoreError,
    StoreUnavailable,
)
from shardstore.index import NAME, FileEntry, Index, mark_name
from shardstore.storage import Bytes, Store
from shardstore.transfer import in_parallel

REFRESH_SECONDS = 60.0
OVERDUE_SECONDS = 3600.0
_TRIES = 6
_WAIT_SECONDS = 0.1


class Marks:
    """The marks of a save under way, one in each root: written first, refreshed each minute on a thread."""

    def __init__(self, stores: Sequence[Store], attempt: str) -> None:
        self._stores = stores
        self._attempt = attempt
        self._state = "writing"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="shardstore-mark", daemon=True)

    def start(self) -> None:
        """Write them, and begin to refresh them."""
        self._put()
        self._thread.start()

    def stop(self) -> None:
        """Refresh them no more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def renew(self) -> None:
        """Refresh the marks if the thread could not: who was stopped for hours must not commit under old ones."""
        if time.monotonic() - self._put_at > OVERDUE_SECONDS:
            self._put()

    def make_lasting(self) -> None:
        """The marks of a striped checkpoint stay: by them a reader knows which root is which."""
        self._state = "striped"
        self._put()

    def _put(self) -> None:
        for root, store in enumerate(self._stores):
            content = mark_content(self._attempt, self._state, stripe=[root, len(self._stores)])
            store.put(mark_name(self._attempt), Bytes(content))
        self._put_at = time.monotonic()

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            with contextlib.suppress(StoreError):  # the next minute tries again; the limit is 24 hours
                self._put()


def check_written(stores: Sequence[Store], index: Index) -> None:
    """That every file the index names is there, with its size. Raises StoreError."""

    def look(file: FileEntry) -> None:
        found = stores[file.root].stat(file.path)
        if found.nbytes != file.nbytes:
            raise StoreError(f"{file.path!r} has {found.nbytes} bytes after it was written, {file.nbytes} were sent")

    in_parallel(look, index.files, stores[0].capabilities.connections or 1)


def commit(store: Store, attempt: str, data: bytes, replaces: str | None, *, single_writer: bool = False) -> None:
    """Write the index, last and atomically. `replaces`: the version that it may replace, None for none.

    With `single_writer`, a store without conditional puts is looked at first, and then trusted.

    Raises CheckpointExists where another save was first, CommitUnknown where it can't be found out.
    """
    trusted = single_writer and not store.capabilities.exclusive
    for turn in range(_TRIES):
        if turn:
            time.sleep(_WAIT_SECONDS * 2**turn * (1 + random.random()))  # noqa: S311 - so that many do not come at once
        try:
            if trusted:
                _put_unguarded(store, data, replaces)
            else:
                store.put(NAME, Bytes(data), if_absent=replaces is None, if_match=replaces)
        except (StoreUnavailable, CheckpointExists, KeyMissing) as error:
            if _resolved(store, attempt, replaces, error):
                return
        except StoreError as error:
            # After an unclear try this "no" is not the last word: the index that was sent first may still land.
            error.definite = turn == 0 and _is_not_ours(store, attempt)  # type: ignore[attr-defined]
            raise
        else:
            return
    raise CommitUnknown(f"{store.url}: the store did not say whether the checkpoint was committed; no file was removed")


def _is_not_ours(store: Store, attempt: str) -> bool:
    """Whether a store that refused the index for good (it is full, say) shows that it has not taken it."""
    try:
        found = find_index(store)
    except ShardstoreError:
        return False
    return found is None or found.index.attempt != attempt


def _put_unguarded(store: Store, data: bytes, replaces: str | None) -> None:
    found = find_index(store)
    if (found.version if found else None) != replaces:
        raise CheckpointExists(f"{store.url} was saved by another process at the same time")
    store.put(NAME, Bytes(data))


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
