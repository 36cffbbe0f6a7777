"""What follows the commit: the derived index, the files that were replaced, the mark. Trouble here harms nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from shardstore.check import Found, mark_content, plan_leftovers, remove
from shardstore.errors import CheckpointExists, KeyMissing, StoreError, StoreUnavailable
from shardstore.events import Reporter
from shardstore.index import HF_NAME, MAX_BYTES, NAME, Index, mark_name, origin_of, weight_map
from shardstore.storage import Blob, Bytes, Store

_TRIES = 5


def supersede(stores: Sequence[Store], index: Index) -> None:
    """Mark what is, or is to be, replaced. As long as an index names its files, they are not removed."""
    for root, store in enumerate(stores):
        files = [file.path for file in index.files if file.root == root]
        content = mark_content(index.attempt, "superseded", stripe=[root, len(stores)], files=files)
        store.put(mark_name(index.attempt), Bytes(content))


def tidy_up(stores: Sequence[Store], index: Index, data: bytes, replaced: Found | None, reporter: Reporter) -> None:
    """All that follows the commit of an index, of which `data` are the bytes. Trouble is reported."""
    for step in _steps(stores, index, data, replaced, reporter):
        try:
            step()
        except StoreError as error:
            reporter.noticed(f"the checkpoint is committed, but tidying up after it failed: {error}")


def _steps(
    stores: Sequence[Store], index: Index, data: bytes, replaced: Found | None, reporter: Reporter
) -> Iterator[Callable[[], None]]:
    if replaced:  # a new time of grace begins for those who read what was replaced
        yield lambda: supersede(stores, replaced.index)
    yield lambda: _derive(stores[0], index, data, replaced, reporter)
    if replaced:
        yield lambda: _remove_leftovers(stores, index)
    if len(stores) == 1:
        yield lambda: _unmark(stores, index, data)


def _derive(store: Store, index: Index, data: bytes, replaced: Found | None, reporter: Reporter) -> None:
    if not put_derived(store, index, data, new=replaced is None):
        reporter.noticed(f"{HF_NAME} is another tool's and was left as it is: such tools won't see this checkpoint")


def put_derived(store: Store, index: Index, data: bytes, *, new: bool) -> bool:
    """Bring the index that Hugging Face tools read in line with ours, of which `data` are the bytes.

    Nothing is done when ours is not the committed one any more: who replaced it sees to that. Returns False where the
    index of another tool is in the way, which is left as it is. `new`: most likely there is none yet.
    """
    wanted = weight_map(index)
    for turn in range(_TRIES):
        # Looked at before the index is, so that a save which sleeps in between replaces nothing.
        present = None if new and turn == 0 else _blob(store, HF_NAME)
        if (present.data if present else None) == wanted:
            return True
        if present and origin_of(present.data, index.attempt) == "foreign":
            return wanted is None
        if not _is_committed(store, data):
            return True
        if wanted is None:
            store.delete(HF_NAME)
            return True
        with contextlib.suppress(StoreUnavailable, CheckpointExists, KeyMissing):  # in any case, look again
            store.put(HF_NAME, Bytes(wanted), if_absent=not present, if_match=present.version if present else None)
            return True
    raise StoreError(f"{HF_NAME} in {store.url} is replaced as often as it is written", filename=HF_NAME)


def _remove_leftovers(stores: Sequence[Store], index: Index) -> None:
    for leftover in plan_leftovers(*stores):
        if leftover.removable and leftover.attempt != index.attempt:
            remove(leftover, *stores)


def _unmark(stores: Sequence[Store], index: Index, data: bytes) -> None:
    """Remove the mark of a save that is done."""
    stores[0].delete(mark_name(index.attempt))
    if not _is_committed(stores[0], data):
        supersede(stores, index)  # it was replaced meanwhile, and that mark may be the one which has just gone


def _is_committed(store: Store, data: bytes) -> bool:
    """Whether the committed index still is the one with these bytes."""
    found = _blob(store, NAME)
    return found is not None and found.data == data


def _blob(store: Store, key: str) -> Blob | None:
    try:
        return store.get(key, limit=MAX_BYTES)
    except KeyMissing:
        return None
