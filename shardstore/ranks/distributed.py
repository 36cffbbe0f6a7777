"""Ranks over torch.distributed: a gloo group of our own, in which every rank talks with rank 0 alone.

A star, since gloo then tells rank 0 at once which rank died, and the others can still be told; in its collectives a
rank waits for neighbours that wait themselves. Where a rank stands is also noted in the store of the process group, so
that a time-out can name those who did not come.

The group is made from gloo itself: the names that `new_group` finds depend on how many other groups a process has,
and so must not be left to ranks that have failed at different times or belong to different groups.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardstore.errors import InvalidArgument, PeerError, ShardstoreError, brief
from shardstore.ranks.messages import LOST, OK, OURS, OVER, THEIRS, pack, text_of, unpack
from shardstore.ranks.port import Alone, Answer, Ranks, Work

TIMEOUT = "SHARDSTORE_TIMEOUT_SECONDS"
"""The environment variable with the seconds for which a rank waits for the others."""

_DEFAULT_SECONDS = 1800.0
_SHOWN = 16
_GRACE_SECONDS = 60.0  # longer than rank 0 waits, so that its answer says who is missing
_PATIENCE_SECONDS = 5.0  # for what rank 0 leaves in the store when it gives up

_Message = tuple[int, bytes]


def seconds() -> float:
    """For how long a rank waits for the others in each phase. Raises InvalidArgument for nonsense in the variable."""
    text = os.environ.get(TIMEOUT)
    if text is None:
        return _DEFAULT_SECONDS
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 10**7:
            return float(text)
    raise InvalidArgument(f"{TIMEOUT} must be a number of seconds above 0, not {brief(text)}")


def distributed(group: Any, purpose: str) -> Ranks:
    """The ranks of a process group of torch's; None for all, or for this process alone where there are none."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is None:
            return Alone()
        raise InvalidArgument("group= is given, but torch.distributed is not initialised: call init_process_group()")
    world = dist.group.WORLD if group is None else group
    try:
        size, rank = dist.get_world_size(world), dist.get_rank(world)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(f"group must be a process group of torch.distributed, not {brief(group)}") from error
    if rank < 0:
        raise InvalidArgument("this process is not a member of group=: only its members call")
    if size == 1:
        return Alone()
    return Star(world, rank, size, purpose)


@dataclass
class _Line:
    """The group over which one purpose of one process group talks."""

    tag: str
    group: Any
    calls: int = 0


# By process group and purpose. A group of torch's that is destroyed takes its lines along: its threads must not live to
# see the interpreter end, which aborts the process.
_lines: MutableMapping[Any, dict[str, _Line]] = weakref.WeakKeyDictionary()
atexit.register(_lines.clear)
_turns: dict[str, int] = {}  # by name: the last line that this rank has made, or tried to


