"""`shardstore verify`: every byte of a checkpoint, or of all below a place."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from shardstore.check import CheckpointReport, Problem, Report
from shardstore.check import verify as verify_all
from shardstore.cli import _errors, _program
from shardstore.cli._output import count, leftover_json, put, put_json, shown, size
from shardstore.cli._progress import watching
from shardstore.errors import Unfinished
from shardstore.run import resolve


@_program.command("verify")
@_program.roots_argument
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read; one for each core, 8 at most."
)
@_program.json_option
def command(urls: tuple[str, ...], *, threads: int | None, as_json: bool) -> int:
    """Check every byte of the checkpoints at or below URL; or of one that is striped over several URLs.

    URL may be RUN@STEP or RUN@latest.

    Names every file, block and tensor that is damaged, saves that did not finish, what they left, and foreign files.
    """
    began = time.perf_counter()
    with watching() as listener:
        where = urls if len(urls) > 1 else resolve(urls[0], listener=listener)
        report = verify_all(where, threads=threads, listener=listener)
    if as_json:
        put_json(_document(report))
    else:
        put(*_text(report, time.perf_counter() - began))
    return report.exit_code


def _state(found: CheckpointReport) -> str:
    if isinstance(found.error, Unfinished):
        return "unfinished"
    if found.error is not None:
        return "unreadable"
    return "damaged" if found.problems else "whole"


def _document(report: Report) -> dict[str, Any]:
    found = [_checkpoint(one) for one in report.checkpoints]
    return {"url": report.url, "ok": report.ok, "exit_code": report.exit_code, "checkpoints": found}


def _checkpoint(found: CheckpointReport) -> dict[str, Any]:
    return {
        "url": found.url, "state": _state(found), "exit_code": found.exit_code, "attempt": found.attempt,
        "step": found.step, "bytes": found.nbytes, "files": found.files, "tensors": found.tensors,
        "problems": [
            {"kind": p.kind, "file": p.file, "message": p.message, "blocks": p.blocks, "tensors": p.tensors}
            for p in found.problems
        ],
        "leftovers": [leftover_json(left) for left in found.leftovers],
        "foreign": found.foreign,
        "error": _errors.as_json(found.error) if found.error else None,
    }  # fmt: skip


def _text(report: Report, seconds: float) -> Iterator[str]:
    states = Counter[str]()
    for found in report.checkpoints:
        states[_state(found)] += 1
        yield from map(shown, _lines(found))
    nbytes = sum(found.nbytes for found in report.checkpoints)
    totals = ", ".join(f"{number:,} {state}" for state, number in states.items())
    rate = f"{size(nbytes)} in {seconds:.2f} s, {size(int(nbytes / seconds))}/s"
    yield f"{count(len(report.checkpoints), 'checkpoint')}: {totals}; {rate}"


def _lines(found: CheckpointReport) -> Iterator[str]:
    what = f"{count(found.tensors, 'tensor')} in {count(found.files, 'file')}, {size(found.nbytes)}"
    step = "" if found.step is None else f"step {found.step}, "
    unfinished = "no index yet; a save is under way there, or died"
    said = unfinished if isinstance(found.error, Unfinished) else found.error or f"{step}{what}"
    yield f"{found.url}: {_state(found)}; {said}"
    for problem in found.problems:
        yield f"  {_problem(problem)}"
        yield from (f"    {tensor}" for tensor in problem.tensors)
    for left in found.leftovers:
        yield f"  leftover {left.attempt}: {count(len(left.keys), 'file')}, {size(left.nbytes)}; {left.why}"
    if found.foreign:
        yield f"  note: not of shardstore, not checked: {', '.join(found.foreign)}"


def _problem(problem: Problem) -> str:
    """What is wrong with a file; its tensors follow on lines of their own."""
    if problem.kind == "damaged" and problem.tensors:
        return f"{problem.file}: damaged in {_blocks(problem.blocks)} (of 4 MiB, from 0)"
    return problem.message


def _blocks(numbers: Sequence[int]) -> str:
    """`block 3`, `blocks 0, 7-12`."""
    ranges = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return f"block{'s' * (len(numbers) > 1)} {', '.join(ranges)}"
