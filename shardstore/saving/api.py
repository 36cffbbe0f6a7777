"""`save`: from a state to a committed checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

import torch

from shardstore import header, tree
from shardstore._version import __version__
from shardstore.check import Found, default_threads, find_index
from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, ShardstoreError
from shardstore.events import Listener, Reporter, to_log
from shardstore.hashing import DEFAULT, known
from shardstore.index import NAME, FileEntry, Index, dump, mark_name
from shardstore.memory import no_gc, stream
from shardstore.plan import GroupBy, Layout, Shard, ShardOptions, Tensors, plan_shards
from shardstore.ranks import ALL, ranks_of
from shardstore.saving.after import supersede, tidy_up
from shardstore.saving.commit import Mark, check_written, commit, utc_now
from shardstore.specs import TensorSpec
from shardstore.storage import Store, open_store
from shardstore.transfer import HashedBody, put_all


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint. `digest`: the sha256 of its shardstore.json, which `load(expect=)` takes."""

    url: str
    step: int | None
    digest: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Options:
    """How a state is saved, checked at construction."""

    shards: ShardOptions
    step: int | None
    hash: str
    threads: int

    def __post_init__(self) -> None:
        if self.step is not None and not (type(self.step) is int and 0 <= self.step < 2**63):
            raise InvalidArgument(f"step must be a whole number from 0 on, or None, not {str(self.step)[:40]!r}")
        if not known(self.hash):
            raise InvalidArgument(f"hash must be 'xxh3_128' or 'sha256', not {self.hash!r}")
        if type(self.threads) is not int or not 1 <= self.threads <= 1024:  # noqa: PLR2004
            raise InvalidArgument(f"threads must be a whole number from 1 to 1024, not {self.threads!r}")


def save(  # noqa: PLR0913 - the public face: every argument but two has a default
    state: Any, url: str | os.PathLike[str], *, step: int | None = None, shards: int | None = None,
    shard_bytes: int | None = None, layout: Layout = "balanced", group_by: GroupBy | None = None,
    hash: str = DEFAULT, overwrite: bool = False, group: Any = ALL, threads: int | None = None,
    listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
) -> Saved:  # fmt: skip
    """Save a state as a checkpoint at `url`; returns when it is committed and durable.

    `state`: a dict of sections (`{"model": model, "optimizer": optimizer, "step": 3}`), a flat state_dict, or a Module.
    Tensors, Modules, Optimizers, schedulers and anything else with `state_dict` may stand in it, and plain data. It is
    not changed.
    `url`: a folder that is made (its parent must exist), or one without a checkpoint.
    `step`: the training step, kept in the index. `shards`: number of files in all, at least one for weights and one for
    other tensors; or `shard_bytes`, the size to aim at; default: a sixteenth of the state, 64 MiB to 4 GiB.
    `layout`: `balanced`, `round_robin` or `by_group` with `group_by`, a callable on paths or a list of patterns.
    `hash`: `xxh3_128` finds damage, `sha256` also forgery (with `load(expect=)`).
    `overwrite`: replace the checkpoint that is there; readers see the old or the new one.
    `group`: the process group whose ranks save together; None: this process alone.
    `threads`: default one for each core, 8 at most. `listener` gets events; default: the logger `shardstore`.

    Raises UnsupportedState before a byte is written for what can't be stored; CheckpointExists where a checkpoint is;
    StoreError where the store fails, with what was written removed again; CommitUnknown where the store did not answer.
    """
    options = Options(ShardOptions(layout, shards, shard_bytes, group_by), step, hash, threads or default_threads())
    if threads is not None:
        options = dataclasses.replace(options, threads=threads)
    ranks_of(group)
    with no_gc():
        flat = tree.flatten(state)
        store = open_store(url, storage_options=storage_options, listener=listener)
        try:
            return _save(flat, store, options, overwrite=overwrite, listener=listener or to_log)
        finally:
            store.close()


