"""`shardstore pivot`: starts the next generation of a run's sidecars."""

from __future__ import annotations

import dataclasses

from shardstore.cli import _program
from shardstore.cli._output import put, put_json, shown
from shardstore.cli._progress import watching
from shardstore.run import Run


@_program.command("pivot")
@_program.url_argument
@_program.json_option
def command(url: str, *, as_json: bool) -> int:
    """Let the run at URL turn at its newest checkpoint: sidecars begin anew, losses go on.

    The newest checkpoint is verified first. Refused while a living process holds the run. Nothing is moved or removed.
    """
    with watching() as listener, Run(url, listener=listener) as run:
        pivot = run.pivot().pivots[-1]
    if as_json:
        put_json({"url": url, **dataclasses.asdict(pivot), "exit_code": 0})
    else:
        put(shown(f"{url}: generation {pivot.generation} begins at step {pivot.step}"))
    return 0
