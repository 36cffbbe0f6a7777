"""Removing checkpoints that retention lets go. The index goes before the data, so that nothing is listed half."""

from __future__ import annotations

from shardstore.check import find_index, mark_content, plan_leftovers, remove
from shardstore.errors import KeyMissing, ShardstoreError
from shardstore.index import HF_NAME, MAX_BYTES, Index, mark_name, origin_of
from shardstore.index import NAME as INDEX
from shardstore.run import marks
from shardstore.run.documents import fetch
from shardstore.run.listing import RunCheckpoint
from shardstore.storage import Bytes, LocalStore, Store, unwrap


def remove_checkpoint(place: Store, attempt: str) -> list[str]:
    """Remove the checkpoint of that attempt from the store at its folder. Never raises: returns what went wrong.

    A mark with all its files is written first and goes last: what a dead process leaves, `prune --leftovers` takes.
    """
    try:
        found = find_index(place)
        if found is None:
            return []
        if found.index.attempt != attempt:
            return [f"{place.url} holds another checkpoint than {attempt} by now: not touched"]
        return _remove(place, found.index)
    except ShardstoreError as error:
        return [f"{place.url}: {error}"]


def remove_from_run(run: Store, place: Store, checkpoint: RunCheckpoint) -> list[str]:
    """Remove a checkpoint that retention lets go, unless it is pinned by now. Never raises: returns what went wrong."""
    if checkpoint.state != "committed":
        return [f"{checkpoint.name} is {checkpoint.state}: not touched"]
    try:
        if fetch(run, marks.key_of("pin", checkpoint.attempt)):
            return [f"{checkpoint.name} is pinned: not touched"]
        errors = remove_checkpoint(place, checkpoint.attempt)
        if not errors and checkpoint.quarantined:
            marks.remove(run, "quarantine", checkpoint.attempt)
        return errors
    except ShardstoreError as error:
        return [f"{checkpoint.name}: {error}"]


def _remove(place: Store, index: Index) -> list[str]:
    place.put(mark_name(index.attempt), Bytes(_mark(index)))
    if _has_derived(place, index):
        place.delete(HF_NAME)  # nothing of ours depends on it, and without the index nobody could tell whose it is
    place.delete(INDEX)  # flushed: what follows can't become durable before it
    errors = []
    for file in index.files:
        try:
            place.delete(file.path)
        except ShardstoreError as error:
            errors.append(str(error))
    if not errors:
        place.delete(mark_name(index.attempt))
        give_up(place)
    return errors


def _has_derived(place: Store, index: Index) -> bool:
    try:
        derived = place.get(HF_NAME, limit=MAX_BYTES).data
    except KeyMissing:
        return False
    return origin_of(derived, index.attempt) == "ours"


def _mark(index: Index) -> bytes:
    return mark_content(index.attempt, "superseded", files=[file.path for file in index.files])


def give_up(place: Store) -> None:
    """Remove an empty folder with what the store itself has left in it; only local stores have folders."""
    local = unwrap(place)
    if isinstance(local, LocalStore):
        local.give_up()


def sweep(place: Store) -> list[str]:
    """Remove what a dead save, or a removal that died, has left in a folder without index. Returns what went wrong."""
    errors: list[str] = []
    try:
        if find_index(place) is not None:
            return []
        for left in plan_leftovers(place):
            if left.removable:
                errors += remove(left, place)
        if not errors and not any(True for _ in place.list()):
            give_up(place)
    except ShardstoreError as error:
        errors.append(f"{place.url}: {error}")
    return errors
