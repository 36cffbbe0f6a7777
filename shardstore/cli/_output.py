"""Text and JSON on stdout, remarks on stderr. What comes from a checkpoint passes `shown` on its way to a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich.filesize import decimal

from shardstore import strictjson
from shardstore.check import Leftover
from shardstore.events import Event, Noticed, Retried

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z")


class OutputLost(Exception):
    """Nothing more can be written: the reader of a pipe has gone, the disk is full."""

    def __init__(self, why: OSError) -> None:
        super().__init__(why)
        self.why = why


def shown(text: object) -> str:
    r"""Text in which nothing can steer a terminal: control and invisible characters become `\x1b`, `\u202e`."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def size(nbytes: int) -> str:
    """Bytes for people, in powers of 1000: `1.49 GB`."""
    return decimal(nbytes, precision=2)


def when(time: str) -> str:
    """A time of an index for people, to the second."""
    match = _TIME.fullmatch(time)
    return f"{match[1]} {match[2]}Z" if match else time


def count(number: int, what: str) -> str:
    """`1 tensor`, `2 tensors`, `1,000 tensors`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def leftover_json(left: Leftover) -> dict[str, Any]:
    """What --json shows of a leftover. `age` is in seconds, null where no mark tells it."""
    return {
        "attempt": left.attempt, "files": left.keys, "bytes": left.nbytes, "age": left.age, "removable": left.removable,
        "why": left.why,
    }  # fmt: skip


def put(*lines: str) -> None:
    """Write lines to stdout."""
    if lines:
        _write("\n".join(lines))


def put_json(document: Mapping[str, Any]) -> None:
    """Write the one JSON document of a command to stdout."""
    _write(strictjson.dumps(document).decode())


def complain(text: str) -> None:
    """Write one line to stderr."""
    _write(f"shardstore: {shown(text)}", err=True)


def _write(text: str, *, err: bool = False) -> None:
    try:
        click.echo(text, err=err)
    except OSError as error:
        raise OutputLost(error) from error


def remark(event: Event) -> None:
    """The listener of commands: what a person should know goes to stderr, at once."""
    if isinstance(event, Retried):
        complain(f"{event.call} {event.key} failed ({event.error}); try {event.attempt} in {event.wait:.1f} s")
    elif isinstance(event, Noticed) and event.warning:
        complain(f"{event.url}: {event.what}")


def put_table(columns: str, rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a head. `columns`: its names; those after a `>` are aligned to the right.

    No table of rich: it cuts or folds what is wider than the terminal (80 columns in a pipe), and takes 0.3 ms a row.
    """
    names = columns.split()
    right = [name.startswith(">") for name in names]
    cells = [[name.lstrip(">") for name in names], *([shown(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    put(click.style(lines[0], bold=True), *lines[1:])
