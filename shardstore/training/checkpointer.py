"""`Checkpointer`: the three lines that make a training loop restartable."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from shardstore.errors import (
    CheckpointNotFound,
    CommitUnknown,
    InvalidArgument,
    PeerError,
    ShardstoreError,
    StoreError,
    brief,
)
from shardstore.events import Listener
from shardstore.hashing import DEFAULT
from shardstore.plan import GroupBy, Layout, ShardOptions
from shardstore.ranks import ALL
from shardstore.ranks.words import Wish
from shardstore.run import Policy, Run, RunCheckpoint, matches
from shardstore.run.names import SCHEMA, SECTION
from shardstore.saving import Options, Pending, Saved
from shardstore.training import rng
from shardstore.training.checks import check_sections, has_gradients, planned_bytes, positive
from shardstore.training.crew import Crew
from shardstore.training.keeping import check_policies
from shardstore.training.migrating import Migration, Schema
from shardstore.training.owning import take_over
from shardstore.training.position import Position, Skip
from shardstore.training.resuming import Reading, Resume, Verify, check_verify, differences
from shardstore.training.saver import Lead, Saver
from shardstore.training.signals import Preempted, Signals

T = TypeVar("T")
_FAILURES = (StoreError, CommitUnknown, PeerError)
_NO_LOG = {"epoch": 0, "lines": 0, "sha256": "0" * 64}


class Checkpointer:
    """Saves a training to a run, and brings it back. A context manager.

    `url`: the run folder or prefix, which is made; its parent must exist. `state`: a dict of sections, as in `save`;
    `shardstore` is the name of the section that is added. Plain values in it are read at each save.
    `every_steps`, `every_seconds`: when `step` saves, whichever comes first; the former at multiples of it.
    `keep`: policies; a checkpoint stays if any of them keeps it, all stay without one.
    `config`: plain data that is stored, and compared at a resume. `generators`: NumPy, torch or Python generators by
    name, besides the global ones.
    `schema`: a name for the structure of the state. `migrations`: by earlier schema, oldest first, a function from the
    state of that schema, as loaded data, to the state of the next one, the last to `schema`; others are refused.
    `verify_on_start`: read the checkpoint that is resumed from whole, or all of them, from the device before that.
    `background`: saves are written by a thread while training goes on. `max_failures`: how many periodic saves in a row
    may fail and be reported only. `stop_signals` end the training after the step with a save and `preempted_exit`;
    `save_signals` ask for a save. `grace_seconds`: after a stop signal, no save begins that won't fit.
    `shards` to `storage_options`: as in `save`. `group`: the process group that trains; all of its ranks make the same
    calls, rank 0 alone writes to the run folder, and they save, stop and resume together. With several ranks a signal
    to any of them, and `every_seconds`, act one step later on all.

    Construction makes the run, takes it over from any other process, and checks that all of the state can be stored,
    and that a file system has room for it once. Raises UnsupportedState, InvalidArgument, StoreError.
    """

    def __init__(  # noqa: PLR0913 - the public face: every argument but two has a default
        self, url: str | os.PathLike[str], state: dict[str, Any], *, every_steps: int | None = None,
        every_seconds: float | None = None, keep: Sequence[Policy] | Policy = (), config: Any = None,
        schema: str | None = None, migrations: Mapping[str | None, Migration] | None = None,
        verify_on_start: Verify = None, generators: Mapping[str, Any] | None = None, background: bool = False,
        max_failures: int = 3, stop_signals: Sequence[str] = ("SIGTERM",), save_signals: Sequence[str] = ("SIGUSR1",),
        preempted_exit: int = 143, grace_seconds: float | None = None, shards: int | None = None,
        shard_bytes: int | None = None, layout: Layout = "balanced", group_by: GroupBy | None = None,
        hash: str = DEFAULT, single_writer: bool = False, group: Any = ALL, threads: int | None = None,
        listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        options = Options(ShardOptions(layout, shards, shard_bytes, group_by), None, hash, threads)
        self._crew = Crew(group)
        self._every_steps = positive("every_steps", every_steps, int)
        self._every_seconds = positive("every_seconds", every_seconds, int, float)
        self._grace = positive("grace_seconds", grace_seconds, int, float)
        if type(max_failures) is not int or max_failures < 0:
            raise InvalidArgument(f"max_failures must be a whole number from 0 on, not {brief(max_failures)}")
        self._max_failures, self._exit_code, self._background = max_failures, preempted_exit, background
        self._config = config
        structure = Schema(schema, migrations or {})
        self._reading = Reading(structure, check_verify(verify_on_start), options.threads, listener, storage_options)
        self._signals = Signals(stop_signals, save_signals)
        policies = check_policies(keep)
        self.run = Run(url, storage_options, listener=listener, single_writer=single_writer)
        self._position = Position(rng.check_generators(generators), self._notice, self._crew)
        self._state, self._step = state, 0
        self._shards = options.shards
        place, self._lead = take_over(self.run, self._crew, policies, options.threads, self._plan)
        self._saver = Saver(self.run, place, self._crew, self._lead, options, listener, single_writer=single_writer)
        self._pending: Pending | None = None
        self._pending_step = 0
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._failures = 0
        self._resumed = self._closed = self._asked = False

    def _plan(self) -> int:
        """Check the state; returns the bytes of a checkpoint of it."""
        check_sections(self._state)
        return planned_bytes({**self._state, SECTION: self._section(_NO_LOG)}, self._shards)

    def _notice(self, what: str, *, warning: bool = True) -> None:
        """Tell what a person should know, once for all ranks."""
        if self._crew.leads:
            self.run.notice(what, warning=warning)

    # -- where it stands

    @property
    def completed(self) -> int:
        """The number of completed steps."""
        return self._step

    @property
    def epoch(self) -> int:
        """The number of completed epochs, as `batches` counts them: where the loop over epochs starts."""
        return self._position.epoch

    def _section(self, log: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "step": self._step, **self._position.section(), "losses": dict(log),
            "config": self._config, "user_schema": self._reading.schema.name,
        }  # fmt: skip

    # -- resume

    def resume(
        self, step: int | None = None, *, from_run: str | os.PathLike[str] | None = None, fallback: bool = True,
        reset: Sequence[str] = (),
    ) -> int:  # fmt: skip
        """Bring the state to where the run was saved last; returns the number of completed steps, 0 in a new run.

        To be called once, before the first step, when everything in the state has been built and seeded.
        `step`: the checkpoint of that step instead, be it older; what follows is a new line then. `from_run`: begin
        with a checkpoint of another run, unless this one has any. `fallback=False`: the newest or an error.
        `reset`: sections that are left as they are.

        What is passed over, damaged or unfinished, is told to the listener, with the steps that are lost by it.
        Raises CheckpointNotFound for a step or a run that isn't there; NothingToResume where the run has had
        checkpoints and none loads; Mismatch, also where no migrations lead to this schema; UnsupportedVersion,
        StoreError, and whatever else is no confirmed damage.
        """
        if self._resumed:
            raise InvalidArgument("resume() is called once, before the first step")
        unknown = [name for name in reset if name not in self._state]
        if unknown or isinstance(reset, str):
            raise InvalidArgument(f"reset= is a list of sections of the state; there is no {brief(unknown or reset)}")
        found = self._find(step, from_run, reset, fallback=fallback)
        if found is None:
            if self._lead is not None:
                self.run.log.event("start", 0)
        else:
            self._go_on(*found)
        self._resumed = True
        self._saved_at = time.monotonic()
        return self._step

    def _find(
        self, step: int | None, from_run: str | os.PathLike[str] | None, reset: Sequence[str], *, fallback: bool
    ) -> tuple[RunCheckpoint, dict[str, Any]] | None:
        if from_run is not None:
            other = Run(from_run, self._reading.storage_options, listener=self._reading.listener)
            with other:
                if self._crew.decide("from_run", lambda: self._wants(other)):
                    return self._read(other, step, reset, fallback=fallback)
            step = None
        return self._read(self.run, step, reset, fallback=fallback)

    def _wants(self, other: Run) -> bool:
        """Whether the training begins with another run's checkpoint: only as long as this run has none."""
        if not other.candidates():
            raise CheckpointNotFound(f"{other.url} has no checkpoint to begin with: check from_run=")
        return not self.run.info.committed and not self.run.candidates()

    def _read(
        self, run: Run, step: int | None, reset: Sequence[str], *, fallback: bool
    ) -> tuple[RunCheckpoint, dict[str, Any]] | None:
        resume = Resume(run, self._state, reset, self._reading, self._crew)
        if step is None:
            return resume.newest(fallback=fallback)
        one = RunCheckpoint(**self._crew.decide("step", lambda: dataclasses.asdict(run.at(step))))
        return one, resume.chosen(one)

    def _go_on(self, one: RunCheckpoint, section: dict[str, Any]) -> None:
        ours = one.url.startswith(f"{self.run.url}/")
        self._step = section["step"]
        self._position.restore(section)
        self._saved_step = self._step if ours else None
        if ours:
            self._saver.parent = one.attempt
        if self._lead is not None:
            self._report(self._lead, one, section, ours=ours)

    def _report(self, lead: Lead, one: RunCheckpoint, section: dict[str, Any], *, ours: bool) -> None:
        """On rank 0: what the run and a person are to know of a resume."""
        if ours:
            lead.keeping.begin(one.attempt)
        for line in differences(section["config"], self._config):
            self._notice(f"since step {self._step} was saved, {line}")
        if one.run == self.run.id and not matches(self.run.store, section["losses"]):
            self._notice("the loss history is not what the checkpoint refers to: lines were lost or changed")
        facts = {} if ours else {"run": one.run, "url": one.url}
        self.run.log.event("resume", self._step, attempt=one.attempt, **facts)

    # -- training

    def step(self, loss: Any = None, **values: Any) -> Saved | None:
        """Count a completed step, and save if that is due; to be called when optimizer and scheduler have stepped.

        `loss` and `values`, anything that `float` takes, are recorded. Returns what was saved, in the background at the
        first step after it was committed; else None. Raises Preempted after a stop signal, when that step is saved;
        Fenced where another process has taken the run over; StoreError when more than `max_failures` saves in a row
        have failed.
        """
        self._need_resumed()
        self._step += 1
        self._position.unstepped = 0
        recorded = {**({} if loss is None else {"loss": loss}), **values}
        if recorded and self._lead is not None:
            self._record(recorded)
        saved = None if self._crew.several else self._collect(wait=False)
        heard = self._crew.words.say(self._wish())
        if heard.stop:
            self._leave()
        if heard.save or (self._every_steps is not None and self._step % self._every_steps == 0):
            saved = self._periodic() or saved
        return saved

    def _wish(self) -> Wish:
        """What this rank wants now. A save is asked for once; of clocks, that of rank 0 counts."""
        late = self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds
        save, self._signals.save = self._signals.save, False
        timed = late and not self._asked and self._crew.leads
        self._asked = self._asked or timed
        return Wish(self._signals.stop_at is not None, save or timed)

    def _record(self, values: Mapping[str, Any]) -> None:
        try:
            plain = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
            self.run.log.record(self._step, plain)
        except StoreError as error:  # a full disk must not end the training; the next save says it again
            self._notice(f"the loss of step {self._step} could not be recorded: {error}")

    def save(self) -> Saved:
        """Save now, at the end of a step; returns when it is committed. Raises what `shardstore.save` raises."""
        self._need_resumed()
        if self._position.unstepped and has_gradients(self._state):
            raise InvalidArgument(
                f"{self._position.unstepped} batches were used since the last step(), and their gradients would be "
                "lost: save after step()"
            )
        self._collect(wait=True)
        return self._save_now()

    def batches(self, loader: Iterable[T], *, skip: Skip = "auto") -> Iterator[T]:
        """The batches of the present epoch; after a resume those that are left of it, with the same random numbers.

        `loader`: a DataLoader or another iterable that gives the same batches under the same random state.
        The batches that were used already are loaded again and thrown away, so that workers and samplers draw what they
        drew. A loader with `state_dict` and `load_state_dict` (torchdata's) goes to its place by these instead, unless
        its workers have drawn from their global generators; with `skip="replay"` it is treated as any other.
        """
        self._need_resumed()
        if any(value is loader for value in self._state.values()):
            raise InvalidArgument("batches() keeps the place in the loader itself: take it out of the state")
        return self._position.batches(loader, self._signals.handled, skip)

    def _need_resumed(self) -> None:
        if not self._resumed:
            raise InvalidArgument("call resume() first: without it, a run that was saved would start from zero")
        if self._closed:
            raise InvalidArgument("this Checkpointer is closed: nothing more is saved with it")

    def _periodic(self) -> Saved | None:
        try:
            if not self._background:
                return self._save_now()
            saved = self._collect(wait=True)
            self._saving()
            self._pending = self._saver.later(self._full(), self._step)
            self._pending_step = self._step
            return saved
        except _FAILURES as error:
            self._failed(error, self._step)
            return None

    def _saving(self) -> None:
        """From now on the time until the next save counts."""
        self._saved_at, self._asked = time.monotonic(), False

    def _full(self) -> dict[str, Any]:
        log = self._crew.decide("losses", lambda: self.run.log.reference())  # noqa: PLW0108 - only owners have a log
        return {**self._state, SECTION: self._section(log)}

    def _save_now(self) -> Saved:
        self._saving()
        return self._note(self._saver.now(self._full(), self._step), self._step)

    def _note(self, saved: Saved, step: int) -> Saved:
        self._saved_step, self._failures = step, 0
        return saved

    def _failed(self, error: ShardstoreError, step: int) -> None:
        """A periodic save has failed: tell it, and raise once there are too many in a row."""
        self._saving()
        self._failures += 1
        if self._failures > self._max_failures:
            raise error
        self._notice(f"the save of step {step} failed, training goes on ({self._failures} in a row): {error}")

    def _collect(self, *, wait: bool) -> Saved | None:
        """What the background save has made, if it has ended; with `wait`, when it has."""
        pending = self._pending
        if pending is None or not (wait or pending.done()):
            return None
        self._pending = None
        try:
            return self._note(pending.result(), self._pending_step)
        except _FAILURES as error:
            self._failed(error, self._pending_step)
            return None

    def _leave(self) -> None:
        """After a stop signal: save what is not saved yet, if there is time for it, and go."""
        self._collect(wait=True)
        if self._crew.decide("leave", self._has_time):
            self._save_now()
        raise Preempted(self._exit_code)

    def _has_time(self) -> bool:
        """Whether this step is to be saved yet, and that fits into what is left of the grace."""
        if self._saved_step == self._step:
            return False
        needed = self._saver.seconds
        passed = time.monotonic() - (self._signals.stop_at or time.monotonic())
        if self._grace is None or passed + needed <= self._grace:
            return True
        self._notice(f"step {self._step} is not saved: {needed:.1f} s are more than what is left of the grace")
        return False

    # -- the end

    def __enter__(self) -> Self:
        self._signals.install(self._notice)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
            else:
                self._wind_up()
        finally:
            self._signals.restore()
            self._close(quiet=error is not None)

    def _finish(self) -> None:
        """A clean end: the last step is saved, too."""
        self._collect(wait=True)
        if self._resumed and self._step not in (0, self._saved_step):
            self._save_now()

    def _wind_up(self) -> None:
        """After an error: nothing new is saved, the running save is finished, and the error is not masked."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as failed:  # noqa: BLE001 - the first error matters more
            self._notice(f"the save of step {self._pending_step} failed, too: {failed}")

    def _close(self, *, quiet: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            try:
                if self._lead is not None:
                    self._lead.owner.release()
            finally:
                self.run.close()
        except StoreError as error:
            self._notice(f"the run was not closed properly: {error}")
            if not quiet:
                raise

    def __repr__(self) -> str:
        return f"Checkpointer({self.run.url!r}, step {self._step})"