def _save(flat: tree.Flat, store: Store, options: Options, *, overwrite: bool, listener: Listener) -> Saved:
    began = time.perf_counter()
    replaced = _look(store, overwrite=overwrite)
    attempt = secrets.token_hex(8)
    paths, specs = [leaf.path for leaf in flat.leaves], [leaf.spec for leaf in flat.leaves]
    stored = (number for number in range(len(paths)) if number not in flat.aliases)
    shards = plan_shards(Tensors(paths, specs, stored), options.shards, attempt)
    reporter = Reporter("save", store.url, listener)
    bodies, starts = _bodies(flat, paths, specs, shards, options.hash, reporter)
    meta = tree.dump_meta(flat, attempt)
    bodies.append((f"state/meta-{attempt}.json", HashedBody(len(meta), lambda: [memoryview(meta)], options.hash)))
    reporter.started(sum(body.nbytes for _, body in bodies), len(bodies))
    with _Cleanup(store, [key for key, _ in bodies], attempt) as cleanup, Mark(store, attempt) as mark:
        put_all(store, bodies, options.threads)
        index = _index(attempt, options, paths, specs, flat.aliases, bodies, starts, shards, replaced)
        mark.renew()
        check_written(store, index)
        data = dump(index)
        if replaced:
            supersede(store, replaced.index)  # now, so that who dies after the commit leaves no files without a mark
        cleanup.no_return()
        commit(store, index.attempt, data, replaced.version if replaced else None)
    tidy_up(store, index, data, replaced, reporter)
    reporter.finished()
    return Saved(store.url, options.step, sha256(data).hexdigest(), index.nbytes, time.perf_counter() - began)


def _look(store: Store, *, overwrite: bool) -> Found | None:
    """What lies at the place. Raises CheckpointExists unless it may be replaced."""
    found = find_index(store) if overwrite else None
    if not overwrite and _occupied(store):
        raise CheckpointExists(f"{store.url} holds a checkpoint already: choose another place, or overwrite=True")
    return found


def _occupied(store: Store) -> bool:
    try:
        store.stat(NAME)
    except KeyMissing:
        return False
    return True


def _bodies(
    flat: tree.Flat, paths: list[str], specs: list[TensorSpec], shards: list[Shard], algorithm: str, reporter: Reporter
) -> tuple[list[tuple[str, HashedBody]], list[int]]:
    """For every shard its key and body, and where its data starts."""
    bodies, starts = [], []
    for shard in shards:
        head = header.build(zip(shard.names(paths), map(specs.__getitem__, shard.tensors), strict=True))
        tensors = [flat.leaves[number].tensor for number in shard.tensors]
        nbytes = len(head) + sum(specs[number].nbytes for number in shard.tensors)
        bodies.append((shard.path, HashedBody(nbytes, _Chunks(head, tensors), algorithm, reporter)))
        starts.append(len(head))
    return bodies, starts


class _Chunks:
    """Header and tensors of one shard as buffers, anew at each call."""

    def __init__(self, head: bytes, tensors: list[torch.Tensor]) -> None:
        self._head, self._tensors = head, tensors

    def __call__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        yield from stream(self._tensors)


def _index(  # noqa: PLR0913 - all that a save knows comes together here, once
    attempt: str, options: Options, paths: list[str], specs: list[TensorSpec], aliases: dict[int, int],
    bodies: list[tuple[str, HashedBody]], starts: list[int], shards: list[Shard], replaced: Found | None,
) -> Index:  # fmt: skip
    files = [FileEntry(key, body.nbytes, body.digest, body.blocks) for key, body in bodies]
    for entry, start, shard in zip(files, starts, shards, strict=False):
        entry.start, entry.pieces = start, shard.tensors
    table: dict[TensorSpec, int] = {}
    kinds = [table.setdefault(spec, len(table)) for spec in specs]
    return Index(
        attempt=attempt, time=utc_now(), hash=options.hash, files=files, meta=len(files) - 1, paths=paths,
        table=list(table), kinds=kinds, aliases=aliases, step=options.step,
        seq=replaced.index.seq + 1 if replaced else 0,
        parent=replaced.index.attempt if replaced else None,
        versions={"shardstore": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )  # fmt: skip


class _Cleanup:
    """Removes an attempt's files if the save fails before its commit was called; never afterwards."""

    def __init__(self, store: Store, keys: list[str], attempt: str) -> None:
        self._store, self._keys, self._mark = store, keys, mark_name(attempt)
        self._returnable = True

    def __enter__(self) -> Self:
        return self

    def no_return(self) -> None:
        """From here on a failure leaves every file, since the commit may have happened."""
        self._returnable = False

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        lost = isinstance(error, CheckpointExists)  # a definite no: the files can't be needed
        if error is None or not (self._returnable or lost):
            return
        with contextlib.suppress(ShardstoreError):  # the mark goes last, so that `prune` finds what could not go
            for key in [*self._keys, self._mark]:
                self._store.delete(key)
