"""Reads every byte of checkpoints and says what is wrong, by file, block and tensor."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from shardstore import header, strictjson
from shardstore.check.find import attempts_in, find_index, places
from shardstore.check.leftovers import Leftover, plan_leftovers
from shardstore.check.striped import need_roots
from shardstore.errors import (
    Damaged,
    InvalidArgument,
    KeyMissing,
    ShardstoreError,
    StoreError,
    Unfinished,
    brief,
    exit_code,
)
from shardstore.events import Listener, Reporter, to_log
from shardstore.hashing import DIGEST_BYTES, BlockHasher
from shardstore.header import Stored
from shardstore.index import HF_NAME, MAX_BYTES, NAME, FileEntry, Index, header_name, origin_of, weight_map
from shardstore.schemas import META
from shardstore.specs import DTYPES
from shardstore.storage import Store, Urls, close_all, join, open_roots
from shardstore.transfer import damaged, in_parallel

Kind: TypeAlias = Literal["index", "missing", "size", "damaged", "digest", "header", "meta", "derived", "unreadable"]
_RESTARTS = 4
META_MAX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file. `blocks`: numbers of bad 4 MiB blocks; `tensors`: paths that lie there."""

    kind: Kind
    file: str
    message: str
    blocks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(slots=True)
class CheckpointReport:
    """What `verify` found at one place. `error`: why there is no checkpoint to verify. `leftovers` harm nothing."""

    url: str
    attempt: str | None = None
    step: int | None = None
    nbytes: int = 0
    files: int = 0
    tensors: int = 0
    problems: list[Problem] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    error: ShardstoreError | None = None

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is whole: every byte that it names is there and right."""
        return not self.problems and self.error is None

    @property
    def exit_code(self) -> int:
        """0 whole, 3 damaged, else the code of `error`."""
        if self.error is not None:
            return exit_code(self.error)
        return Damaged.exit_code if self.problems else 0


@dataclass(slots=True)
class Report:
    """What `verify` found, for each checkpoint at or below a place."""

    url: str
    checkpoints: list[CheckpointReport]

    @property
    def ok(self) -> bool:
        """Whether every checkpoint is whole. Unfinished saves beside whole checkpoints make it False, too."""
        return all(checkpoint.ok for checkpoint in self.checkpoints)

    @property
    def exit_code(self) -> int:
        """The worst of all: 3 damaged before 4 unfinished before the others."""
        codes = {checkpoint.exit_code for checkpoint in self.checkpoints}
        return next((code for code in (3, 4, *sorted(codes - {0})) if code in codes), 0)


def verify(
    url: Urls, *, threads: int | None = None, listener: Listener | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Read and check every byte of the checkpoint at `url`, or of all checkpoints below it.

    Several URLs are the roots of one striped checkpoint, in any order.
    Raises CheckpointNotFound where there is none at all; damage is reported, not raised.
    """
    listener = to_log if listener is None else listener
    threads_of(threads)
    stores = open_roots(url, storage_options=storage_options, listener=listener)
    home = stores[0].url
    try:
        if len(stores) > 1:
            return Report(home, [verify_store(stores, threads_of(threads, stores), listener)])
        found = places(stores[0])
    finally:
        close_all(stores)
    reports = []
    for place in found:
        inner = open_roots(join(home, place) if place else url, storage_options=storage_options, listener=listener)
        try:
            reports.append(verify_store(inner, threads_of(threads, inner), listener))
        finally:
            close_all(inner)
    return Report(home, reports)


def default_threads() -> int:
    """Threads that move bytes where the caller does not say: one for each core that this process may use, 8 at most."""
    return min(8, len(os.sched_getaffinity(0)))


