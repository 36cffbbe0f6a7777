"""`shardstore plot`: the loss curves of runs, with what happened on the way."""

from __future__ import annotations

from typing import Any

import click

from shardstore.cli import _program
from shardstore.cli._drawing import Curve, draw
from shardstore.cli._output import complain, count, put, put_json, remark, shown
from shardstore.cli._runs import plain
from shardstore.run import Run


@_program.command("plot")
@click.argument("urls", nargs=-1, required=True, metavar="RUN [RUN...]")
@click.option("--output", "-o", default="losses.png", show_default=True, metavar="FILE", help="A .png or .svg file.")
@click.option("--metric", default="loss", show_default=True, help="Another recorded value than the loss.")
@_program.json_option
def command(urls: tuple[str, ...], *, output: str, metric: str, as_json: bool) -> int:
    """Draw the losses of runs in one picture: checkpoints, resumes, pivots and forks are marked.

    Needs matplotlib: pip install 'shardstore[plot]'.
    """
    if not output.endswith((".png", ".svg")):
        raise click.UsageError(f"{output!r} is neither a .png nor a .svg file.", click.get_current_context())
    curves = [_curve(url, metric) for url in urls]
    draw(curves, output, metric)
    if as_json:
        put_json({"file": output, "metric": metric, "runs": [_document(curve) for curve in curves], "exit_code": 0})
    else:
        put(*(shown(f"{curve.url}: {_words(curve)}") for curve in curves), shown(f"drawn to {output}"))
    return 0


def _curve(url: str, metric: str) -> Curve:
    with Run(url, listener=remark) as run:
        info = run.info
        losses = run.losses(metric)
        found = [one for one in run.checkpoints() if one.usable]
    if not losses:
        complain(f"{url}: nothing was recorded under the name {metric!r}")
    return Curve(url, info.run, losses, [one.step for one in found if one.line], info.origin)


def _document(curve: Curve) -> dict[str, Any]:
    steps = list(curve.losses)
    return {
        "url": curve.url, "run": curve.run, "values": len(steps),
        "first": steps[0] if steps else None, "last": steps[-1] if steps else None,
        "last_value": plain(curve.losses[steps[-1]]) if steps else None,
        "checkpoints": curve.checkpoints,
        "events": [{"kind": event.kind, "step": event.step} for event in curve.losses.events],
    }  # fmt: skip


def _words(curve: Curve) -> str:
    steps = list(curve.losses)
    span = f", steps {steps[0]} to {steps[-1]}" if steps else ""
    kinds = [event.kind for event in curve.losses.events]
    seen = "".join(f", {count(kinds.count(kind), kind)}" for kind in dict.fromkeys(kinds))
    return f"{count(len(steps), 'value')}{span}, {count(len(curve.checkpoints), 'checkpoint')}{seen}"
