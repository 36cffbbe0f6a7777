"""Which checkpoints of a run are kept: pure policies, and the rules that stand above them.

A checkpoint stays if any policy keeps it. Whatever the policies say, these stay, too: the newest, pinned ones, those in
quarantine, what is no committed checkpoint of this run, and all that no newer checkpoint replaces that was verified.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from shardstore.errors import InvalidArgument, brief
from shardstore.run.listing import RunCheckpoint

Mode: TypeAlias = Literal["min", "max"]
Kept: TypeAlias = Mapping[str, str]
"""Attempts that a policy keeps, each with the reason."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What policies may know. `now`: seconds since 1970. `values`: by attempt, what was recorded at its step."""

    now: float
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Policy(Protocol):
    """A rule for what is kept. `kept` gets the candidates, the newest first, what was left behind last."""

    def kept(self, checkpoints: Sequence[RunCheckpoint], facts: Facts) -> Kept: ...


def _count(value: object, what: str) -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{what} must be a whole number from 1 on, not {brief(value)}; without policies all stay")


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the `n` newest."""

    n: int

    def __post_init__(self) -> None:
        _count(self.n, "KeepLast(n)")

    def kept(self, checkpoints: Sequence[RunCheckpoint], facts: Facts) -> Kept:  # noqa: ARG002 the port's signature
        """The first `n`."""
        return {one.attempt: f"one of the last {self.n}" for one in checkpoints[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keeps the first checkpoint at or after each multiple of `steps`, but for what lies between 0 and `steps`.

    With saves at exact multiples, those are what is kept.
    """

    steps: int

    def __post_init__(self) -> None:
        _count(self.steps, "KeepEvery(steps)")

    def kept(self, checkpoints: Sequence[RunCheckpoint], facts: Facts) -> Kept:  # noqa: ARG002 the port's signature
        """The lowest step of each stretch; of two with the same step, the newer one."""
        first: dict[int, RunCheckpoint] = {}
        for one in checkpoints:
            stretch = one.step // self.steps
            if (stretch or one.step == 0) and (stretch not in first or one.step < first[stretch].step):
                first[stretch] = one
        return {one.attempt: f"the first from step {stretch * self.steps} on" for stretch, one in first.items()}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keeps the `n` with the lowest (`min`) or highest (`max`) value of a metric, recorded at their step.

    What has no value, or nan, is never among the best. Of equal ones the newer stays.
    """

    metric: str
    n: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        _count(self.n, "KeepBest(n)")
        if type(self.metric) is not str or not self.metric:
            raise InvalidArgument(f"KeepBest needs the name of a metric, not {brief(self.metric)}")
        if self.mode not in ("min", "max"):
            raise InvalidArgument(f"mode must be 'min' or 'max', not {brief(self.mode)}")

    def kept(self, checkpoints: Sequence[RunCheckpoint], facts: Facts) -> Kept:
        """The best ones."""
        values = {one.attempt: facts.values.get(one.attempt, {}).get(self.metric, math.nan) for one in checkpoints}
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((a for a, value in values.items() if not math.isnan(value)), key=lambda a: sign * values[a])
        return {a: f"one of the best {self.n}: {self.metric} is {values[a]:.6g}" for a in ranked[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepFor:
    """Keeps what is younger than `duration`: seconds, or a timedelta."""

    duration: float | dt.timedelta

    def __post_init__(self) -> None:
        if type(self.duration) not in {int, float, dt.timedelta}:
            raise InvalidArgument(f"KeepFor takes seconds or a timedelta, not {brief(self.duration)}")
        if not 0 < self.seconds < math.inf:
            raise InvalidArgument(f"KeepFor(duration) must be above 0, not {brief(self.duration)}")

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.duration.total_seconds() if isinstance(self.duration, dt.timedelta) else float(self.duration)

    def kept(self, checkpoints: Sequence[RunCheckpoint], facts: Facts) -> Kept:
        """What is young, and what does not say how old it is."""
        ages = {one.attempt: _age(one, facts.now) for one in checkpoints}
        return {a: f"younger than {self.seconds:g} s" for a, age in ages.items() if age < self.seconds}


def _age(one: RunCheckpoint, now: float) -> float:
    try:
        return now - dt.datetime.fromisoformat(one.time or "").timestamp()
    except (ValueError, OverflowError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a checkpoint stays, and why."""

    checkpoint: RunCheckpoint
    keep: bool
    reasons: tuple[str, ...]


def plan_retention(
    checkpoints: Sequence[RunCheckpoint], policies: Sequence[Policy], *, verified: Collection[str], facts: Facts,
    quarantined: bool = False,
) -> list[Decision]:  # fmt: skip
    """What stays and what may go, for each checkpoint of a listing, in its order. Nothing goes without a policy.

    `verified`: attempts that have been read back whole from the store. `quarantined`: let go those in quarantine, too.
    """
    ranked = sorted((one for one in checkpoints if one.usable), key=lambda one: (one.line, one.order), reverse=True)
    reasons: dict[str, list[str]] = {one.attempt: [] for one in ranked}
    for policy in policies:
        for attempt, why in policy.kept(ranked, facts).items():
            reasons.setdefault(attempt, []).append(why)
    newest = max(ranked, key=lambda one: one.order, default=None)
    safe = max((one.order for one in ranked if one.attempt in verified), default=None)
    rules = _Rules(bool(policies), newest, safe, quarantined)
    return [rules.judge(one, reasons.get(one.attempt, [])) for one in checkpoints]


@dataclass(frozen=True, slots=True)
class _Rules:
    """What stands above the policies. `safe`: the order of the newest verified checkpoint."""

    any_policy: bool
    newest: RunCheckpoint | None
    safe: tuple[int, int] | None
    quarantined: bool

    def judge(self, one: RunCheckpoint, wanted: Sequence[str]) -> Decision:
        reasons = [*wanted, *self._above(one)]
        if reasons:
            return Decision(one, keep=True, reasons=tuple(reasons))
        why = "in quarantine" if one.quarantined else "no policy keeps it"
        return Decision(one, keep=False, reasons=(why,))

    def _above(self, one: RunCheckpoint) -> list[str]:
        if one.state != "committed":
            return [f"{one.state}: not touched"]
        reasons = []
        if not self.any_policy:
            reasons.append("there is no policy")
        if self.newest is not None and one.attempt == self.newest.attempt:
            reasons.append("the newest")
        if one.pinned:
            reasons.append("pinned")
        if one.quarantined and not self.quarantined:
            reasons.append("in quarantine: kept until you let it go")
        if self.safe is None or one.order >= self.safe:
            reasons.append("no newer one has been verified")
        return reasons
