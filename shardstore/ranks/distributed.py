"""Ranks over torch.distributed: a gloo group of our own, in which every rank talks with rank 0 alone.

A star, since gloo then tells rank 0 at once which rank died, and the others can still be told; in its collectives a
rank waits for neighbours that wait themselves. Where a rank stands is also noted in the store of the process group, so
that a time-out can name those who did not come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardstore.errors import InvalidArgument, PeerError, ShardstoreError, brief
from shardstore.ranks.messages import LOST, OK, OURS, THEIRS, pack, unpack
from shardstore.ranks.port import Alone, Answer, Ranks, Work

TIMEOUT = "SHARDSTORE_TIMEOUT_SECONDS"
"""The environment variable with the seconds for which a rank waits for the others."""

_DEFAULT_SECONDS = 1800.0
_SHOWN = 16
_GRACE_SECONDS = 60.0  # longer than rank 0 waits, so that its answer says who is missing


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


_lines: dict[tuple[int, str], _Line] = {}
_built: dict[str, int] = {}  # how many lines each tag has had


class Star:
    """Several ranks; rank 0 in the middle."""

    def __init__(self, world: Any, rank: int, size: int, purpose: str) -> None:
        self.rank = rank
        self.size = size
        self._world = world
        self._purpose = purpose

    def members(self) -> Sequence[int]:
        """The global number of every rank of the group."""
        return list(dist.get_process_group_ranks(self._world))

    def prepare(self) -> None:
        """Make the group, which waits for all ranks at the first time."""
        self._line("start")

    def share(self, phase: str, work: Work, answer: Answer) -> bytes:
        """See `Ranks`."""
        mine: tuple[int, bytes] = (OK, b"")
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

    def _tell(self, phase: str, mine: tuple[int, bytes], answer: Answer) -> tuple[int, bytes]:
        line = self._line(phase)
        line.calls += 1
        self._note(line.tag, f"{line.calls} {phase}")
        if self.rank == 0:
            return self._middle(line, phase, mine, answer)
        try:
            _send(line.group, self._peer(0), mine)
            return _receive(line.group, self._peer(0), seconds() + _GRACE_SECONDS)
        except RuntimeError as error:
            raise self._lost(line, phase, [0], error) from error

    def _middle(self, line: _Line, phase: str, mine: tuple[int, bytes], answer: Answer) -> tuple[int, bytes]:
        """Rank 0: hear everybody, answer everybody who is still there."""
        results, heard, gone = [mine], [0], {}
        heads = [(rank, *_expect(line.group, self._peer(rank))) for rank in range(1, self.size)]
        for rank, head, wait in heads:
            try:
                wait.wait(timedelta(seconds=seconds()))
                results.append(_body(line.group, self._peer(rank), head))
                heard.append(rank)
            except RuntimeError as error:
                gone[rank] = error
        bad = [(rank, body) for rank, (status, body) in zip(heard, results, strict=True) if status != OK]
        outcome, raised = self._outcome(line, phase, results, bad, gone, answer)
        for rank in heard[1:]:
            with contextlib.suppress(RuntimeError):  # who has gone meanwhile needs no answer
                _send(line.group, self._peer(rank), outcome)
        if gone:
            self._forget()
        if raised is not None:
            raise raised
        return outcome

    def _outcome(
        self, line: _Line, phase: str, results: list[tuple[int, bytes]], bad: list[tuple[int, bytes]],
        gone: dict[int, RuntimeError], answer: Answer,
    ) -> tuple[tuple[int, bytes], BaseException | None]:  # fmt: skip
        """The message to all, and what rank 0 itself raises."""
        if gone:
            lost = self._lost(line, phase, sorted(gone), next(iter(gone.values())))
            return (OURS, pack(lost)), lost
        if bad:
            error = _peers_failed(phase, bad)
            return (OURS, pack(error)), error
        try:
            return (OK, answer([body for _, body in results])), None
        except BaseException as raised:  # noqa: BLE001 - raised again when the others have been told
            return (THEIRS, pack(raised)), raised

    # ------------------------------------------------------------------------------------- the group

    def _line(self, phase: str) -> _Line:
        key = id(self._world), self._purpose
        found = _lines.get(key)
        if found is None:
            members = self.members()
            name = f"shardstore/{self._purpose}/{'-'.join(map(str, (members[0], members[-1], len(members))))}"
            name = f"{name}/{hash(tuple(members)) & 0xFFFFFFFF:x}"
            turn = _built[name] = _built.get(name, 0) + 1
            tag = f"{name}/{turn}"
            self._assemble(tag, phase)
            limit = timedelta(seconds=seconds())
            group = dist.new_group(list(members), timeout=limit, backend="gloo", use_local_synchronization=True)
            found = _lines[key] = _Line(tag, group)
        return found

    def _assemble(self, tag: str, phase: str) -> None:
        """Wait in the store until every rank is here, since the making of a group can't say who is missing."""
        self._note(tag, f"0 {phase}")
        store = _store()
        try:
            store.wait([f"{tag}/{rank}" for rank in range(self.size)], timedelta(seconds=seconds()))
        except (RuntimeError, dist.DistError) as error:
            absent = [rank for rank in range(self.size) if not store.check([f"{tag}/{rank}"])]
            raise self._missing(phase, absent, "has not come to it") from error

    def _forget(self) -> None:
        """Talk over a new group from now on: after a time-out gloo has closed this one."""
        _lines.pop((id(self._world), self._purpose), None)

    def _missing(self, phase: str, ranks: list[int], what: str, *, settled: bool = True) -> PeerError:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:_SHOWN]))}"
        more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        return PeerError(
            f"{self._purpose}, phase {phase!r}: {who}{more} {what}, waited for {seconds():g} s at most; every rank of "
            f"the group must make the same calls ({TIMEOUT} sets the seconds)",
            ranks=tuple(ranks), phase=phase, settled=settled,
        )  # fmt: skip

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self._world, rank)

    def _note(self, tag: str, where: str) -> None:
        with contextlib.suppress(RuntimeError):  # only for messages; the process that holds the store may be gone
            _store().set(f"{tag}/{self.rank}", where)

    def _lost(self, line: _Line, phase: str, silent: list[int], error: Exception) -> PeerError:
        """The error for ranks that can't be heard any more: those who have not come this far are to blame."""
        self._forget()
        absent = []
        with contextlib.suppress(RuntimeError):
            store = _store()
            for rank in range(self.size):
                at = store.get(f"{line.tag}/{rank}") if store.check([f"{line.tag}/{rank}"]) else b"0"
                if int(at.split()[0]) < line.calls:
                    absent.append(rank)
        if absent:  # so rank 0 can't have answered
            return self._missing(phase, absent, "has not come to it")
        why = str(error).split("] ", 1)[-1][:160]
        return self._missing(phase, silent, f"can't be heard any more ({why})", settled=self.rank == 0)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way to the store of the process group


