"""Forks: a checkpoint copied to a run of its own, which shares nothing with the first one that either could break."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardstore.check import Found, default_threads, mark_content, need_index
from shardstore.check.verifying import verify_file
from shardstore.errors import CheckpointExists, Damaged, InvalidArgument, ShardstoreError
from shardstore.events import Listener, Reporter
from shardstore.index import HF_NAME, FileEntry, mark_name, weight_map
from shardstore.index import NAME as INDEX
from shardstore.run import info as run_info
from shardstore.run import loss_log
from shardstore.run.documents import put_if
from shardstore.run.info import Origin, RunInfo
from shardstore.run.losses import Losses, event_line
from shardstore.run.names import parse_folder
from shardstore.run.removing import give_up
from shardstore.storage import Body, Bytes, LocalStore, Store, unwrap
from shardstore.transfer import in_parallel

_SLICE = 4 * 1024 * 1024


def check_free(new: Store, name: str) -> None:
    """That there is no run at a place, and no checkpoint but what an interrupted fork of `name` has left."""
    if run_info.read(new) is not None:
        raise CheckpointExists(f"{new.url} is a run already: choose another place")
    others = [folder for folder in new.folders() if parse_folder(folder) and folder != name]
    if others:
        raise CheckpointExists(f"{new.url} holds checkpoints already, such as {others[0]}: choose another place")


def copy_checkpoint(source: Store, target: Store, listener: Listener, *, single_writer: bool) -> Found:
    """Copy the checkpoint at one place to another, verify every byte that was written, and commit it there.

    Raises Damaged where source or copy are; CheckpointExists where another checkpoint is; StoreError.
    """
    found = need_index(source)
    index = found.index
    if index.roots > 1:
        raise InvalidArgument(f"{source.url} is spread over {index.roots} roots: it can't be forked")
    reporter = Reporter("save", target.url, listener)
    reporter.started(index.nbytes, len(index.files))
    target.put(mark_name(index.attempt), Bytes(mark_content(index.attempt, "writing")))
    try:
        in_parallel(lambda file: _copy(source, target, file), index.files, default_threads())
        _verify(target, found, reporter)
    except BaseException:
        _clean_up(target, found)
        raise
    if not put_if(target, INDEX, found.data, None, single_writer=single_writer):
        raise CheckpointExists(f"{target.url} holds another checkpoint already")
    derived = weight_map(index)
    if derived:
        target.put(HF_NAME, Bytes(derived))
    target.delete(mark_name(index.attempt))
    reporter.finished()
    return found


def _copy(source: Store, target: Store, file: FileEntry) -> None:
    local = unwrap(source)
    if isinstance(local, LocalStore):
        with local.body(file.path) as body:  # shares the blocks, where the file system can
            _put(target, file, body)
    else:
        _put(target, file, _Streamed(source, file))


def _put(target: Store, file: FileEntry, body: Body) -> None:
    if body.nbytes != file.nbytes:
        raise Damaged(f"{file.path} has {body.nbytes} bytes, {file.nbytes} were saved", file=file.path)
    target.put(file.path, body)


class _Streamed:
    """A file of a store as a body, read in slices while it is written."""

    def __init__(self, store: Store, file: FileEntry) -> None:
        self.nbytes = file.nbytes
        self._store, self._key = store, file.path

    def __iter__(self) -> Iterator[memoryview]:
        for at in range(0, self.nbytes, _SLICE):
            part = memoryview(bytearray(min(_SLICE, self.nbytes - at)))
            self._store.read_into(self._key, at, [part])
            yield part


def _verify(target: Store, found: Found, reporter: Reporter) -> None:
    problems = []

    def check(file: int) -> None:
        problems.extend(verify_file(target, found.index, file, reporter))

    in_parallel(check, range(len(found.index.files)), default_threads())
    if problems:
        raise Damaged(
            f"the copy in {target.url} is not what was saved: {problems[0].message}; `shardstore verify` on the first "
            "one tells more",
            file=problems[0].file, tensors=problems[0].tensors,
        )  # fmt: skip


def _clean_up(target: Store, found: Found) -> None:
    with contextlib.suppress(ShardstoreError):  # the mark goes last, so that `prune` finds what could not go
        for file in found.index.files:
            target.delete(file.path)
        target.delete(mark_name(found.index.attempt))
        give_up(target)


@contextlib.contextmanager
def losses_put(new: Store, origin: Origin, losses: Losses) -> Iterator[None]:
    """Write the history up to the fork as that of epoch 0, which no owner has; it goes if what follows fails.

    That comes first, so that the folder of the new run is made, in which that of the checkpoint can be made.
    """
    facts = {"from": origin.run, "url": origin.url, "attempt": origin.attempt, "time": origin.time}
    lines = [*losses.lines(origin.step), event_line("fork", origin.step, facts)]
    new.put(loss_log.log_name(0), Bytes(*lines))
    try:
        yield
    except BaseException:
        with contextlib.suppress(ShardstoreError):
            new.delete(loss_log.log_name(0))
        raise


def found_run(new: Store, origin: Origin, *, single_writer: bool) -> RunInfo:
    """Make a place with a copied checkpoint a run, by its run.json. Raises CheckpointExists where it is one."""
    made = RunInfo(run_info.new_id(), origin=origin, committed=True)
    if run_info.create(new, made, single_writer=single_writer) != made:
        raise CheckpointExists(f"{new.url} was made a run by another process at the same time")
    return made
