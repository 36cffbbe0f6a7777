"""The checkpoints of a run: one listing, and the first bytes of each index. Ten thousand of them are no trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardstore.check import default_threads
from shardstore.errors import Damaged, KeyMissing, StoreError, StoreUnavailable, UnsupportedVersion
from shardstore.index import HEAD_BYTES, MAX_BYTES, Head, head_of, parse, read_head
from shardstore.index import NAME as INDEX
from shardstore.run import latest, marks
from shardstore.run.info import RunInfo
from shardstore.run.names import parse_folder
from shardstore.storage import Store, join
from shardstore.transfer import in_parallel

State: TypeAlias = Literal["committed", "unfinished", "damaged", "unsupported", "foreign"]
_REMOTE_THREADS = 32


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run, as its folder and the head of its index say.

    `state`: `committed`; `unfinished` without an index; `damaged` or `unsupported` where the head of the index can't be
    used; `foreign` where it is of another run. `why` says more. `line`: it leads to the newest checkpoint; False for
    what was left behind when training went on from an older step. `nbytes`: None unless asked for.
    """

    name: str
    url: str
    step: int
    attempt: str
    state: State = "committed"
    owner: int = 0
    seq: int = 0
    time: str | None = None
    parent: str | None = None
    run: str | None = None
    pinned: bool = False
    quarantined: bool = False
    line: bool = False
    nbytes: int | None = None
    why: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """By which checkpoints of a run are older and newer: owner epoch, then number of the save."""
        return self.owner, self.seq

    @property
    def usable(self) -> bool:
        """Whether it may be resumed from: committed, of this run, not in quarantine."""
        return self.state == "committed" and not self.quarantined


def scan(
    store: Store, url: str, info: RunInfo | None, *, sizes: bool = False, notice: Callable[[str], None] = lambda _: None
) -> list[RunCheckpoint]:
    """All checkpoints of a run: those that may be resumed from first, the newest last; then all others, by step.

    `sizes`: read each index whole, for its `nbytes`; an index that is damaged further down is found so, too. `notice`
    is told of what is odd. Raises StoreError where anything can't be read: a part of a listing would be a lie.
    """
    names = [name for name in store.folders() if parse_folder(name)]
    hinted, wrong = latest.read(store)
    if wrong:
        notice(f"{wrong}; the listing decides")
    missed = hinted is not None and hinted not in names
    marked = marks.read_all(store)
    found: list[RunCheckpoint] = []

    def look(name: str) -> None:
        one = _look(store, url, name, sizes=sizes)
        if one is not None:
            found.append(one)

    in_parallel(look, [*names, hinted] if missed and hinted else names, _threads(store))
    if missed and all(one.name != hinted for one in found):
        notice(f"{latest.NAME} names {hinted}, which is not there; the listing decides")
    return arrange(_judged(one, info, marked) for one in found)


def _threads(store: Store) -> int:
    return min(_REMOTE_THREADS, store.capabilities.connections or default_threads())


def _look(store: Store, url: str, name: str, *, sizes: bool) -> RunCheckpoint | None:
    """One folder; None where nothing is in it."""
    step, attempt = parse_folder(name) or (0, "")
    one = RunCheckpoint(name, join(url, name), step, attempt)
    try:
        head, nbytes = head_at(store, name, whole=sizes)
    except KeyMissing:
        if not any(True for _ in store.list(f"{name}/")):
            return None
        return dataclasses.replace(one, state="unfinished", why="no index yet: a save is under way there, or died")
    except (Damaged, UnsupportedVersion) as error:
        state: State = "damaged" if isinstance(error, Damaged) else "unsupported"
        return dataclasses.replace(one, state=state, why=str(error))
    if (head.attempt, head.step) != (attempt, step):
        why = f"the index in it is of step {head.step}, attempt {head.attempt}: a folder that was renamed or mixed up"
        return dataclasses.replace(one, state="damaged", why=why)
    return dataclasses.replace(
        one, owner=head.owner, seq=head.seq, time=head.time, parent=head.parent, run=head.run, nbytes=nbytes
    )


def head_at(store: Store, name: str, *, whole: bool = False) -> tuple[Head, int | None]:
    """The head of the index in a folder, and with `whole` the bytes of its files.

    Raises KeyMissing without an index; Damaged, UnsupportedVersion, StoreError. Without `whole` only the head is read.
    """
    key = f"{name}/{INDEX}"
    head = None if whole else _head(store, key)
    if head is not None:
        return head, None
    index = parse(store.get(key, limit=MAX_BYTES).data, key)
    return head_of(index), index.nbytes


def _head(store: Store, key: str) -> Head | None:
    buffer = bytearray(HEAD_BYTES)
    try:
        store.read_into(key, 0, [memoryview(buffer)])
    except (KeyMissing, StoreUnavailable):
        raise
    except StoreError:
        return None  # shorter than that, perhaps: reading it whole tells
    return read_head(buffer)


def _judged(one: RunCheckpoint, info: RunInfo | None, marked: marks.Marks) -> RunCheckpoint:
    state, why = one.state, one.why
    if state == "committed" and info is not None and not _is_ours(one, info):
        state, why = "foreign", f"it belongs to the run {one.run}"
    return dataclasses.replace(
        one, state=state, why=why, pinned=one.attempt in marked.pinned, quarantined=one.attempt in marked.quarantined
    )


def _is_ours(one: RunCheckpoint, info: RunInfo) -> bool:
    origin = info.origin
    return one.run == info.run or (origin is not None and (one.run, one.attempt) == (origin.run, origin.attempt))


def arrange(found: Iterable[RunCheckpoint]) -> list[RunCheckpoint]:
    """In order, with `line` set."""
    everything = list(found)
    usable = sorted((one for one in everything if one.usable), key=lambda one: (one.order, one.time or "", one.attempt))
    on_line = newest_line(usable)
    usable = [dataclasses.replace(one, line=one.attempt in on_line) for one in usable]
    return usable + sorted((one for one in everything if not one.usable), key=lambda one: (one.step, one.attempt))


def newest_line(usable: Iterable[RunCheckpoint]) -> set[str]:
    """Attempts of the checkpoints that lead to the newest one. `usable`: in order, the newest last.

    Each continues from its parent, and what came after that was left behind. Where the parent has been removed, its
    other children were left behind; and in any case all that has not a lower step.
    """
    line: list[RunCheckpoint] = []
    place: dict[str | None, int] = {}
    first_child: dict[str | None, int] = {}
    for one in usable:
        keep = place.get(one.parent, first_child.get(one.parent, len(line)) - 1) + 1 if one.parent else len(line)
        while line and (len(line) > keep or line[-1].step >= one.step):
            gone = line.pop()
            del place[gone.attempt]
            if first_child[gone.parent] == len(line):
                del first_child[gone.parent]
        place[one.attempt] = len(line)
        first_child.setdefault(one.parent, len(line))
        line.append(one)
    return {one.attempt for one in line}
