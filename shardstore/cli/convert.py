"""`shardstore convert`: a checkpoint of any format as one of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from shardstore.cli import _program
from shardstore.cli._output import put, put_json, shown
from shardstore.cli._progress import watching

_FORMATS = click.Choice(
    ["shardstore", "torch", "ckpt.v1", "flat", "flat-run", "huggingface", "safetensors", "dcp"]
)  # a test compares them with those that there are, which need torch


@_program.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--from", "from_format", type=_FORMATS, help="The format of SRC, where looking is not enough.")
@click.option("--to", "to_format", type=_FORMATS, help="The format of DST; else its name says it.")
@click.option("--layout", metavar="FILE", help="JSON with the names and shapes in a flat file, in their order.")
@click.option("--only", metavar="SECTION", multiple=True, help="Only this section of the state. Repeatable.")
@click.option("--dtype", metavar="DTYPE", help="Convert floating-point tensors, such as to bfloat16.")
@click.option("--step", type=click.IntRange(min=0), help="The step, where SRC doesn't say it.")
@click.option("--run", is_flag=True, help="Make DST a run, from which Checkpointer resumes.")
@click.option("--steps", default="newest", show_default=True, help="Of a folder of flat files: all, or 100,200.")
@click.option("--max-shard-bytes", type=click.IntRange(min=1), metavar="N", help="Bytes of each file of a folder.")
@_program.json_option
def command(  # noqa: PLR0913 - the options of the command
    source: str, target: str, *, from_format: str | None, to_format: str | None, layout: str | None,
    only: Sequence[str], dtype: str | None, step: int | None, run: bool, steps: str, max_shard_bytes: int | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Convert the checkpoint SRC, of any format, to DST, where nothing may be yet.

    Each may be a checkpoint of a store (SRC also RUN@STEP), a flat file (.bin), a file of torch.save (.pt), a
    .safetensors file, a Hugging Face or a DCP folder. Nothing in SRC is run as code, nothing is cast without --dtype,
    and what was written is read back. A folder of flat files becomes a run.
    """
    from shardstore.formats import convert

    with watching() as listener:
        made = convert(
            source, target, from_format=from_format, to_format=to_format, layout=layout, only=only, dtype=dtype,
            step=step, run=True if run else None, steps=_steps(steps), max_shard_bytes=max_shard_bytes,
            listener=listener,
        )  # fmt: skip
    if as_json:
        put_json({
            "url": made.url, "from": made.source, "to": made.target, "step": made.step, "notes": list(made.notes),
            "seconds": made.seconds, "exit_code": 0,
        })  # fmt: skip
    else:
        at = "" if made.step is None else f", step {made.step}"
        put(shown(f"{made.url}: {made.target} from {made.source}{at}; {made.seconds:.2f} s"))
    return 0


def _steps(text: str) -> Any:
    """`newest`, `all`, or a list of steps."""
    if text in ("newest", "all"):
        return text
    try:
        return [int(step) for step in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither newest, all, nor a list such as 100,200.") from None