class Star:
    """Several ranks in one call; rank 0 in the middle."""

    def __init__(self, world: Any, rank: int, size: int, purpose: str) -> None:
        self.rank = rank
        self.size = size
        self._group = weakref.ref(world)
        self._purpose = purpose
        self._mine: _Line | None = None

    @property
    def _world(self) -> Any:
        world = self._group()
        if world is None:
            raise InvalidArgument("the process group has been destroyed")
        return world

    def members(self) -> Sequence[int]:
        """The global number of every rank of the group."""
        return list(dist.get_process_group_ranks(self._world))

    def prepare(self) -> Any:
        """Make the group, which waits for all ranks at the first time; returns gloo's (a Backend of torch's)."""
        return self._line("start").group

    def share(self, phase: str, work: Work, answer: Answer) -> bytes:
        """See `Ranks`."""
        mine: _Message = (OK, b"")
        error: BaseException | None = None
        try:
            mine = (OK, work())
        except BaseException as raised:  # noqa: BLE001 - raised again below, when the others have been told
            error, mine = raised, (LOST, pack(raised))
        if error is not None and not isinstance(error, Exception):
            with contextlib.suppress(Exception):  # an interrupt is not held up by who is to be told
                self._tell(phase, mine, answer)
            raise error
        try:
            status, body = self._tell(phase, mine, answer)
        except ShardstoreError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        if status != OK:
            raise unpack(body, phase, theirs=status == THEIRS)
        return body

    def _tell(self, phase: str, mine: _Message, answer: Answer) -> _Message:
        line = self._line(phase)
        line.calls += 1
        self._note(line.tag, line.calls)
        try:
            told = self._middle(line, phase, mine, answer) if self.rank == 0 else self._end(line, phase, mine)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._forget()  # an interrupted talk would be taken up in its middle
            raise
        if told[0] == OVER:
            self._forget()
        return told

    def _end(self, line: _Line, phase: str, mine: _Message) -> _Message:
        """Other ranks: tell rank 0, and hear its answer."""
        began, limit, sent = time.monotonic(), seconds(), False
        try:
            _send(line, 0, mine)
            sent = True
            limit += _GRACE_SECONDS
            return _expect(line, 0, limit)()
        except RuntimeError as error:
            self._forget()
            raise self._cut_off(line, phase, error, sent=sent, late=time.monotonic() - began >= limit) from error

    def _cut_off(self, line: _Line, phase: str, error: Exception, *, sent: bool, late: bool) -> PeerError:
        """The error for a rank that can't hear rank 0 any more. `sent`: rank 0 may have gone on with our result."""
        said = self._given_up(line.tag, _PATIENCE_SECONDS)
        if said is None or (said.settled and not self._given_up_at(line)):
            absent = self._absent(line.tag, line.calls) if late else []
            why = str(error).split("] ", 1)[-1].partition(". This is")[0][:160]
            gone = self._error(phase, [0], f"can't be heard any more ({why})")
            said = self._late(phase, absent) if absent else gone
            self._give_up(line.tag, said)
        said.lost = sent and not said.settled
        return said

    # ------------------------------------------------------------------------------------- rank 0

    def _middle(self, line: _Line, phase: str, mine: _Message, answer: Answer) -> _Message:
        """Rank 0: hear everybody, answer everybody who is still there."""
        began, limit = time.monotonic(), seconds()
        results, heard, gone = [mine], [0], []
        coming = [(rank, _expect(line, rank, limit)) for rank in range(1, self.size)]
        for rank, hear in coming:
            try:
                results.append(hear())
                heard.append(rank)
            except RuntimeError:
                gone.append(rank)
        if gone:
            left = self._left(line, phase, gone, late=time.monotonic() - began >= limit)
            raised: BaseException | None = left
            outcome = OVER, pack(left)
        else:
            outcome, raised = self._outcome(phase, results, answer)
        for rank in heard[1:]:
            with contextlib.suppress(RuntimeError):  # who has gone meanwhile needs no answer
                _send(line, rank, outcome)
        if raised is not None:
            raise raised
        return outcome

    def _outcome(
        self, phase: str, results: Sequence[_Message], answer: Answer
    ) -> tuple[_Message, BaseException | None]:  # fmt: skip
        """The message to all, and what rank 0 itself raises."""
        bad = [(rank, body) for rank, (status, body) in enumerate(results) if status != OK]
        if bad:
            error = _peers_failed(phase, bad)
            return (OURS, pack(error)), error
        try:
            return (OK, answer([body for _, body in results])), None
        except BaseException as raised:  # noqa: BLE001 - raised again when the others have been told
            return (THEIRS, pack(raised)), raised

    def _left(self, line: _Line, phase: str, gone: list[int], *, late: bool) -> PeerError:
        """Give up, since ranks are gone. After a time-out gloo closes all: only the notes tell who was there."""
        self._forget()
        absent = sorted(set(gone).intersection(self._absent(line.tag, line.calls)))
        if absent and late:
            error = self._late(phase, absent)
        else:
            error = self._error(phase, absent or gone, "ended before it" if absent else "can't be heard any more")
        error.settled = True
        self._give_up(line.tag, error, line.calls)
        return error

    # ------------------------------------------------------------------------------------- the group

    def _line(self, phase: str) -> _Line:
        """The line of this call. One that a rank has given up on is left for a new one when a call begins."""
        if self._mine is None:
            lines = _lines.setdefault(self._world, {})
            found = lines.get(self._purpose)
            late = None if found is None else self._given_up(found.tag)
            if found is None or late is not None:
                found = self._assemble(phase, late)
            self._mine = lines[self._purpose] = found
        return self._mine

    def _assemble(self, phase: str, late: PeerError | None) -> _Line:
        """Make a line. Waits in the store until every rank is here, since gloo can't say who is missing."""
        limit, tag = timedelta(seconds=seconds()), self._tag(phase, late)
        self._note(tag, 0)
        try:
            store = _store()
            store.set(f"{tag}/begun", "")
            store.wait([f"{tag}/{rank}" for rank in range(self.size)], limit)
            group = dist.ProcessGroupGloo(_prefixed(store, f"{tag}/gloo"), self.rank, self.size, limit)
        except RuntimeError as error:
            absent = self._absent(tag, 0)
            others = [rank for rank in range(self.size) if rank != self.rank]
            gone = self._late(phase, absent) if absent else self._error(phase, others, "can't be reached")
            self._give_up(tag, gone)
            raise gone from error
        return _Line(tag, group)

    def _tag(self, phase: str, late: PeerError | None) -> str:
        """The name of the next line. Who comes to one that was given up is late, or has left a call out.

        In the latter case the others are at the next one. `late`: why the last one was given up.
        """
        members = self.members()
        name = f"shardstore/{self._purpose}/{members[0]}-{members[-1]}-{len(members)}-{hash(tuple(members)):x}"
        turn = _turns.get(name, 0) + 1
        while (said := self._given_up(f"{name}/{turn}")) is not None:
            turn, late = turn + 1, said
        if late is not None:
            _turns[name] = turn - 1
            try:
                _store().wait([f"{name}/{turn}/begun"], timedelta(seconds=min(_PATIENCE_SECONDS, seconds())))
            except RuntimeError:
                raise self._error(phase, [self.rank], f"comes too late: {late}") from None
        _turns[name] = turn
        return f"{name}/{turn}"

    def _forget(self) -> None:
        """Talk over a new group from now on: after a time-out gloo has closed this one."""
        self._mine = None
        world = self._group()
        if world is not None:
            _lines.get(world, {}).pop(self._purpose, None)

    # ------------------------------------------------------------------------------------- the store

    def _note(self, tag: str, calls: int) -> None:
        """Note where this rank stands: how many times it has talked over a line."""
        with contextlib.suppress(RuntimeError):  # only for messages; the process that holds the store may be gone
            _store().set(f"{tag}/{self.rank}", str(calls))

    def _absent(self, tag: str, calls: int) -> list[int]:
        """The ranks that do not stand so far yet."""
        absent = []
        with contextlib.suppress(RuntimeError):
            store = _store()
            for rank in range(self.size):
                key = f"{tag}/{rank}"
                if not store.check([key]) or int(store.get(key)) < calls:
                    absent.append(rank)
        return absent

    def _give_up(self, tag: str, error: PeerError, calls: int = 0) -> None:
        """Let nobody wait at this line any more. What rank 0 says counts. `calls`: at which call, if it is settled."""
        with contextlib.suppress(RuntimeError):
            if self.rank == 0 or not _store().check([f"{tag}/over"]):
                _store().set(f"{tag}/at", str(calls))
                _store().set(f"{tag}/over", pack(error))

    def _given_up_at(self, line: _Line) -> bool:
        """Whether rank 0 gave up this very call. Where that was a later one, it may have gone on with our result."""
        with contextlib.suppress(RuntimeError):
            return _store().check([f"{line.tag}/at"]) and int(_store().get(f"{line.tag}/at")) == line.calls
        return False

    def _given_up(self, tag: str, patience: float = 0) -> PeerError | None:
        """What was said when a line was given up."""
        key = f"{tag}/over"
        with contextlib.suppress(RuntimeError):
            store = _store()
            if patience:
                store.wait([key], timedelta(seconds=min(patience, seconds())))
            if patience or store.check([key]):
                said = unpack(store.get(key), "", theirs=False)
                return said if isinstance(said, PeerError) else None
        return None

    def _late(self, phase: str, ranks: Sequence[int]) -> PeerError:
        return self._error(
            phase, ranks, f"did not come to it within {seconds():g} s; every rank of the group must make the same "
            f"calls ({TIMEOUT} sets the time)",
        )  # fmt: skip

    def _error(self, phase: str, ranks: Sequence[int], what: str) -> PeerError:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:_SHOWN]))}"
        more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        text = f"{self._purpose}, phase {phase!r}: {who}{more} {what}"
        return PeerError(text, ranks=tuple(ranks), phase=phase)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way to the store of the process group


