"""The loss history of a run: lines of many owners, merged into one value a step. Pure; `loss_log` reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardstore import strictjson
from shardstore.errors import InvalidArgument, brief

MAX_LINE = 64 * 1024
LOSS = "loss"
_CUTS = {"start", "resume"}
_RESERVED = {"step", "event"}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Values: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class LossEvent:
    """Something that happened at a step: `start`, `resume`, `pivot`, `fork`. `epoch`: of the owner, 0 for none."""

    kind: str
    step: int
    epoch: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The values of one step."""

    step: int
    values: Values


def line_of(step: int, values: Mapping[str, Any]) -> bytes:
    """One line of the log. Values are anything that `float` takes; nan and infinities become strings, as JSON wants."""
    _check_step(step)
    if not values:
        raise InvalidArgument("there is no value to record")
    return _line({"step": step, **{_name(name): _number(name, value) for name, value in values.items()}})


def event_line(kind: str, step: int, facts: Mapping[str, Any]) -> bytes:
    """One line of the log for an event. `facts` are plain JSON."""
    _check_step(step)
    return _line({"event": kind, "step": step, **facts})


def _line(members: Mapping[str, Any]) -> bytes:
    line = strictjson.dumps(members) + b"\n"
    if len(line) > MAX_LINE:
        raise InvalidArgument(f"a line of {len(line)} bytes is more than the {MAX_LINE} that a loss log takes")
    return line


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step < 2**63:
        raise InvalidArgument(f"a step is a whole number from 0 on, not {brief(step)}")


def _name(name: Any) -> str:
    if not isinstance(name, str) or name in _RESERVED:
        raise InvalidArgument(f"a value can't be named {brief(name)}")
    return str(name)


def _number(name: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"the value of {name!r} is no number: {brief(value)}") from error
    return number if math.isfinite(number) else str(number)


def parse_line(line: bytes | memoryview, epoch: int = 0) -> Recorded | LossEvent | None:
    """What a line says; None for one that was torn, or is damaged."""
    try:
        found = strictjson.loads(line, limit=MAX_LINE)
    except strictjson.BadJson:
        return None
    if not isinstance(found, dict):
        return None
    step, kind = found.pop("step", None), found.pop("event", None)
    if type(step) is not int or not 0 <= step < 2**63:
        return None
    if kind is not None:
        return LossEvent(kind, step, epoch, found) if isinstance(kind, str) else None
    values = {name: _SPECIAL.get(value) if isinstance(value, str) else value for name, value in found.items()}
    if not values or not all(type(value) in {int, float} for value in values.values()):
        return None
    return Recorded(step, {name: float(value) for name, value in values.items()})  # type: ignore[arg-type]


class Losses(Mapping[int, float]):
    """Step to loss, in the order of the steps, one value a step. Other values: `of(name)`, `names`.

    `events`: starts, resumes, pivots and forks, in the order in which they happened. `unread`: how many lines could not
    be understood, but for the torn ends that a dead process leaves.
    """

    def __init__(
        self, steps: list[int], rows: list[Values], events: Iterable[LossEvent], unread: int = 0, name: str = LOSS
    ) -> None:
        self._steps, self._rows = steps, rows
        self._values = {step: row[name] for step, row in zip(steps, rows, strict=True) if name in row}
        self.events = tuple(events)
        self.unread = unread

    def of(self, name: str) -> Losses:
        """The history of another value than the loss; empty where none has that name."""
        return Losses(self._steps, self._rows, self.events, self.unread, name)

    def with_events(self, more: Iterable[LossEvent]) -> Losses:
        """The same with more events."""
        return Losses(self._steps, self._rows, (*self.events, *more), self.unread)

    @property
    def names(self) -> list[str]:
        """The names of all values that were ever recorded."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def row(self, step: int) -> Values:
        """All values of a step, by name."""
        return dict(self._by_step.get(step, {}))

    @functools.cached_property
    def _by_step(self) -> dict[int, Values]:
        return dict(zip(self._steps, self._rows, strict=True))

    def lines(self, upto: int) -> Iterator[bytes]:
        """The history as lines of a log, up to a step, with the events that lie there."""
        events = sorted((event for event in self.events if event.step <= upto), key=lambda event: event.step)
        at = 0
        for step, row in zip(self._steps, self._rows, strict=True):
            while at < len(events) and events[at].step < step:
                yield _inherited(events[at])
                at += 1
            if step > upto:
                break
            yield line_of(step, row)
        for event in events[at:]:
            yield _inherited(event)

    def __getitem__(self, step: int) -> float:
        return self._values[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Losses({len(self)} steps, {len(self.events)} events)"


def _inherited(event: LossEvent) -> bytes:
    return event_line(event.kind, event.step, {**event.facts, "epoch": event.epoch})


def merge(records: Iterable[tuple[int, Recorded | LossEvent]], unread: int = 0) -> Losses:
    """One history from the lines of all owners: pairs of epoch and line, in the order of epochs and of writing.

    A start or resume at step s cuts off what lies after s; a value at step t replaces what lies at t and after.
    Values that one owner gives to the same step, one after the other, belong together.
    """
    steps: list[int] = []
    rows: list[tuple[int, Values]] = []
    events: list[LossEvent] = []

    def cut(beyond: Callable[[int], bool]) -> None:
        while steps and beyond(steps[-1]):
            steps.pop()
            rows.pop()

    for epoch, record in records:
        step = record.step
        if isinstance(record, LossEvent):
            events.append(record)
            if record.kind in _CUTS:
                cut(lambda last, step=step: last > step)  # type: ignore[misc]
            continue
        if steps and steps[-1] == step and rows[-1][0] == epoch:
            rows[-1][1].update(record.values)
            continue
        cut(lambda last, step=step: last >= step)  # type: ignore[misc]
        steps.append(step)
        rows.append((epoch, dict(record.values)))
    return Losses(steps, [row for _, row in rows], events, unread)
