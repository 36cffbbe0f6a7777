"""`shardstore diff`: how two checkpoints differ, of whatever formats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from shardstore.cli import _program
from shardstore.cli._output import count, put, put_json, put_table, shown
from shardstore.cli._progress import watching

if TYPE_CHECKING:
    from shardstore.formats import Change, Comparison, Different

DIFFERENT = 8


@_program.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@_program.json_option
def command(a: str, b: str, *, as_json: bool) -> int:
    """Compare two checkpoints: stores, RUN@STEP, or files and folders of another format.

    Tells what only one of them has, other types, shapes and values, and for each tensor whose bits differ the largest
    and mean absolute difference, the norm of the change relative to that of A, and the NaN and infinities on each side;
    the most changed come first. Where both are stores, equal digests are enough.
    """
    from shardstore.formats import diff  # the one place here that needs torch

    with watching() as listener:
        found = diff(a, b, listener=listener)
    code = 0 if found.same else DIFFERENT
    if as_json:
        put_json(_document(found, code))
    else:
        _put_text(found)
    return code


def _document(found: Comparison, code: int) -> dict[str, Any]:
    return {
        "a": found.a, "b": found.b, "formats": list(found.formats), "same": found.same, "equal": found.equal,
        "unread": found.unread, "exit_code": code,
        **{
            kind: [{"path": one.path, "a": one.a, "b": one.b} for one in rows]
            for kind, rows in (("structure", found.structure), ("values", found.values), ("ties", found.ties))
        },
        "tensors": [_change(one) for one in found.tensors],
    }  # fmt: skip


def _change(one: Change) -> dict[str, Any]:
    return {
        "path": one.path, "dtypes": list(one.dtypes), "shape": list(one.shape), "elements": one.elements,
        "changed": one.changed, "max_abs": _number(one.max_abs), "mean_abs": _number(one.mean_abs),
        "relative": _number(one.relative), "nans": list(one.nans), "infs": list(one.infs),
    }  # fmt: skip


def _number(value: float | None) -> float | str | None:
    """JSON has no infinities."""
    return value if value is None or math.isfinite(value) else str(value)


def _put_text(found: Comparison) -> None:
    put(*_lines("", found.structure), *_lines("", found.values), *_lines("tie: ", found.ties))
    if found.tensors:
        put_table("TENSOR DTYPE SHAPE >CHANGED >MAX >MEAN >RELATIVE >NAN >INF", map(_row, found.tensors))
    equal = f"{count(found.equal, 'tensor')} equal" + (f", {found.unread:,} of them by digests" if found.unread else "")
    if found.same:
        put(f"the same: {equal}")
        return
    parts = ((found.tensors, "tensor"), (found.values, "value"), (found.structure, "place"))
    what = ", ".join(count(len(rows), name) for rows, name in parts if rows)
    put(f"different: {what}; {equal}")


def _lines(kind: str, rows: Iterable[Different]) -> list[str]:
    return [shown(f"{kind}{one.path or 'the state'}: {one.a or 'nothing'} -> {one.b or 'nothing'}") for one in rows]


def _row(one: Change) -> tuple[object, ...]:
    dtype = one.dtypes[0] if one.dtypes[0] == one.dtypes[1] else " -> ".join(one.dtypes)
    shape = "x".join(map(str, one.shape)) or "scalar"
    measures = ("-" if value is None else f"{value:.3g}" for value in (one.max_abs, one.mean_abs, one.relative))
    return (one.path, dtype, shape, f"{one.changed:,}", *measures, _pair(one.nans), _pair(one.infs))


def _pair(both: tuple[int, int]) -> str:
    return f"{both[0]:,}" if both[0] == both[1] else f"{both[0]:,} -> {both[1]:,}"
