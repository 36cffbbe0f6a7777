"""One checkpoint after the other into a run: each in a new folder, under the owner's eyes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shardstore.check import threads_of
from shardstore.errors import StoreError
from shardstore.events import Listener, to_log
from shardstore.memory import no_gc
from shardstore.run import Owner, Run, folder_name
from shardstore.saving import Lineage, Options, Pending, Saved, in_background, new_attempt, save_flat
from shardstore.training.keeping import Keeping
from shardstore.tree import Flat, flatten

State = dict[str, object]


class Saver:
    """Saves states to a run, at once or in the background. `parent`: the attempt that the next one continues."""

    def __init__(
        self, run: Run, owner: Owner, options: Options, keeping: Keeping, listener: Listener | None, *,
        single_writer: bool,
    ) -> None:  # fmt: skip
        self._run, self._owner, self._options, self._keeping = run, owner, options, keeping
        self._listener, self._single_writer = to_log if listener is None else listener, single_writer
        self._run_id, self._seq = run.id, run.next_seq()
        self.parent: str | None = None

    def now(self, state: State, step: int) -> Saved:
        """Save a state; returns when it is committed, and older ones have been looked after."""
        work = self._work(step)
        with no_gc():
            return work(flatten(state))

    def later(self, state: State, step: int) -> Pending:
        """Copy a state and save the copy on a thread."""
        pending = in_background(state, self._work(step), threads=threads_of(self._options.threads))
        if pending is None:
            raise StoreError("no background save could be started")
        return pending

    def _work(self, step: int) -> Callable[[Flat], Saved]:
        seq, self._seq = self._seq, self._seq + 1

        def work(flat: Flat) -> Saved:
            attempt = new_attempt()
            lineage = Lineage(self._run_id, self._owner.epoch, seq, self.parent)
            options = dataclasses.replace(self._options, step=step, attempt=attempt, lineage=lineage)
            with self._run.opened(folder_name(step, attempt)) as store:
                saved = save_flat(
                    flat, [store], options, overwrite=False, single_writer=self._single_writer,
                    listener=self._listener, before_commit=self._last_look,
                )  # fmt: skip
            self.parent = attempt
            self._after(step, attempt)
            return saved

        return work

    def _last_look(self) -> None:
        self._owner.check()
        self._run.log.flush()  # so that a checkpoint never refers to lines that are lost

    def _after(self, step: int, attempt: str) -> None:
        try:
            self._run.commit_hint(step, attempt)
        except StoreError as error:
            self._run.notice(f"step {step} is committed, but the hint after it failed: {error}")
        self._keeping.after(step, attempt)
