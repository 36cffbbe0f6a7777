"""What one rank adds to a checkpoint, on its way to the rank that writes the index: compact, and read as strictly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardstore import strictjson
from shardstore.errors import Damaged
from shardstore.index.codec import RawBox, RawFile, RawPart, file_entry, pack_parts, raw_file, unpack_parts
from shardstore.index.model import FileEntry
from shardstore.specs import Box, TensorSpec


@dataclass(slots=True)
class Contribution:
    """The files of one rank, as in an Index; and what it has of its own.

    `parts`: boxes of pieces that are no whole tensors, by file and position. `nodes`: skeletons of the values of its
    PerRanks, by path; `own`: path and spec of the tensors in them. A piece of the tensor `own[k]` has the number
    `count + k`, where `count` is that of the tensors that the ranks share.
    `compared`: number, box and digest of parts of which other ranks may have equal ones.
    """

    files: list[FileEntry]
    parts: dict[int, dict[int, Box]] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    own: list[tuple[str, TensorSpec]] = field(default_factory=list)
    compared: list[tuple[int, Box, str]] = field(default_factory=list)


class _Raw(msgspec.Struct, forbid_unknown_fields=True):
    files: list[RawFile]
    boxes: list[RawBox]
    parts: list[RawPart]
    nodes: str  # JSON in JSON, since msgspec does not take every string of Python's
    own: list[tuple[str, str, list[int]]]
    compared: list[tuple[int, list[int], list[int], str]]


def dump_contribution(given: Contribution) -> bytes:
    """As bytes."""
    boxes, parts = pack_parts(given.parts, given.files)
    own = [(path, spec.dtype, list(spec.shape)) for path, spec in given.own]
    compared = [(number, list(box.origin), list(box.shape), digest) for number, box, digest in given.compared]
    nodes = strictjson.dumps(given.nodes).decode()
    return msgspec.json.encode(_Raw(list(map(raw_file, given.files)), boxes, parts, nodes, own, compared))


def parse_contribution(data: bytes, algorithm: str, rank: int) -> Contribution:
    """From bytes. Raises Damaged, which names the rank."""
    where = f"what rank {rank} sent"
    try:
        raw = msgspec.json.decode(data, type=_Raw)
        nodes = strictjson.loads(raw.nodes.encode(), limit=len(data))
    except (msgspec.ValidationError, msgspec.DecodeError, strictjson.BadJson) as error:
        raise Damaged(f"{where} is not understood: {error}") from None
    own = [(path, TensorSpec(dtype, tuple(shape))) for path, dtype, shape in raw.own]
    files = [file_entry(file, algorithm, where) for file in raw.files]
    compared = [(number, Box(tuple(origin), tuple(shape)), digest) for number, origin, shape, digest in raw.compared]
    return Contribution(files, unpack_parts(raw.boxes, raw.parts, files, where), nodes, own, compared)
