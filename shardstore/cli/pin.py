"""`shardstore pin`: keeps a checkpoint of a run, whatever retention says."""

from __future__ import annotations

import click

from shardstore.cli import _program
from shardstore.cli._output import put, put_json, remark, shown
from shardstore.run import Run, pick, split


@_program.command("pin")
@click.argument("checkpoint", metavar="RUN@STEP")
@click.option("--remove", is_flag=True, help="Leave it to retention again.")
@click.option("--reason", default="", help="Why, for those who come later.")
@_program.json_option
def command(checkpoint: str, *, remove: bool, reason: str, as_json: bool) -> int:
    """Keep a checkpoint of a run, whatever retention says.

    It is named by its step, its attempt, or `latest`: RUN@1000, RUN@latest.
    """
    found = split(checkpoint)
    if found is None:
        raise click.UsageError(
            f"{checkpoint!r} is not RUN@STEP, RUN@ATTEMPT or RUN@latest.", click.get_current_context()
        )
    with Run(found[0], listener=remark) as run:
        chosen = pick(run, found[1])
        one = run.unpin(chosen) if remove else run.pin(chosen, reason)
    if as_json:
        put_json({
            "url": one.url, "step": one.step, "attempt": one.attempt, "pinned": not remove, "exit_code": 0,
        })  # fmt: skip
    else:
        put(shown(f"{one.url} is {'no longer pinned' if remove else 'pinned'}"))
    return 0
