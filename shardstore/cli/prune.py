"""`shardstore prune`: removes what dead and replaced saves have left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from shardstore.check import GRACE_SECONDS, OLD_SECONDS, Leftover, find_index, places, plan_leftovers, remove
from shardstore.cli import _program
from shardstore.cli._errors import as_json as error_json
from shardstore.cli._errors import worst
from shardstore.cli._output import complain, count, leftover_json, put, put_json, remark, shown, size
from shardstore.errors import Damaged, ShardstoreError, UnsupportedVersion, exit_code
from shardstore.storage import join, open_store

HOUR = 3600.0
LEAST_HOURS = int(OLD_SECONDS / HOUR)


@dataclass(slots=True)
class Found:
    """One leftover at one place, what was done about it, and what went wrong."""

    place: str
    leftover: Leftover
    removed: bool = False
    errors: list[str] = field(default_factory=list)


@_program.command("prune")
@_program.url_argument
@click.option("--leftovers", is_flag=True, help="Files of saves that died or were overwritten, which no index needs.")
@click.option("--yes", is_flag=True, help="Remove them; without it, only tell.")
@click.option(
    "--older-than", "hours", type=click.IntRange(min=LEAST_HOURS), metavar="HOURS",
    help=f"Spare what is younger; {LEAST_HOURS} is the default, and the least.",
)  # fmt: skip
@_program.json_option
def command(url: str, *, leftovers: bool, yes: bool, hours: int | None, as_json: bool) -> int:
    """Remove what no checkpoint at or below URL needs. Tells only, unless --yes is given.

    A leftover is a file under an attempt mark that no index names, once its mark is older than 24 hours by the store's
    own clock (a minute, where an overwrite has replaced it). Files without a mark are never touched.
    """
    if not leftovers:
        raise click.UsageError("say what to prune: --leftovers is what there is.", click.get_current_context())
    found, skipped = _plan(url, hours)
    if yes:
        _remove(url, [one for one in found if one.leftover.removable])
    code = worst([*map(exit_code, skipped.values()), *(1 for one in found if one.errors)])
    if as_json:
        put_json(_document(url, found, skipped, yes=yes, code=code))
    else:
        _put_text(found, yes=yes)
    for place, error in skipped.items():
        complain(f"{join(url, place)}: left alone, what its index needs is not known: {error}")
    for one in found:
        for why in one.errors:
            complain(f"not removed: {why}")
    return code


def _plan(url: str, hours: int | None) -> tuple[list[Found], dict[str, ShardstoreError]]:
    """The leftovers of every place, and the places whose index can't be read."""
    old = OLD_SECONDS if hours is None else hours * HOUR
    grace = GRACE_SECONDS if hours is None else old
    store = open_store(url, listener=remark)
    try:
        where = places(store)
    finally:
        store.close()
    found: list[Found] = []
    skipped: dict[str, ShardstoreError] = {}
    for place in where:
        inner = open_store(join(url, place), listener=remark)
        try:
            find_index(inner)
            found += [Found(place, left) for left in plan_leftovers(inner, old=old, grace=grace)]
        except (Damaged, UnsupportedVersion) as error:
            skipped[place] = error
        finally:
            inner.close()
    return found, skipped


def _remove(url: str, found: Sequence[Found]) -> None:
    for one in found:
        store = open_store(join(url, one.place), listener=remark)
        try:
            one.errors = remove(store, one.leftover)
            one.removed = not one.errors
        finally:
            store.close()


def _document(
    url: str, found: Sequence[Found], skipped: Mapping[str, ShardstoreError], *, yes: bool, code: int
) -> dict[str, Any]:
    return {
        "url": url,
        "dry_run": not yes,
        "leftovers": [
            {"path": one.place or ".", **leftover_json(one.leftover), "removed": one.removed, "errors": one.errors}
            for one in found
        ],
        "skipped": [{"path": place or ".", "error": error_json(error)} for place, error in skipped.items()],
        "exit_code": code,
    }


def _put_text(found: Sequence[Found], *, yes: bool) -> None:
    for one in found:
        left = one.leftover
        what = f"{left.attempt} in {one.place or '.'}: {count(len(left.keys), 'file')}, {size(left.nbytes)}; {left.why}"
        put(shown(f"{_verdict(one, yes=yes)} {what}"))
        put(*(f"  {shown(key)}" for key in left.keys))
    may = [one.leftover for one in found if one.leftover.removable and one.removed == yes]
    total = f"{count(len(may), 'leftover')}, {size(sum(left.nbytes for left in may))}"
    if yes or not may:
        put(f"removed: {total}" if yes else "to remove: nothing")
    else:
        put(f"to remove: {total}; nothing was removed, --yes does it")


def _verdict(one: Found, *, yes: bool) -> str:
    if not one.leftover.removable:
        return "keep"
    if not yes:
        return "would remove"
    return "removed" if one.removed else "FAILED"
