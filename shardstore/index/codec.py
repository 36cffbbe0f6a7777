"""shardstore.json to Index and back. The specification is `docs/format.md`; msgspec lives here only.

Reading trusts nothing: sizes, types, ranges, paths, coverage are checked, and every complaint is an error of ours.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, NoReturn, TypeAlias

import msgspec

from shardstore import strictjson
from shardstore.errors import Damaged, UnsupportedVersion
from shardstore.hashing import DIGEST_BYTES, known
from shardstore.index.check import check
from shardstore.index.model import NAME, FileEntry, Index
from shardstore.schemas import INDEX
from shardstore.specs import BLOCK, DTYPES, Box, TensorSpec

MAX_BYTES = 256 * 1024 * 1024
"""An index over this size is refused unread; 10 million tensors fit."""

_TAIL = re.compile(rb'"sha256":"([0-9a-f]{64})"\}\n\Z')
_TAIL_BYTES = len('"sha256":""}\n') + 64

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Attempt = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Short = Annotated[str, msgspec.Meta(max_length=256)]


class RawFile(msgspec.Struct, forbid_unknown_fields=True):
    """A FileEntry as it stands in JSON."""

    root: Count
    path: str
    bytes: Count
    digest: str
    blocks: str
    start: Count | None
    pieces: list[Count]


RawBox: TypeAlias = tuple[list[Count], list[Count]]
"""Origin and shape."""

RawPart: TypeAlias = tuple[Count, list[int]]
"""A file, and for each of its pieces the number of its box, or -1 for a whole tensor."""


class _Tensors(msgspec.Struct, forbid_unknown_fields=True):
    path: list[str]
    kinds: list[tuple[str, list[Count]]]
    kind: list[Count]
    boxes: list[RawBox]
    parts: list[RawPart]
    aliases: list[tuple[Count, Count]]


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    attempt: Attempt
    run: Short | None
    step: Count | None
    seq: Count
    parent: Attempt | None
    owner: Count
    time: Short
    versions: dict[str, Short]
    world: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    roots: Annotated[int, msgspec.Meta(ge=1, le=2**16 - 1)]
    hash: Short
    block: Count
    meta: Count
    files: list[RawFile]
    tensors: _Tensors


def dump(index: Index) -> bytes:
    """The bytes of shardstore.json. Its last member is the sha256 of all bytes before that member."""
    files = list(map(raw_file, index.files))
    boxes, parts = pack_parts(index.parts, index.files)
    tensors = _Tensors(
        path=index.paths,
        kinds=[(spec.dtype, list(spec.shape)) for spec in index.table],
        kind=index.kinds,
        boxes=boxes,
        parts=parts,
        aliases=sorted(index.aliases.items()),
    )
    raw = _Index(
        INDEX.current, index.attempt, index.run, index.step, index.seq, index.parent, index.owner, index.time,
        index.versions, index.world, index.roots, index.hash, index.block, index.meta, files, tensors,
    )  # fmt: skip
    return _sealed(raw)


def raw_file(file: FileEntry) -> RawFile:
    """As it stands in JSON."""
    blocks = _base64(file.blocks)
    return RawFile(file.root, file.path, file.nbytes, file.digest.hex(), blocks, file.start, file.pieces)


def pack_parts(
    parts: Mapping[int, Mapping[int, Box]], files: Sequence[FileEntry]
) -> tuple[list[RawBox], list[RawPart]]:
    """Parts as they stand in JSON: each box once, since a thousand ranks have a million pieces of few shapes."""
    table: dict[Box, int] = {}
    known: dict[int, int] = {}  # by id, since a box is hashed slowly
    rows: list[RawPart] = []
    for file, boxes in sorted(parts.items()):
        row = [-1] * len(files[file].pieces)
        for at, box in boxes.items():
            number = known.get(id(box))
            if number is None:
                number = known[id(box)] = table.setdefault(box, len(table))
            row[at] = number
        rows.append((file, row))
    return [(list(box.origin), list(box.shape)) for box in table], rows


def unpack_parts(
    boxes: Sequence[RawBox], rows: Sequence[RawPart], files: Sequence[FileEntry], where: str
) -> dict[int, dict[int, Box]]:
    """The parts again; equal boxes are one object. Raises Damaged for numbers that mean nothing."""
    table = [Box(tuple(origin), tuple(shape)) for origin, shape in boxes]
    parts: dict[int, dict[int, Box]] = {}
    for file, row in rows:
        if file >= len(files) or file in parts or len(row) != len(files[file].pieces):
            _bad(where, "parts belong to no file")
        if row and not (-1 <= min(row) and max(row) < len(table)):
            _bad(where, f"a part of {files[file].path[:80]!r} has an unknown box")
        parts[file] = {at: table[number] for at, number in enumerate(row) if number >= 0}
        if not parts[file]:
            _bad(where, f"no piece of {files[file].path[:80]!r} is a part")
    return parts


def _sealed(raw: _Index) -> bytes:
    text = msgspec.json.encode(raw)
    if not text.isascii():  # msgspec writes UTF-8, the format asks for ASCII
        text = strictjson.dumps(msgspec.to_builtins(raw))
    body = text[:-1] + b","
    return body + b'"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def parse(data: bytes, where: str = NAME) -> Index:
    """The index that these bytes hold, be they of an older schema. `where` names the file in errors.

    Raises Damaged for anything that is not a whole, consistent index; UnsupportedVersion for another schema, an unknown
    hash, block size or dtype.
    """
    index = _index(_typed(data, where), where)
    check(index, where)
    return index


def rewritten(data: bytes, meta: FileEntry | None = None, where: str = NAME) -> bytes:
    """The same index in the current schema, naming another meta file if one is given. Raises as `parse`."""
    raw = _typed(data, where)
    check(_index(raw, where), where)
    if meta:
        raw.files[raw.meta] = raw_file(meta)
    return _sealed(raw)


def schema_of(data: bytes) -> str:
    """The schema that a valid index has in its file."""
    return str(strictjson.loads(data, limit=MAX_BYTES)["schema"])


def _typed(data: bytes, where: str) -> _Index:
    tail = _TAIL.search(data, max(0, len(data) - _TAIL_BYTES))
    if tail is None or hashlib.sha256(data[: tail.start()]).hexdigest().encode() != tail[1]:
        if tail is None:
            _schema_first(data, where)
        _bad(where, "its closing sha256 is missing or does not match: the file is cut or damaged")
    try:
        raw = strictjson.loads(data, limit=MAX_BYTES)
    except strictjson.BadJson as error:
        _bad(where, str(error))
    if not isinstance(raw, dict) or "schema" not in raw:
        _bad(where, "it has no schema")
    del raw["sha256"]
    try:
        return msgspec.convert(INDEX.upgrade(raw, where), _Index)
    except msgspec.ValidationError as error:
        _bad(where, str(error))


def _schema_first(data: bytes, where: str) -> None:
    """Of a file without a valid end, still tell a foreign or newer schema from damage."""
    head = re.match(rb'\s*\{\s*"schema"\s*:\s*"(shardstore/[^"\\]{1,40})"', data[:256])
    if head and not INDEX.reads(head[1].decode(errors="replace")):
        _unsupported(where, f"the schema {head[1].decode(errors='replace')!r}")


def _index(raw: _Index, where: str) -> Index:
    if not known(raw.hash):
        _unsupported(where, f"the hash {raw.hash[:40]!r}")
    if raw.block != BLOCK:
        _unsupported(where, f"the block size {raw.block}")
    for dtype, _ in raw.tensors.kinds:
        if dtype not in DTYPES:
            _unsupported(where, f"the dtype {dtype[:40]!r}")
    files = [file_entry(file, raw.hash, where) for file in raw.files]
    return Index(
        attempt=raw.attempt, time=raw.time, hash=raw.hash, meta=raw.meta, run=raw.run, step=raw.step, seq=raw.seq,
        parent=raw.parent, owner=raw.owner, versions=raw.versions, world=raw.world, roots=raw.roots,
        files=files,
        paths=raw.tensors.path,
        table=[TensorSpec(dtype, tuple(shape)) for dtype, shape in raw.tensors.kinds],
        kinds=raw.tensors.kind,
        parts=unpack_parts(raw.tensors.boxes, raw.tensors.parts, files, where),
        aliases=dict(raw.tensors.aliases),
    )  # fmt: skip


def file_entry(raw: RawFile, algorithm: str, where: str) -> FileEntry:
    """From JSON. Raises Damaged, with `where`, for digests that are missing or malformed."""
    try:
        digest = bytes.fromhex(raw.digest)
        blocks = binascii.a2b_base64(raw.blocks.encode("ascii"), strict_mode=True)
    except ValueError:
        _bad(where, f"the digests of {raw.path[:80]!r} are malformed")
    size = DIGEST_BYTES[algorithm]
    if len(digest) != size or len(blocks) != size * -(-raw.bytes // BLOCK):
        _bad(where, f"digests of {raw.path[:80]!r} are missing")
    return FileEntry(raw.path, raw.bytes, digest, blocks, raw.start, raw.pieces, raw.root)


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _bad(where: str, why: str) -> NoReturn:
    raise Damaged(f"{where} is no valid index: {why}", file=where)


def _unsupported(where: str, what: str) -> NoReturn:
    raise UnsupportedVersion(f"{where} has {what}, which this version of shardstore does not know: use a newer one")
