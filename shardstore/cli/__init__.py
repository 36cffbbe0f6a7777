"""The command line: one module for each command, which parses, calls what lies below, and shows.

It imports no torch, so that it starts at once on a storage box. A new command is a module with a click command named
`command`, and one more name in the two lines below.
"""

from __future__ import annotations

import click

from shardstore._version import __version__
from shardstore.cli import convert, diff, fork, ls, migrate, pin, pivot, plot, prune, show, verify
from shardstore.cli._program import Program


@click.group(cls=Program)
@click.version_option(__version__, prog_name="shardstore")
def main() -> None:
    """Look after the checkpoints of PyTorch trainings: list, show, verify, clean up, fork, plot, convert and compare.

    A URL is a path, or a URL such as s3://bucket/run; a checkpoint of a run is RUN@STEP or RUN@latest. Every command
    takes --json, for scripts.
    """


for _module in (ls, show, verify, prune, pin, pivot, fork, plot, convert, diff, migrate):
    main.add_command(_module.command)