def threads_of(threads: int | None, stores: Sequence[Store] = (), *, background: bool = False) -> int:
    """The number of threads to use where the caller says `threads`. Raises InvalidArgument.

    None: as many as the connections that serve the stores best; without any, one for each core, and one in the
    background: beside steps that use all cores, each thread of lowest priority interrupts them as much again.
    """
    if threads is None:
        wanted = [store.capabilities.connections for store in stores]
        return max((count for count in wanted if count), default=1 if background else default_threads())
    if type(threads) is not int or not 1 <= threads <= 1024:  # noqa: PLR2004
        raise InvalidArgument(f"threads must be a whole number from 1 to 1024, not {brief(threads)}")
    return threads


def verify_store(stores: Sequence[Store], threads: int, listener: Listener) -> CheckpointReport:
    """Check the checkpoint at these roots; where it was replaced meanwhile, the one that is there now."""
    report = _verify_once(stores, threads, listener)
    for _ in range(_RESTARTS):
        if report.attempt is None or not report.problems or not _replaced(stores[0], report):
            break
        report = _verify_once(stores, threads, listener)
    return report


def _replaced(store: Store, report: CheckpointReport) -> bool:
    """Whether the index is another one by now, be it the same checkpoint's after a migration."""
    try:
        found = find_index(store)
    except ShardstoreError:
        return False  # what was found stands
    if found is None:
        return False
    names = {file.path for file in found.index.files}
    gone = any(problem.kind == "missing" and problem.file not in names for problem in report.problems)
    return gone or found.index.attempt != report.attempt


def _verify_once(stores: Sequence[Store], threads: int, listener: Listener) -> CheckpointReport:
    report = CheckpointReport(stores[0].url)
    try:
        stores, opened = need_roots(stores)
    except Damaged as error:
        report.problems.append(Problem("index", NAME, str(error)))
        return report
    except Unfinished as error:
        report.error = error
        report.leftovers = _leftovers(stores)
        return report
    except ShardstoreError as error:
        report.error = error
        return report
    index, report.url = opened.index, stores[0].url
    report.attempt, report.step, report.nbytes = index.attempt, index.step, index.nbytes
    report.files, report.tensors = len(index.files), len(index.paths)
    report.leftovers = _leftovers(stores)
    report.foreign = [entry.key for store in stores for entry in attempts_in(store)[1]]
    reporter = Reporter("verify", report.url, listener)
    reporter.started(index.nbytes, len(index.files))
    found: dict[int, list[Problem]] = {}

    def check(file: int) -> None:
        found[file] = verify_file(stores[index.files[file].root], index, file, reporter)

    in_parallel(check, sorted(range(len(index.files)), key=lambda f: -index.files[f].nbytes), threads)
    report.problems += [problem for file in sorted(found) for problem in found[file]]
    report.problems += _derived(stores[0], index)
    reporter.finished()
    return report


def _leftovers(stores: Sequence[Store]) -> list[Leftover]:
    try:
        return plan_leftovers(*stores)
    except InvalidArgument:
        return []  # a part of a striped save: what the others need is not known


def verify_file(store: Store, index: Index, file: int, reporter: Reporter) -> list[Problem]:
    """Check one file: its presence and size, each block, the whole, and what its header says."""
    entry = index.files[file]
    tensors = tuple(index.paths[tensor] for tensor in entry.pieces)
    try:
        found = store.stat(entry.path)
        if found.kind != "file":
            return [Problem("unreadable", entry.path, f"{entry.path} is no plain file", (), tensors)]
        if found.nbytes != entry.nbytes:
            return [_wrong_size(store, entry, found.nbytes, tensors)]
        return _contents(store, index, file, reporter)
    except KeyMissing:
        return [Problem("missing", entry.path, f"{entry.path} is missing", (), tensors)]
    except StoreError as error:
        return [Problem("unreadable", entry.path, str(error), (), tensors)]


def _wrong_size(store: Store, entry: FileEntry, nbytes: int, tensors: tuple[str, ...]) -> Problem:
    first = memoryview(bytearray(min(nbytes, 64)))
    store.read_into(entry.path, 0, [first])
    message = f"{entry.path} has {nbytes} bytes, {entry.nbytes} were saved{header.looks_like(first)}"
    return Problem("size", entry.path, message, (), tensors)


