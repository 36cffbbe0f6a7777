"""`shardstore fork`: a run of its own that begins with a checkpoint of another one."""

from __future__ import annotations

import click

from shardstore.cli import _program
from shardstore.cli._output import put, put_json, shown
from shardstore.cli._progress import watching
from shardstore.run import Run, pick, split


@_program.command("fork")
@click.argument("checkpoint", metavar="RUN@STEP")
@click.argument("new", metavar="NEW")
@_program.json_option
def command(checkpoint: str, new: str, *, as_json: bool) -> int:
    """Make NEW a run that begins with a copy of a checkpoint, and with the losses up to there.

    The copy is verified. Where the file system can share blocks, it takes no room. Either run may be removed without
    harm to the other.
    """
    found = split(checkpoint)
    if found is None:
        raise click.UsageError(
            f"{checkpoint!r} is not RUN@STEP, RUN@ATTEMPT or RUN@latest.", click.get_current_context()
        )
    with watching() as listener, Run(found[0], listener=listener) as run:
        one = pick(run, found[1])
        with run.fork(one, new) as made:
            info = made.info
    if as_json:
        put_json({
            "url": new, "run": info.run, "origin": {"run": run.url, "step": one.step, "attempt": one.attempt},
            "exit_code": 0,
        })  # fmt: skip
    else:
        put(shown(f"{new} is the run {info.run}, forked from {run.url} at step {one.step}"))
    return 0
