"""From a run to a state to go on from: the newest that is whole, and a report of what was passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from shardstore.check import CheckpointReport
from shardstore.errors import (
    CheckpointNotFound,
    Damaged,
    InvalidArgument,
    NothingToResume,
    ShardstoreError,
    UnsupportedVersion,
    brief,
)
from shardstore.events import Listener
from shardstore.loading import load
from shardstore.loading.source import Missing
from shardstore.run import Run, RunCheckpoint
from shardstore.run.names import SCHEMA, SECTION
from shardstore.training.keeping import DAMAGE, verify_uncached
from shardstore.training.migrating import Schema, migrate, put_into

Verify: TypeAlias = Literal["newest", "all"] | None


def check_verify(value: Any) -> Verify:
    """Which checkpoints are verified whole at the start. Raises InvalidArgument."""
    if value not in ("newest", "all", None):
        raise InvalidArgument(f"verify_on_start must be 'newest', 'all' or None, not {brief(value)}")
    verify: Verify = value
    return verify


@dataclass(frozen=True, slots=True)
class Reading:
    """How checkpoints are read at a resume."""

    schema: Schema
    verify: Verify
    threads: int | None
    listener: Listener | None
    storage_options: Mapping[str, Any] | None


@dataclass(slots=True)
class Resume:
    """One resume. `state`: what is filled; `reset`: sections of it that stay as they are."""

    run: Run
    state: dict[str, Any]
    reset: Sequence[str]
    reading: Reading
    passed: list[tuple[RunCheckpoint, str]] = field(default_factory=list)

    def load(self, one: RunCheckpoint) -> dict[str, Any]:
        """Fill the state from a checkpoint; returns the section that is ours. What is wrong is raised."""
        how: dict[str, Any] = {"group": None, "threads": self.reading.threads, "listener": self.reading.listener}
        how["storage_options"] = self.reading.storage_options
        section: dict[str, Any] = load(one.url, only=SECTION, **how)[SECTION]
        if section.get("schema") != SCHEMA:
            raise UnsupportedVersion(
                f"{one.url} was saved by a training of the schema {brief(section.get('schema'))}, {SCHEMA} is known "
                "here: use the version of shardstore that wrote it"
            )
        chain = self.reading.schema.chain(section["user_schema"], one.url)
        wanted = {name: value for name, value in self.state.items() if name not in self.reset}
        if not wanted:
            return section
        if chain:
            data = load(one.url, **how)
            del data[SECTION]
            self.state.update(put_into(migrate(data, chain), wanted))
            self.run.notice(
                f"the state of {one.name} was migrated from the schema {section['user_schema']!r} to "
                f"{self.reading.schema.name!r}",
                warning=False,
            )
        else:
            self.state.update(load(one.url, into=wanted, **how))
        return section

    def chosen(self, one: RunCheckpoint) -> dict[str, Any]:
        """Fill the state from the checkpoint that was asked for. What is wrong is raised."""
        if self.reading.verify is not None:
            self._examine(one)
        section = self.load(one)
        self._verify_others(one)
        return section

    def newest(self, *, fallback: bool) -> tuple[RunCheckpoint, dict[str, Any]] | None:
        """The newest checkpoint that loads. None where the run never had one.

        Raises NothingToResume where it had one and none loads; with `fallback=False` the error of the newest one; and
        whatever else happens but damage that was confirmed, and files that are missing.
        """
        everything, candidates = self.run.checkpoints(), self.run.candidates()
        self._look_over(everything, candidates, fallback=fallback)
        for one in candidates:
            section = self._try(one, fallback=fallback)
            if section is not None:
                self._report(one)
                self._verify_others(one)
                return one, section
        if candidates or self.passed or self.run.info.committed:
            why = "; ".join(f"{one.name}: {why}" for one, why in self.passed) or "all of them are gone"
            raise NothingToResume(
                f"{self.run.url} has had checkpoints, and none of them can be loaded ({why}). It does not start from "
                "zero by itself: repair or release one, or begin another run"
            )
        return None

    def _look_over(
        self, everything: Sequence[RunCheckpoint], candidates: Sequence[RunCheckpoint], *, fallback: bool
    ) -> None:
        """Note what is out of the question: checkpoints without whole index, or in quarantine, above the newest."""
        best = max(candidates, key=lambda one: one.order, default=None)
        for one in everything:
            if one.state == "unfinished":
                self.run.notice(f"{one.name} is unfinished and passed over: {one.why}", warning=False)
                continue
            quarantined = one.state == "committed" and one.quarantined and (best is None or one.order > best.order)
            if quarantined or (one.state == "damaged" and (best is None or one.step > best.step)):
                self.passed.append((one, "in quarantine" if quarantined else one.why))
        if self.passed and not fallback:
            one, why = self.passed[-1]
            raise Damaged(f"{one.url} can't be used, and fallback=False: {why}")

    def _try(self, one: RunCheckpoint, *, fallback: bool) -> dict[str, Any] | None:
        try:
            if self.reading.verify is not None:
                self._examine(one)
            return self.load(one)
        except (Missing, CheckpointNotFound) as error:  # unfinished: it may be whole later, so there is no mark
            if not fallback:
                raise
            self._pass(one, f"unfinished: {error}")
        except Damaged as error:
            report = verify_uncached(self.run, one, self.reading.threads)
            if report.ok:  # the first read went wrong, or the structure is beyond this version: then it raises again
                return self.load(one)
            kinds = {problem.kind for problem in report.problems}
            if isinstance(report.error, ShardstoreError) and not isinstance(report.error, Damaged):
                raise report.error from error
            if not fallback or "unreadable" in kinds:
                raise
            if kinds == {"missing"}:
                self._pass(one, f"unfinished: {error}")
            else:
                self._quarantine(one, report, error)
        return None

    def _examine(self, one: RunCheckpoint) -> None:
        """Read all of a checkpoint from the device before it is used. Raises Damaged, or what kept it from reading."""
        report = verify_uncached(self.run, one, self.reading.threads)
        if not report.ok:
            raise report.error or Damaged(
                f"{one.url}: {report.problems[0].message}", file=report.problems[0].file,
                tensors=report.problems[0].tensors,
            )  # fmt: skip

    def _verify_others(self, chosen: RunCheckpoint) -> None:
        """Where that is asked for: all others that could be resumed from one day. Damaged ones go into quarantine."""
        if self.reading.verify != "all":
            return
        passed = {one.attempt for one, _ in self.passed} | {chosen.attempt}
        for one in self.run.candidates():
            if one.attempt in passed or verify_uncached(self.run, one, self.reading.threads).ok:
                continue
            report = verify_uncached(self.run, one, self.reading.threads)
            if not report.ok:
                self._condemn(one, report)

    def _condemn(self, one: RunCheckpoint, report: CheckpointReport) -> None:
        """Tell of a checkpoint that is not whole, and put it into quarantine if it is damaged for sure."""
        why = report.problems[0].message if report.problems else str(report.error)
        if any(problem.kind in DAMAGE for problem in report.problems):
            self.run.quarantine(one, why)
            why = f"{why}; it is in quarantine now"
        self.run.notice(f"{one.name}, an older checkpoint, is not whole: {why}")

    def _quarantine(self, one: RunCheckpoint, report: CheckpointReport, error: Damaged) -> None:
        why = report.problems[0].message if report.problems else str(report.error or error)
        self.run.quarantine(one, why)
        self._pass(one, f"damaged, and now in quarantine: {why}")

    def _pass(self, one: RunCheckpoint, why: str) -> None:
        self.passed.append((one, why))
        self.run.notice(f"{one.name} is passed over: {why}")

    def _report(self, one: RunCheckpoint) -> None:
        if not self.passed:
            return
        lost = max(passed.step for passed, _ in self.passed) - one.step
        what = f"{lost} steps are lost and done again" if lost > 0 else "no step is lost"
        names = ", ".join(f"{passed.name} ({why})" for passed, why in self.passed)
        self.run.notice(f"resumed from the older step {one.step}: {what}; passed over: {names}")


def differences(old: Any, new: Any, at: str = "config") -> list[str]:
    """What differs between two trees of plain data, one line each."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        return [line for key in keys for line in _of_key(old, new, key, f"{at}.{key}")]
    if type(old) is type(new) and repr(old) == repr(new):
        return []
    return [f"{at} was {brief(old)}, and is {brief(new)} now"]


def _of_key(old: Mapping[Any, Any], new: Mapping[Any, Any], key: Any, at: str) -> list[str]:
    if key not in new:
        return [f"{at} was {brief(old[key])}, and is gone"]
    if key not in old:
        return [f"{at} is new: {brief(new[key])}"]
    return differences(old[key], new[key], at)
