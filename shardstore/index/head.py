"""The first members of an index, read without the rest: what a listing of thousands of checkpoints needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardstore.index.model import Index
from shardstore.schemas import INDEX

HEAD_BYTES = 512
"""Bytes from the start of an index that hold its head; a longer one is read whole."""

_TEXT = rb'"([ !#-\[\]-~]{0,256})"'
_COUNT = rb"(0|[1-9][0-9]{0,17})"
_ATTEMPT = rb'"([0-9a-f]{16})"'
_HEAD = re.compile(
    rb'\{"schema":"%s","attempt":%s,"run":(?:null|%s),"step":(?:null|%s),"seq":%s,"parent":(?:null|%s),"owner":%s,"time":%s,'
    % (re.escape(INDEX.current.encode()), _ATTEMPT, _TEXT, _COUNT, _COUNT, _ATTEMPT, _COUNT, _TEXT)
)


@dataclass(frozen=True, slots=True)
class Head:
    """Whose checkpoint it is, and where it stands among the others of its run; members as in `Index`."""

    attempt: str
    run: str | None
    step: int | None
    seq: int
    parent: str | None
    owner: int
    time: str


def read_head(data: bytes | bytearray) -> Head | None:
    """The head from the first bytes of an index, in the form in which `dump` writes it.

    None for anything else: `parse` decides what it is. A head says nothing about the rest of the file.
    """
    found = _HEAD.match(data)
    if found is None:
        return None
    attempt, run, step, seq, parent, owner, time = (None if part is None else part.decode() for part in found.groups())
    if attempt is None or seq is None or owner is None or time is None:
        return None
    return Head(attempt, run, None if step is None else int(step), int(seq), parent, int(owner), time)


def head_of(index: Index) -> Head:
    """The head of an index that was read whole."""
    return Head(index.attempt, index.run, index.step, index.seq, index.parent, index.owner, index.time)