def _peers_failed(phase: str, bad: Sequence[tuple[int, bytes]]) -> PeerError:
    rank, body = bad[0]
    more = f" (and {len(bad) - 1} more ranks failed)" if len(bad) > 1 else ""
    cause = unpack(body, phase, theirs=True)
    return PeerError(
        f"rank {rank} failed in the phase {phase!r}: {cause}{more}",
        ranks=tuple(rank for rank, _ in bad), phase=phase, settled=True,
    )  # fmt: skip


def _send(group: Any, to: int, message: tuple[int, bytes]) -> None:
    status, body = message
    dist.isend(torch.tensor([status, len(body)], dtype=torch.int64, device="cpu"), dst=to, group=group).wait()  # type: ignore[union-attr]
    if body:
        data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.isend(data, dst=to, group=group).wait()  # type: ignore[union-attr]


def _expect(group: Any, source: int) -> tuple[torch.Tensor, Any]:
    head = torch.zeros(2, dtype=torch.int64, device="cpu")
    return head, dist.irecv(head, src=source, group=group)


def _receive(group: Any, source: int, limit: float) -> tuple[int, bytes]:
    head, wait = _expect(group, source)
    wait.wait(timedelta(seconds=limit))
    return _body(group, source, head)


def _body(group: Any, source: int, head: torch.Tensor) -> tuple[int, bytes]:
    status, nbytes = head.tolist()
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes:
        dist.irecv(data, src=source, group=group).wait()  # type: ignore[union-attr]
    return status, data.numpy().tobytes()
