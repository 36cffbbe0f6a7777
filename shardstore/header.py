"""The header of a safetensors file: built for our shards, and parsed strictly from anywhere.

Source of the format: the README of huggingface/safetensors. 8 bytes little-endian length, JSON padded with spaces, then
data without holes. Ours are padded so that the data starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from shardstore import strictjson
from shardstore.errors import Damaged, InvalidArgument
from shardstore.specs import DTYPES, TensorSpec

ALIGN = 64
MAX_HEADER = 100_000_000
RESERVED = "__metadata__"
_TAG_BITS = {d.tag: d.itemsize * 8 // (d.tail[0] if d.tail else 1) for d in DTYPES.values()} | {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class Stored(NamedTuple):
    """One tensor of a header: its tag (`F32`), stored shape, and byte range from the start of the data."""

    tag: str
    shape: tuple[int, ...]
    begin: int
    end: int


def build(tensors: Iterable[tuple[str, TensorSpec]], metadata: dict[str, str] | None = None) -> bytes:
    """The length and header of a file that holds these tensors, in this order, without gaps.

    Raises InvalidArgument where the header would pass the format's 100 MB.
    """
    tail: dict[TensorSpec, tuple[str, int]] = {}
    rows = [f'"{RESERVED}":{strictjson.dumps(metadata or {"format": "pt"}).decode()}']
    at = 0
    for name, spec in tensors:
        shown = tail.get(spec)
        if shown is None:
            dtype = DTYPES[spec.dtype]
            shape = ",".join(map(str, dtype.stored_shape(spec.shape)))
            shown = tail[spec] = (f':{{"dtype":"{dtype.tag}","shape":[{shape}],"data_offsets":[', spec.nbytes)
        end = at + shown[1]
        rows.append(f"{encode_basestring_ascii(name)}{shown[0]}{at},{end}]}}")
        at = end
    text = ("{" + ",".join(rows) + "}").encode("ascii")
    if len(text) > MAX_HEADER - ALIGN:
        raise InvalidArgument(
            f"{len(rows) - 1} tensors need a header of {len(text)} bytes in one shard: use more shards"
        )
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def length(first: bytes | memoryview, file: str, nbytes: int) -> int:
    """The length of the header's JSON, from the first 8 bytes of a file of `nbytes`. Raises Damaged."""
    if len(first) < 8 or nbytes < 8:  # noqa: PLR2004
        raise _bad(file, f"{nbytes} bytes are too few for a safetensors header{looks_like(first)}")
    (size,) = struct.unpack("<Q", first[:8])
    if size > MAX_HEADER or size + 8 > nbytes:
        raise _bad(file, f"its header claims {size} bytes, the file has {nbytes}{looks_like(first)}")
    return int(size)


def parse(text: bytes | memoryview, file: str, nbytes: int) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors, in the order of their bytes, and metadata, from the header's JSON of a file of `nbytes`.

    Raises Damaged for anything that breaks the format: repeated keys, offsets that do not fit, holes, overlaps.
    """
    try:
        raw = strictjson.loads(text, limit=MAX_HEADER)
    except strictjson.BadJson as error:
        raise _bad(file, f"its header is no JSON: {error}{looks_like(bytes(text[:64]))}") from None
    if not isinstance(raw, dict):
        raise _bad(file, "its header is no JSON object")
    metadata = raw.pop(RESERVED, {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise _bad(file, f"{RESERVED} must map strings to strings")
    tensors = {name: _stored(entry, name, file) for name, entry in raw.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _contiguous(ordered, file, nbytes - 8 - len(text))
    return ordered, metadata


def _stored(entry: Any, name: str, file: str) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(file, f"the entry of {name!r} needs dtype, shape and data_offsets", name)
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(tag, str) or tag not in _TAG_BITS:
        raise _bad(file, f"{name!r} has the unknown type {str(tag)[:40]!r}", name)
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2):  # noqa: PLR2004
        raise _bad(file, f"{name!r} needs whole numbers for shape and data_offsets", name)
    bits = _TAG_BITS[tag]
    for size in shape:
        bits *= size
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise _bad(file, f"{name!r} of shape {shape} in {tag} does not fill bytes {begin} to {end}", name)
    return Stored(tag, tuple(shape), begin, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)  # noqa: PLR2004


def _contiguous(tensors: dict[str, Stored], file: str, nbytes: int) -> None:
    at = 0
    for name, stored in tensors.items():
        if stored.begin != at:
            raise _bad(file, f"{name!r} begins at byte {stored.begin} of the data, {at} was due", name)
        at = stored.end
    if at != nbytes:
        raise _bad(file, f"its tensors take {at} bytes, the file has {nbytes} of data")


def looks_like(first: bytes | memoryview) -> str:
    """A hint for what a file with these first bytes may be instead, or nothing; goes after a message."""
    start = bytes(first[:64]).lstrip().lower()
    for sign, what in (
        (b"version https://git-lfs", "a git-lfs pointer"),
        (b"version ", "a pointer file"),
        (b"<", "an HTML or XML page"),
        (b"pk\x03\x04", "a zip file, as torch.save writes"),
        (b"\x80", "a pickle"),
    ):
        if start.startswith(sign[: len(start)] if len(start) < len(sign) and start else sign):
            return f"; it looks like {what}"
    return ""


def _bad(file: str, why: str, tensor: str | None = None) -> Damaged:
    return Damaged(f"{file}: {why}", file=file, tensors=(tensor,) if tensor else ())
