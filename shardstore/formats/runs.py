"""Imports as runs, from which `shardstore.training.Checkpointer` resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from shardstore import tree
from shardstore.errors import CheckpointExists, CheckpointNotFound, Damaged, UnsupportedState
from shardstore.events import to_log
from shardstore.formats.naming import numbered
from shardstore.formats.port import Foreign, Options
from shardstore.formats.position import SECTION, section, seeded
from shardstore.hashing import DEFAULT
from shardstore.memory import no_gc
from shardstore.plan import ShardOptions
from shardstore.run import Owner, Run, folder_name
from shardstore.saving import Lineage, new_attempt, save_flat
from shardstore.saving import Options as SaveOptions

Opener = Callable[[], AbstractContextManager[Foreign]]


def save_as_run(url: str, opened: Sequence[Opener], options: Options) -> None:
    """Make a new run of checkpoints, which come in the order of their steps, with losses and sidecars of the last one.

    Raises CheckpointExists where a run is.
    """
    with Run(url, options.storage_options, listener=options.listener) as run, ExitStack() as until_done:
        _refuse_run(run)
        owner: Owner | None = None
        parent: str | None = None
        recorded = -1
        for open_one in opened:
            with open_one() as found:
                step = _step(found, options)
                state = _resumable(found, step)
                if owner is None:
                    owner = _begin(run, until_done)
                recorded = _record(run, found, recorded)
                state[SECTION] |= {"losses": run.log.reference()}
                parent = _save(run, owner, state, step, parent, options)
                for name, value in found.sidecars.items():
                    run.sidecar(name).write(value)


def _begin(run: Run, until_done: ExitStack) -> Owner:
    run.create()
    owner = until_done.enter_context(run.take_owner())
    owner.keep_alive()
    return owner


def _record(run: Run, found: Foreign, recorded: int) -> int:
    """Add the losses after a step to the history; returns the last step that is there now."""
    for at, loss in found.losses.items():
        if at > recorded:
            run.record_loss(at, loss)
    run.log.flush()
    return max(recorded, *found.losses, -1)


def _refuse_run(run: Run) -> None:
    try:
        there = run.info
    except CheckpointNotFound:
        return
    if not there.committed and not run.checkpoints():  # an import that failed: nothing is lost
        return
    raise CheckpointExists(f"{run.url} is the run {there.run} already, and nothing is overwritten: choose a new place")


def _step(found: Foreign, options: Options) -> int:
    step = options.step if options.step is not None else found.step
    if step is None:
        why = "a checkpoint of a run has a step, and none is known: give --step"
        raise UnsupportedState(f"{found.url}: {why}", path="step")
    return step


def _resumable(found: Foreign, step: int) -> dict[str, Any]:
    """The state with the section that tells where the training stands. Raises UnsupportedState."""
    if not isinstance(found.state, dict):
        raise UnsupportedState(f"{found.url}: a training's state is a dict of sections", path="")
    for name, value in found.state.items():
        if numbered(value):
            why = "the names of its parameters can't be told for certain, and Checkpointer needs them: give a layout"
            raise UnsupportedState(f"{found.url}: {name}: {why}", path=str(name))
    state = {name: value for name, value in found.state.items() if name != "step"}
    place = state.get(SECTION)
    if not isinstance(place, dict):
        found.notes.append(
            f"it says nothing of random states and of the place in the data: they are as after seeding with {step}, at "
            "the start of an epoch"
        )
        place = section(step, 0, 0, seeded(step % 2**32))
    elif place.get("step") != step:
        why = f"its training stands at step {place.get('step')}, not at {step}"
        raise UnsupportedState(f"{found.url}: {why}", path=SECTION)
    return {**state, SECTION: dict(place)}


def _save(run: Run, owner: Owner, state: Any, step: int, parent: str | None, options: Options) -> str:
    attempt = new_attempt()
    lineage = Lineage(run.id, owner.epoch, run.next_seq(), parent)
    how = SaveOptions(ShardOptions(), step, DEFAULT, attempt=attempt, lineage=lineage)
    with no_gc(), run.opened(folder_name(step, attempt)) as store:
        save_flat(
            tree.flatten(state), [store], how, overwrite=False, single_writer=False,
            listener=to_log if options.listener is None else options.listener, before_commit=owner.check,
        )  # fmt: skip
    report = run.verify(attempt)
    if not report.ok:
        raise Damaged(f"{report.url} was written, and does not read back: {report.problems[0].message}")
    run.commit_hint(step, attempt)
    return attempt