def _contents(store: Store, index: Index, file: int, reporter: Reporter) -> list[Problem]:
    entry, size = index.files[file], DIGEST_BYTES[index.hash]
    hasher = BlockHasher(index.hash, index.block)
    buffer = memoryview(bytearray(min(index.block, entry.nbytes)))
    bad, kept = [], bytearray()
    for number in range(-(-entry.nbytes // index.block)):
        begin = number * index.block
        block = buffer[: min(index.block, entry.nbytes - begin)]
        store.read_into(entry.path, begin, [block])
        if hasher.block(block) != entry.block_digest(number, size):
            bad.append(number)
        if begin < (entry.start or entry.nbytes):
            kept += block[: (entry.start or entry.nbytes) - begin]
        reporter.moved(len(block))
    if bad:
        error = damaged(index, file, bad)
        return [Problem("damaged", entry.path, str(error), error.blocks, error.tensors)]
    if hasher.finish()[0] != entry.digest:
        return [Problem("digest", entry.path, f"{entry.path}: its blocks are right, its whole digest is not")]
    return _meaning(index, file, bytes(kept))


def _meaning(index: Index, file: int, first: bytes) -> list[Problem]:
    """Whether a header says what the index says; whether meta is the one of this checkpoint."""
    entry = index.files[file]
    if entry.start is None:
        why = _wrong_meta(index, first)
        return [Problem("meta", entry.path, f"{entry.path} {why}")] if why else []
    try:
        size = header.length(first, entry.path, entry.nbytes)
        if size + struct.calcsize("<Q") != entry.start:
            return [Problem("header", entry.path, f"{entry.path}: its header does not end where the index says")]
        shown, _ = header.parse(first[8:], entry.path, entry.nbytes)
    except Damaged as error:
        return [Problem("header", entry.path, str(error), (), error.tensors)]
    return [] if shown == _expected(index, file) else [
        Problem("header", entry.path, f"{entry.path}: its header names other tensors than the index"),
    ]  # fmt: skip


def _wrong_meta(index: Index, data: bytes) -> str:
    """What is wrong with the frame of a meta. What stands in its skeleton, only a load can tell, which has torch."""
    try:
        meta = strictjson.loads(data, limit=META_MAX_BYTES)
    except strictjson.BadJson as error:
        return f"is no JSON: {error}"
    if not isinstance(meta, dict) or not META.reads(meta.get("schema")):
        return "has a schema that this version of shardstore does not know"
    return "" if meta.get("attempt") == index.attempt else "belongs to another checkpoint"


def _expected(index: Index, file: int) -> dict[str, Stored]:
    entry = index.files[file]
    parts = index.parts.get(file, {})
    expected = {}
    for position, (tensor, offset, nbytes) in enumerate(index.extents(file)):
        spec = index.specs[tensor]
        dtype = DTYPES[spec.dtype]
        shape = parts[position].shape if position in parts else spec.shape
        begin = offset - (entry.start or 0)
        expected[header_name(index, file, tensor)] = Stored(
            dtype.tag, tuple(dtype.stored_shape(shape)), begin, begin + nbytes
        )
    return expected


def _derived(store: Store, index: Index) -> Sequence[Problem]:
    """Only for other tools; nothing of the checkpoint depends on it. One that another save left is a leftover."""
    try:
        found = store.get(HF_NAME, limit=MAX_BYTES).data
    except KeyMissing:
        return []
    except StoreError as error:
        return [Problem("unreadable", HF_NAME, str(error))]
    if found == weight_map(index) or origin_of(found, index.attempt) in ("stale", "foreign"):
        return []
    return [Problem("derived", HF_NAME, f"{HF_NAME}, which is derived from the index, does not match it")]
