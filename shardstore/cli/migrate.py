"""`shardstore migrate`: brings indexes and structures of older formats to the one that this version writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from shardstore.cli import _program
from shardstore.cli._errors import as_json as error_json
from shardstore.cli._errors import worst
from shardstore.cli._output import complain, count, put, put_json, remark, shown
from shardstore.cli._places import opened, places_of
from shardstore.cli._progress import watching
from shardstore.errors import CheckpointNotFound, ShardstoreError, Unfinished, exit_code
from shardstore.run import Migration, Run, parse_folder, plan_migration, resolve
from shardstore.run import migrate as carry_out
from shardstore.storage import close_all, join


@dataclass(slots=True)
class Row:
    """One checkpoint, what would change, and what came of it. `digest`: of the new index, once there is one."""

    place: str
    plan: Migration
    digest: str | None = None
    error: ShardstoreError | None = None


@_program.command("migrate")
@_program.roots_argument
@click.option("--yes", is_flag=True, help="Rewrite them; without it, only tell.")
@click.option("--single-writer", is_flag=True, help="Nobody else writes there; for stores that can't tell.")
@_program.json_option
def command(urls: tuple[str, ...], *, yes: bool, single_writer: bool, as_json: bool) -> int:
    """Bring the checkpoints at or below URL, or RUN@STEP, to the format that this version writes.

    Tells only, unless --yes is given. Older checkpoints load as they are; a migrated one can't be read by older
    versions any more. Index and structure are rewritten, each index atomically; shards are not touched. The old index
    stays until the new one has been verified. Refused while a living process holds the run.

    The sha256 of shardstore.json changes: where it is kept elsewhere, compare the old one first.

    Several URLs are the roots of one striped checkpoint.
    """
    with watching() as listener:
        where = (resolve(urls[0], listener=listener), *urls[1:])
    found = places_of(where)
    _refuse_live(join(where[0], place) for place in found)
    rows, skipped = _plan(where, found)
    for row in rows if yes else ():
        _carry_out(where, row, single_writer=single_writer)
    code = worst([*map(exit_code, skipped.values()), *(exit_code(row.error) for row in rows if row.error)])
    if as_json:
        put_json(_document(urls[0], rows, skipped, yes=yes, code=code))
    else:
        put(*map(shown, _text(rows, yes=yes)))
    for place, error in skipped.items():
        complain(f"{join(where[0], place)}: left alone: {error}")
    for row in rows:
        if row.error:
            complain(f"not migrated: {row.error}")
    return code


def _refuse_live(checkpoints: Iterable[str]) -> None:
    """An older version that is at work on a run could not read what this one writes."""
    folders = (url.rstrip("/").rpartition("/") for url in checkpoints)
    for parent in dict.fromkeys(parent or "." for parent, _, name in folders if parse_folder(name)):
        with Run(parent, listener=remark) as run:
            run.refuse_live("migrate")


def _plan(urls: Sequence[str], found: Sequence[str]) -> tuple[list[Row], dict[str, ShardstoreError]]:
    """Every checkpoint that there is, and what is wrong with those of which that can't be told."""
    rows: list[Row] = []
    skipped: dict[str, ShardstoreError] = {}
    for place in found:
        stores = opened(urls, place)
        try:
            rows.append(Row(place, plan_migration(stores)))
        except Unfinished as error:
            if not place:
                raise
            complain(f"{join(urls[0], place)} is passed over: {error}")
        except CheckpointNotFound:
            raise
        except ShardstoreError as error:
            skipped[place] = error
        finally:
            close_all(stores)
    return rows, skipped


def _carry_out(urls: Sequence[str], row: Row, *, single_writer: bool) -> None:
    stores = opened(urls, row.place)
    try:
        if row.plan.needed:
            row.digest = carry_out(stores, row.plan, single_writer=single_writer)
    except ShardstoreError as error:
        row.error = error
    finally:
        close_all(stores)


def _document(
    url: str, rows: Sequence[Row], skipped: Mapping[str, ShardstoreError], *, yes: bool, code: int
) -> dict[str, Any]:
    return {
        "url": url,
        "dry_run": not yes,
        "checkpoints": [
            {
                "path": row.place or ".", "step": row.plan.step, "attempt": row.plan.attempt,
                "index": row.plan.index._asdict(), "meta": row.plan.meta._asdict(), "needed": row.plan.needed,
                "digest": row.plan.digest, "new_digest": row.digest, "migrated": row.digest is not None,
                "error": error_json(row.error) if row.error else None,
            }
            for row in rows
        ],
        "skipped": [{"path": place or ".", "error": error_json(error)} for place, error in skipped.items()],
        "exit_code": code,
    }  # fmt: skip


def _text(rows: Sequence[Row], *, yes: bool) -> Iterator[str]:
    for row in rows:
        if row.plan.needed:
            yield f"{_verdict(row, yes=yes)} {row.plan.url}: {_changes(row.plan)}"
            yield f"  sha256 of the index: {row.plan.digest}{f' -> {row.digest}' if row.digest else ''}"
    due = sum(row.plan.needed for row in rows)
    done = sum(row.digest is not None for row in rows)
    if yes:
        yield f"migrated: {count(done, 'checkpoint')} of {len(rows):,}"
    elif due:
        yield f"to migrate: {count(due, 'checkpoint')} of {len(rows):,}; nothing was changed, --yes does it"
    else:
        yield f"to migrate: nothing; {count(len(rows), 'checkpoint')} up to date"


def _verdict(row: Row, *, yes: bool) -> str:
    if not yes:
        return "would migrate"
    return "migrated" if row.digest is not None else "FAILED"


def _changes(plan: Migration) -> str:
    changes = (plan.index, plan.meta)
    return ", ".join(f"{change.before} to {change.after}" for change in changes if change.before != change.after)
