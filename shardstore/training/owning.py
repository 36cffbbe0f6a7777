"""Taking a run over: on every rank the state is checked, and rank 0 makes the run and owns it from then on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from shardstore.run import Policy, Run
from shardstore.training.checks import check_room
from shardstore.training.crew import Crew
from shardstore.training.keeping import Keeping
from shardstore.training.saver import Lead, Place


def take_over(
    run: Run, crew: Crew, policies: Sequence[Policy], threads: int | None, plan: Callable[[], int]
) -> tuple[Place, Lead | None]:
    """Make the run, and own it. `plan`: checks this rank's state, and returns the bytes of a checkpoint.

    Returns where this owner's saves stand, and on rank 0 what it has beside. Raises what `plan` raises; StoreError.
    """
    lead: Lead | None = None
    nbytes = 0

    def check() -> list[str]:
        nonlocal nbytes
        nbytes = plan()
        return []

    def own() -> list[str | int]:
        nonlocal lead
        check_room(run, nbytes)
        run.create()
        owner = run.take_owner()
        lead = Lead(owner, Keeping(run, policies, threads))
        seq = run.next_seq()
        owner.keep_alive()
        return [run.id, owner.epoch, seq, secrets.token_hex(16)]

    crew.hear("start", check)
    return Place(*crew.decide("own", own)), lead  # type: ignore[arg-type]
