"""`save`: from a state to a committed checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from shardstore import tree
from shardstore.check import Found, find_roots
from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, ShardstoreError
from shardstore.events import Listener, Reporter, to_log
from shardstore.hashing import DEFAULT
from shardstore.index import NAME, dump, mark_name
from shardstore.memory import no_gc
from shardstore.plan import GroupBy, Layout, ShardOptions
from shardstore.ranks import ALL, ranks_of
from shardstore.saving.after import supersede, tidy_up
from shardstore.saving.attempt import Attempt, Options
from shardstore.saving.commit import Marks, check_written, commit
from shardstore.storage import Store, Urls, close_all, open_roots


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint. `digest`: the sha256 of its shardstore.json, which `load(expect=)` takes."""

    url: str
    step: int | None
    digest: str
    nbytes: int
    seconds: float


def save(  # noqa: PLR0913 - the public face: every argument but two has a default
    state: Any, url: Urls, *, step: int | None = None, shards: int | None = None,
    shard_bytes: int | None = None, layout: Layout = "balanced", group_by: GroupBy | None = None,
    hash: str = DEFAULT, overwrite: bool = False, single_writer: bool = False, group: Any = ALL,
    threads: int | None = None, listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
) -> Saved:  # fmt: skip
    """Save a state as a checkpoint at `url`; returns when it is committed and durable.

    `state`: a dict of sections (`{"model": model, "optimizer": optimizer, "step": 3}`), a flat state_dict, or a Module.
    Tensors, Modules, Optimizers, schedulers and anything else with `state_dict` may stand in it, and plain data. It is
    not changed.
    `url`: a folder that is made (its parent must exist), or one without a checkpoint; or a URL such as
    `s3://bucket/prefix`; or several of them, over which the shards are striped, the index lying in the first.
    `step`: the training step, kept in the index. `shards`: number of files in all, at least one for weights and one for
    other tensors; or `shard_bytes`, the size to aim at; default: a sixteenth of the state, 64 MiB to 4 GiB.
    `layout`: `balanced`, `round_robin` or `by_group` with `group_by`, a callable on paths or a list of patterns.
    `hash`: `xxh3_128` finds damage, `sha256` also forgery (with `load(expect=)`).
    `overwrite`: replace the checkpoint that is there; readers see the old or the new one.
    `single_writer`: nobody else saves there; only for stores that can't tell two savers apart.
    `group`: the process group whose ranks save together; None: this process alone.
    `threads`: default one for each core, 8 at most. `listener` gets events; default: the logger `shardstore`.

    Raises UnsupportedState before a byte is written for what can't be stored; CheckpointExists where a checkpoint is;
    StoreError where the store fails, with what was written removed again; CommitUnknown where the store did not answer.
    """
    options = Options(ShardOptions(layout, shards, shard_bytes, group_by), step, hash, threads)
    ranks_of(group)
    with no_gc():
        return save_to(
            tree.flatten(state), url, options, overwrite=overwrite, single_writer=single_writer, listener=listener,
            storage_options=storage_options,
        )  # fmt: skip


def save_to(
    flat: tree.Flat, url: Urls, options: Options, *, overwrite: bool, single_writer: bool, listener: Listener | None,
    storage_options: Mapping[str, Any] | None,
) -> Saved:  # fmt: skip
    """Save a flattened state at a place, whose stores are opened for it."""
    stores = open_roots(url, storage_options=storage_options, listener=listener)
    try:
        return save_flat(
            flat, stores, options, overwrite=overwrite, single_writer=single_writer,
            listener=to_log if listener is None else listener,
        )  # fmt: skip
    finally:
        close_all(stores)


def save_flat(
    flat: tree.Flat, stores: Sequence[Store], options: Options, *,
    overwrite: bool, single_writer: bool, listener: Listener, before_commit: Callable[[], None] = lambda: None,
) -> Saved:  # fmt: skip
    """Save a flattened state, whose tensors stay as they are meanwhile.

    `before_commit` is called last before the point of no return; what it raises ends the save, with its files removed.
    """
    began = time.perf_counter()
    home, *_ = stores = _prepared(stores, single_writer=single_writer)
    stores, replaced = _look(stores, overwrite=overwrite)
    reporter = Reporter("save", home.url, listener)
    attempt = Attempt(flat, options, stores, reporter)
    reporter.started(attempt.nbytes, len(attempt.files))
    with _Cleanup(stores, attempt) as cleanup, Marks(stores, attempt.id) as marks:
        attempt.write()
        index = attempt.index(replaced)
        marks.renew()
        check_written(stores, index)
        data = dump(index)
        if replaced:
            supersede(stores, replaced.index)  # now: who dies after the commit leaves no files without a mark
        if len(stores) > 1:
            marks.make_lasting()
        before_commit()
        cleanup.no_return()
        commit(stores[0], index.attempt, data, replaced.version if replaced else None, single_writer=single_writer)
    tidy_up(stores, index, data, replaced, reporter)
    reporter.finished()
    return Saved(home.url, options.step, sha256(data).hexdigest(), index.nbytes, time.perf_counter() - began)


def _prepared(stores: Sequence[Store], *, single_writer: bool) -> Sequence[Store]:
    """The stores, once they have found out what they can promise. Raises InvalidArgument where that is too little."""
    for store in stores:
        store.prepare()
    can = stores[0].capabilities
    if not can.exclusive and not single_writer:
        raise InvalidArgument(
            f"{stores[0].url} can't keep two savers from overwriting each other ({can.why}): "
            "say single_writer=True if nobody else saves there"
        )
    return stores


def _look(stores: Sequence[Store], *, overwrite: bool) -> tuple[Sequence[Store], Found | None]:
    """The roots in order, and what lies there. Raises CheckpointExists unless it may be replaced."""
    if overwrite:
        return find_roots(stores)
    for store in stores:
        if _occupied(store):
            raise CheckpointExists(f"{store.url} holds a checkpoint already: choose another place, or overwrite=True")
    return stores, None


def _occupied(store: Store) -> bool:
    try:
        store.stat(NAME)
    except KeyMissing:
        return False
    return True


class _Cleanup:
    """Removes an attempt's files if the save fails before its commit was called; never afterwards."""

    def __init__(self, stores: Sequence[Store], attempt: Attempt) -> None:
        self._stores, self._attempt = stores, attempt
        self._returnable = True

    def __enter__(self) -> Self:
        return self

    def no_return(self) -> None:
        """From here on a failure leaves every file, since the commit may have happened."""
        self._returnable = False

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        # a definite no: the files can't be needed
        lost = isinstance(error, CheckpointExists) or getattr(error, "definite", False)
        if error is None or not (self._returnable or lost):
            return
        with contextlib.suppress(ShardstoreError):  # the marks go last, so that `prune` finds what could not go
            for file in self._attempt.files:
                self._stores[file.root].delete(file.key)
            for store in self._stores:
                store.delete(mark_name(self._attempt.id))
