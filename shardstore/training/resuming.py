"""From a run to a state to go on from: the newest that is whole, and a report of what was passed over."""

from __future__ import annotations

import dataclasses
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
from shardstore.training.crew import Crew
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
    crew: Crew
    passed: list[tuple[RunCheckpoint, str]] = field(default_factory=list)
    _had: bool = False

    def load(self, one: RunCheckpoint) -> dict[str, Any]:
        """Fill the state from a checkpoint; returns the section that is ours. What is wrong is raised."""
        how: dict[str, Any] = {
            "group": self.crew.group,
            "threads": self.reading.threads,
            "listener": self.reading.listener,
        }
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
            self._notice(
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
            self.crew.decide("verify", lambda: self._examine(one))
        section = self.load(one)
        self.crew.decide("verify", lambda: self._verify_others(one))
        return section

    def newest(self, *, fallback: bool) -> tuple[RunCheckpoint, dict[str, Any]] | None:
        """The newest checkpoint that loads. None where the run never had one.

        Raises NothingToResume where it had one and none loads; with `fallback=False` the error of the newest one; and
        whatever else happens but damage that was confirmed, and files that are missing.
        """
        for told in self.crew.decide("candidates", lambda: self._survey(fallback=fallback)):
            one = RunCheckpoint(**told)
            section = self._try(one, fallback=fallback)
            if section is not None:
                self.crew.decide("report", lambda one=one: self._chose(one))  # type: ignore[misc]
                return one, section
        self.crew.decide("start", self._require_new)
        return None

    def _survey(self, *, fallback: bool) -> list[dict[str, Any]]:
        """On rank 0: what may be resumed from, the newest first."""
        everything, candidates = self.run.checkpoints(), self.run.candidates()
        self._look_over(everything, candidates, fallback=fallback)
        self._had = bool(candidates)
        return [dataclasses.asdict(one) for one in candidates]

    def _chose(self, one: RunCheckpoint) -> None:
        self._report(one)
        self._verify_others(one)

    def _require_new(self) -> None:
        """That the run never had a checkpoint."""
        if self._had or self.passed or self.run.info.committed:
            why = "; ".join(f"{one.name}: {why}" for one, why in self.passed) or "all of them are gone"
            raise NothingToResume(
                f"{self.run.url} has had checkpoints, and none of them can be loaded ({why}). It does not start from "
                "zero by itself: repair or release one, or begin another run"
            )

    def _notice(self, what: str, *, warning: bool = True) -> None:
        if self.crew.leads:
            self.run.notice(what, warning=warning)

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
        """Load on every rank; where one of them can't, none goes on with it."""
        section: dict[str, Any] = {}
        failed: ShardstoreError | None = None

        def work() -> list[str]:
            nonlocal section, failed
            try:
                if self.reading.verify is not None and self.crew.leads:
                    self._examine(one)
                section = self.load(one)
            except (Damaged, CheckpointNotFound) as error:
                failed = error
                return ["missing" if isinstance(error, Missing | CheckpointNotFound) else "damaged", str(error)]
            return []

        told = [found for found in self.crew.hear("load", work) if found]
        if not told:
            return section
        if self.crew.decide("judge", lambda: self._judge(one, failed, *told[0], fallback=fallback)):
            return self.load(one)
        return None

    def _judge(
        self, one: RunCheckpoint, failed: ShardstoreError | None, kind: str, text: str, *, fallback: bool
    ) -> bool:
        """On rank 0: whether to load it once more; if not, it is passed over, or what is wrong is raised."""
        error = failed or (Missing(text) if kind == "missing" else Damaged(text))
        if kind == "missing":  # unfinished: it may be whole later, so there is no mark
            if not fallback:
                raise error
            self._pass(one, f"unfinished: {error}")
            return False
        report = verify_uncached(self.run, one, self.reading.threads)
        if report.ok:  # the first read went wrong, or the structure is beyond this version: then it raises again
            return True
        kinds = {problem.kind for problem in report.problems}
        if isinstance(report.error, ShardstoreError) and not isinstance(report.error, Damaged):
            raise report.error from error
        if not fallback or "unreadable" in kinds:
            raise error
        if kinds == {"missing"}:
            self._pass(one, f"unfinished: {error}")
        else:
            self._quarantine(one, report, error)
        return False

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

    def _quarantine(self, one: RunCheckpoint, report: CheckpointReport, error: ShardstoreError) -> None:
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