def _prefixed(store: Any, prefix: str) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _peers_failed(phase: str, bad: Sequence[tuple[int, bytes]]) -> PeerError:
    rank, body = bad[0]
    more = f" (and {len(bad) - 1} more ranks failed)" if len(bad) > 1 else ""
    return PeerError(
        f"rank {rank} failed in the phase {phase!r}: {text_of(body)}{more}",
        ranks=tuple(rank for rank, _ in bad), phase=phase, settled=True,
    )  # fmt: skip


def _send(line: _Line, to: int, message: _Message) -> None:
    status, body = message
    line.group.send([torch.tensor([status, len(body), line.calls], dtype=torch.int64, device="cpu")], to, 0).wait()
    if body:
        line.group.send([torch.frombuffer(bytearray(body), dtype=torch.uint8)], to, 0).wait()


def _expect(line: _Line, source: int, limit: float) -> Callable[[], _Message]:
    """Begin to listen; what is returned waits for the message. Both raise RuntimeError, the latter for both."""
    head = torch.zeros(3, dtype=torch.int64, device="cpu")
    try:
        coming = line.group.recv([head], source, 0)
    except RuntimeError as error:
        failure = error  # Python forgets `error` at the end of this block

        def fail() -> _Message:
            raise failure

        return fail

    def hear() -> _Message:
        coming.wait(timedelta(seconds=limit))
        status, nbytes, calls = head.tolist()
        if calls != line.calls:
            raise RuntimeError(f"rank {source} is at another call")
        body = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            line.group.recv([body], source, 0).wait()
        return status, body.numpy().tobytes()

    return hear
