"""One checkpoint after the other into a run: each in a new folder, under the owner's eyes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from shardstore.check import threads_of
from shardstore.errors import StoreError
from shardstore.events import Listener, to_log
from shardstore.hashing import digest
from shardstore.memory import no_gc
from shardstore.ranks import Ranks
from shardstore.run import Owner, Run, folder_name
from shardstore.saving import Lineage, Options, Pending, Saved, flattened, in_background, save_flat
from shardstore.training.crew import Crew
from shardstore.training.keeping import Keeping
from shardstore.tree import Flat

State = dict[str, object]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the saves of one owner stand: the run's id, the owner's epoch, the number of the first save.

    `secret`: from it and the number of a save all ranks make the same id for its attempt, which nobody else makes.
    """

    run: str
    epoch: int
    seq: int
    secret: str

    def attempt(self, seq: int) -> str:
        """The id of a save."""
        return digest("sha256", f"{self.secret}/{seq}".encode())[:8].hex()


@dataclass(frozen=True, slots=True)
class Lead:
    """What rank 0 has beside: it owns the run, and looks after older checkpoints."""

    owner: Owner
    keeping: Keeping


class Saver:
    """Saves states to a run, at once or in the background.

    `parent`: the attempt that the next one continues. `seconds`: what the last save at once took; those in the
    background don't count, since beside a training they take many times as long.
    """

    def __init__(
        self, run: Run, place: Place, crew: Crew, lead: Lead | None, options: Options, listener: Listener | None, *,
        single_writer: bool,
    ) -> None:  # fmt: skip
        self._run, self._place, self._crew, self._lead, self._options = run, place, crew, lead, options
        self._listener, self._single_writer = to_log if listener is None else listener, single_writer
        self._seq = place.seq
        self.parent: str | None = None
        self.seconds = 0.0

    def now(self, state: State, step: int) -> Saved:
        """Save a state; returns when it is committed, and older ones have been looked after."""
        work = self._work(step, self._crew.saving)
        with no_gc():
            saved = work(flattened(state, self._crew.saving))
        self.seconds = saved.seconds
        return saved

    def later(self, state: State, step: int) -> Pending:
        """Copy a state and save the copy on a thread."""
        ranks = self._crew.background
        work = self._work(step, ranks, background=True)
        pending = in_background(state, work, threads=threads_of(self._options.threads), ranks=ranks)
        if pending is None:
            raise StoreError("no background save could be started")
        return pending

    def _work(self, step: int, ranks: Ranks, *, background: bool = False) -> Callable[[Flat], Saved]:
        seq, self._seq = self._seq, self._seq + 1

        def work(flat: Flat) -> Saved:
            attempt = self._place.attempt(seq)
            lineage = Lineage(self._place.run, self._place.epoch, seq, self.parent)
            options = dataclasses.replace(
                self._options, step=step, attempt=attempt, lineage=lineage, background=background
            )
            with self._run.opened(folder_name(step, attempt)) as store:
                saved = save_flat(
                    flat, [store], options, ranks=ranks, overwrite=False, single_writer=self._single_writer,
                    listener=self._listener, before_commit=self._last_look,
                )  # fmt: skip
            self.parent = attempt
            if self._lead is not None:
                self._after(self._lead, step, attempt, background=background)
            return saved

        return work

    def _last_look(self) -> None:
        if self._lead is not None:
            self._lead.owner.check()
        self._run.log.flush()  # so that a checkpoint never refers to lines that are lost

    def _after(self, lead: Lead, step: int, attempt: str, *, background: bool) -> None:
        try:
            self._run.commit_hint(step, attempt)
        except StoreError as error:
            self._run.notice(f"step {step} is committed, but the hint after it failed: {error}")
        lead.keeping.after(step, attempt, background=background)
