"""`shardstore prune` by policies: which checkpoints of a run stay, why, and the removal of the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from shardstore.cli._output import complain, count, put, put_json, shown
from shardstore.cli._progress import watching
from shardstore.errors import CheckpointNotFound, Damaged, InvalidArgument
from shardstore.run import Decision, KeepBest, KeepEvery, KeepFor, KeepLast, Policy, Run

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BEST = re.compile(r"([^:]+)(?::([0-9]+))?(?::(min|max))?")
T = TypeVar("T")


def _checked(make: Callable[[], T]) -> T:
    try:
        return make()
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from None


def _last(_context: click.Context, _parameter: click.Parameter, values: Sequence[int]) -> list[Policy]:
    return [_checked(lambda value=value: KeepLast(value)) for value in values]  # type: ignore[misc]


def _every(_context: click.Context, _parameter: click.Parameter, values: Sequence[int]) -> list[Policy]:
    return [_checked(lambda value=value: KeepEvery(value)) for value in values]  # type: ignore[misc]


def _best(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> list[Policy]:
    return [_checked(lambda value=value: _best_of(value)) for value in values]  # type: ignore[misc]


def _for(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> list[Policy]:
    return [_checked(lambda value=value: KeepFor(_duration(value))) for value in values]  # type: ignore[misc]


def _best_of(text: str) -> KeepBest:
    found = _BEST.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"{text!r} is not METRIC, METRIC:N or METRIC:N:max")
    return KeepBest(found[1], int(found[2] or 1), "max" if found[3] == "max" else "min")


def _duration(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if found is None:
        raise InvalidArgument(f"{text!r} is no time: a number and one of s, m, h, d, w, such as 7d")
    return float(found[1]) * _SECONDS[found[2]]


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that name policies."""
    for option in reversed((
        click.option("--keep-last", "last", type=int, metavar="N", multiple=True, callback=_last,
                     help="Keep the N newest."),
        click.option("--keep-every", "every", type=int, metavar="STEPS", multiple=True, callback=_every,
                     help="Keep the first at or after each multiple of STEPS."),
        click.option("--keep-best", "best", metavar="METRIC[:N[:min|max]]", multiple=True, callback=_best,
                     help="Keep the N (1) with the lowest (or highest) METRIC, such as loss:3."),
        click.option("--keep-for", "young", metavar="TIME", multiple=True, callback=_for,
                     help="Keep what is younger, such as 12h or 7d."),
        click.option("--quarantined", is_flag=True, help="Let checkpoints in quarantine go, too."),
    )):  # fmt: skip
        command = option(command)
    return command


@dataclass(slots=True)
class Done:
    """A decision, and what was done about it."""

    decision: Decision
    removed: bool = False
    errors: list[str] = field(default_factory=list)


def prune(url: str, policies: Sequence[Policy], *, quarantined: bool, yes: bool, as_json: bool) -> int:
    """Plan, and with `yes` remove; returns the exit code. Before anything goes, a newer checkpoint is verified."""
    with watching() as listener, Run(url, listener=listener) as run:
        verified, code = _verified(run) if yes else _supposed(run)
        plan = run.plan_retention(policies, verified=verified, quarantined=quarantined)
        done = [Done(decision) for decision in plan]
        for one in done if yes else ():
            if not one.decision.keep:
                one.errors = run.remove(one.decision.checkpoint)
                one.removed = not one.errors
    code = code or int(any(one.errors for one in done))
    if as_json:
        put_json({"url": url, "dry_run": not yes, "decisions": [_document(one) for one in done], "exit_code": code})
    else:
        _put_text(done, yes=yes)
    for one in done:
        for why in one.errors:
            complain(f"not removed: {why}")
    return code


def _supposed(run: Run) -> tuple[set[str], int]:
    """For a dry run the newest one is taken to be whole."""
    run.info  # noqa: B018 - raises where there is no run
    newest = run.newest()
    if newest is None:
        raise CheckpointNotFound(f"{run.url} has no checkpoint")
    return {newest.attempt}, 0


def _verified(run: Run) -> tuple[set[str], int]:
    """The newest checkpoint that is whole, every byte read, and the exit code: 3 if newer ones are damaged."""
    _supposed(run)
    code = 0
    for one in run.candidates():
        report = run.verify(one)
        if report.ok:
            return {one.attempt}, code
        code = Damaged.exit_code
        why = report.error or report.problems[0].message
        complain(f"{one.url} is not whole, so that nothing goes on its account: {why}")
    return set(), code


def _document(one: Done) -> dict[str, Any]:
    checkpoint = one.decision.checkpoint
    return {
        "path": checkpoint.name, "step": checkpoint.step, "attempt": checkpoint.attempt, "state": checkpoint.state,
        "keep": one.decision.keep, "reasons": one.decision.reasons, "removed": one.removed, "errors": one.errors,
    }  # fmt: skip


def _put_text(done: Sequence[Done], *, yes: bool) -> None:
    for one in done:
        verdict = "keep" if one.decision.keep else "would remove" if not yes else "removed" if one.removed else "FAILED"
        put(shown(f"{verdict} {one.decision.checkpoint.name}: {'; '.join(one.decision.reasons)}"))
    may = [one for one in done if not one.decision.keep and one.removed == yes]
    what = count(len(may), "checkpoint")
    if yes or not may:
        put(f"removed: {what}" if yes else "to remove: nothing")
    else:
        put(f"to remove: {what}; nothing was removed, --yes does it, once the newest has been verified")
