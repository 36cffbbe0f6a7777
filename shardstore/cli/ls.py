"""`shardstore ls`: the checkpoints at or below a place, and saves that are not finished."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardstore.check import attempts_in, default_threads, find_index, places
from shardstore.cli import _program, _runs
from shardstore.cli._errors import worst
from shardstore.cli._output import complain, put, put_json, put_table, remark, shown, size, when
from shardstore.cli._runs import RunView
from shardstore.errors import Damaged, ShardstoreError, UnsupportedVersion, exit_code
from shardstore.index import Index
from shardstore.run import resolve
from shardstore.storage import Store, join, open_store
from shardstore.transfer import in_parallel


@dataclass(slots=True)
class Row:
    """One place. `state`: committed, unfinished, or why its index can't be used: damaged, unsupported, unreadable."""

    path: str
    state: str
    step: int | None = None
    time: str | None = None
    bytes: int | None = None
    tensors: int | None = None
    shards: int | None = None
    hash: str | None = None
    attempt: str | None = None
    error: str | None = None
    exit_code: int = 0


@_program.command("ls")
@_program.url_argument
@_program.json_option
def command(url: str, *, as_json: bool) -> int:
    """List the checkpoints at or below URL.

    They come by step and time, unfinished saves last; those of a run in the order of saving, with losses and marks.
    Only indexes are read; `shardstore verify` reads the rest. URL may be RUN@STEP, RUN@latest.
    """
    url = resolve(url, listener=remark)
    rows, seen = _rows(url), _runs.view(url)
    if seen is not None:
        rows = sorted((_runs.judged(row, seen) for row in rows), key=lambda row: seen.order(row.path))
    code = worst(row.exit_code for row in rows)
    if as_json:
        put_json(_document(url, rows, seen, code))
    elif seen is not None:
        put(shown(seen.title()))
        put_table(_runs.COLUMNS, (_runs.cells(row, seen) for row in rows))
    else:
        put_table(">STEP TIME >SIZE >TENSORS >SHARDS HASH ATTEMPT STATE PATH", map(_cells, rows))
    for row in rows:
        if row.error:
            complain(f"{join(url, '' if row.path == '.' else row.path)}: {row.error}")
    return code


def _document(url: str, rows: Sequence[Row], seen: RunView | None, code: int) -> dict[str, Any]:
    if seen is None:
        return {"url": url, "checkpoints": [asdict(row) for row in rows], "exit_code": code}
    found = [{**asdict(row), **seen.members(row.path)} for row in rows]
    return {"url": url, "run": seen.document(), "checkpoints": found, "exit_code": code}


def _rows(url: str) -> list[Row]:
    """A row for each place, in the order in which they are shown."""
    store = open_store(url, listener=remark)
    try:
        found = places(store)
    finally:
        store.close()
    rows: list[Row] = []

    def read(place: str) -> None:
        row = _row(url, place)
        if row is not None:
            rows.append(row)

    in_parallel(read, found, default_threads())
    return sorted(rows, key=_order)


def _order(row: Row) -> tuple[bool, int, str, str]:
    return row.state != "committed", -1 if row.step is None else row.step, row.time or "", row.path


def _row(url: str, place: str) -> Row | None:
    store = open_store(join(url, place), listener=remark)
    path = place or "."
    try:
        found = find_index(store)
        return _committed(path, found.index) if found else _unfinished(path, store)
    except ShardstoreError as error:
        states = {Damaged: "damaged", UnsupportedVersion: "unsupported"}
        state = states.get(type(error), "unreadable")
        return Row(path, state, error=str(error), exit_code=exit_code(error))
    finally:
        store.close()


def _committed(path: str, index: Index) -> Row:
    shards = sum(file.start is not None for file in index.files)
    return Row(
        path, "committed", index.step, index.time, index.nbytes, len(index.paths), shards, index.hash, index.attempt
    )


def _unfinished(path: str, store: Store) -> Row | None:
    """The youngest save that left something; None where it has all gone meanwhile."""
    attempts, _ = attempts_in(store)
    if not attempts:
        return None
    young = max(attempts.values(), key=lambda attempt: attempt.marked.modified if attempt.marked else 0.0)
    time = _utc(young.marked.modified) if young.marked else None
    return Row(path, "unfinished", time=time, bytes=sum(file.nbytes for file in young.files), attempt=young.id)


def _utc(seconds: float) -> str:
    """Seconds since 1970 as an index has times."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cells(row: Row) -> Sequence[object]:
    time, nbytes = row.time and when(row.time), None if row.bytes is None else size(row.bytes)
    cells = (row.step, time, nbytes, row.tensors, row.shards, row.hash, row.attempt)
    return [*("-" if cell is None else cell for cell in cells), row.state, row.path]
