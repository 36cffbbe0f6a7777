"""What one rank adds to a checkpoint, on its way to the rank that writes the index: compact, and read as strictly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardstore.errors import Damaged
from shardstore.index.codec import RawFile, file_entry, raw_file
from shardstore.index.model import FileEntry
from shardstore.specs import Box, TensorSpec


@dataclass(slots=True)
class Contribution:
    """The files of one rank, as in an Index; and what it has of its own.

    `parts`: boxes of pieces that are no whole tensors, by file and position. `nodes`: skeletons of the values of its
    PerRanks, by path; `own`: path and spec of the tensors in them. A piece of the tensor `own[k]` has the number
    `count + k`, where `count` is that of the tensors that the ranks share.
    """

    files: list[FileEntry]
    parts: dict[int, dict[int, Box]] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    own: list[tuple[str, TensorSpec]] = field(default_factory=list)


class _Raw(msgspec.Struct, forbid_unknown_fields=True):
    files: list[RawFile]
    parts: list[tuple[int, int, list[int], list[int]]]
    nodes: dict[str, Any]
    own: list[tuple[str, str, list[int]]]


def dump_contribution(given: Contribution) -> bytes:
    """As bytes."""
    parts = [
        (file, at, list(box.origin), list(box.shape))
        for file, boxes in given.parts.items()
        for at, box in boxes.items()
    ]
    own = [(path, spec.dtype, list(spec.shape)) for path, spec in given.own]
    return msgspec.json.encode(_Raw(list(map(raw_file, given.files)), parts, given.nodes, own))


def parse_contribution(data: bytes, algorithm: str, rank: int) -> Contribution:
    """From bytes. Raises Damaged, which names the rank."""
    where = f"what rank {rank} sent"
    try:
        raw = msgspec.json.decode(data, type=_Raw)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Damaged(f"{where} is not understood: {error}") from None
    parts: dict[int, dict[int, Box]] = {}
    for file, at, origin, shape in raw.parts:
        parts.setdefault(file, {})[at] = Box(tuple(origin), tuple(shape))
    own = [(path, TensorSpec(dtype, tuple(shape))) for path, dtype, shape in raw.own]
    return Contribution([file_entry(file, algorithm, where) for file in raw.files], parts, raw.nodes, own)
