"""`shardstore prune`: removes what dead and replaced saves have left behind, and old checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from shardstore.check import GRACE_SECONDS, OLD_SECONDS, Leftover, find_roots, plan_leftovers, remove
from shardstore.cli import _program, _retention
from shardstore.cli._errors import as_json as error_json
from shardstore.cli._errors import worst
from shardstore.cli._output import complain, count, leftover_json, put, put_json, shown, size
from shardstore.cli._places import opened, places_of
from shardstore.errors import Damaged, InvalidArgument, ShardstoreError, UnsupportedVersion, exit_code
from shardstore.run import Policy
from shardstore.storage import close_all, join

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
@_program.roots_argument
@click.option("--leftovers", is_flag=True, help="Files of saves that died or were overwritten, which no index needs.")
@click.option("--yes", is_flag=True, help="Remove them; without it, only tell.")
@click.option(
    "--older-than", "hours", type=click.IntRange(min=LEAST_HOURS), metavar="HOURS",
    help=f"Spare what is younger; {LEAST_HOURS} is the default, and the least.",
)  # fmt: skip
@_retention.options
@_program.json_option
def command(
    urls: tuple[str, ...], *, leftovers: bool, yes: bool, hours: int | None, quarantined: bool, as_json: bool,
    **policies: list[Policy],
) -> int:  # fmt: skip
    """Remove what no checkpoint at or below URL needs, or checkpoints of a run that no policy keeps.

    Tells only, unless --yes is given. A checkpoint stays if any --keep-... keeps it; and so do the newest, pinned ones,
    those in quarantine, and all until a newer one was verified, which is done before anything is removed.

    Several URLs are the roots of one striped checkpoint; one of them alone is refused.

    A leftover is a file under an attempt mark that no index names, once its mark is older than 24 hours by the store's
    own clock (a minute, where an overwrite has replaced it). Files without a mark are never touched.
    """
    wanted = [policy for each in policies.values() for policy in each]
    if leftovers == bool(wanted):
        what = "say what to prune: either --leftovers, or what to keep (--keep-last N, ...)."
        raise click.UsageError(what, click.get_current_context())
    if wanted:
        if len(urls) > 1:
            raise click.UsageError("checkpoints are pruned in one run at a time.", click.get_current_context())
        return _retention.prune(urls[0], wanted, quarantined=quarantined, yes=yes, as_json=as_json)
    found, skipped = _plan(urls, hours)
    if yes:
        _remove(urls, [one for one in found if one.leftover.removable])
    code = worst([*map(exit_code, skipped.values()), *(1 for one in found if one.errors)])
    if as_json:
        put_json(_document(urls[0], found, skipped, yes=yes, code=code))
    else:
        _put_text(found, yes=yes)
    for place, error in skipped.items():
        complain(f"{join(urls[0], place)}: left alone, what is needed there is not known: {error}")
    for one in found:
        for why in one.errors:
            complain(f"not removed: {why}")
    return code


def _plan(urls: Sequence[str], hours: int | None) -> tuple[list[Found], dict[str, ShardstoreError]]:
    """The leftovers of every place, and the places whose index can't be read."""
    old = OLD_SECONDS if hours is None else hours * HOUR
    grace = GRACE_SECONDS if hours is None else old
    found: list[Found] = []
    skipped: dict[str, ShardstoreError] = {}
    for place in places_of(urls):
        stores = opened(urls, place)
        try:
            find_roots(stores)
            found += [Found(place, left) for left in plan_leftovers(*stores, old=old, grace=grace)]
        except (Damaged, InvalidArgument, UnsupportedVersion) as error:
            skipped[place] = error
        finally:
            close_all(stores)
    return found, skipped


def _remove(urls: Sequence[str], found: Sequence[Found]) -> None:
    for one in found:
        stores = opened(urls, one.place)
        try:
            one.errors = remove(one.leftover, *stores)
            one.removed = not one.errors
        finally:
            close_all(stores)


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
