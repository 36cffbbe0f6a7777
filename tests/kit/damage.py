"""Checkpoints that lie or are broken: bits flipped, and indexes and shards rewritten with right digests."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardstore.hashing import BlockHasher
from shardstore.specs import BLOCK

INDEX = "shardstore.json"


def flip(file: Path, byte: int, bit: int = 0) -> None:
    """Change one bit of a file in place."""
    with file.open("r+b") as opened:
        opened.seek(byte)
        (old,) = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([old ^ (1 << bit)]))


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, but for the workings of the store."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".claims" not in path.parts
    }


def index_of(folder: Path) -> dict[str, Any]:
    """The index as plain JSON."""
    return json.loads((folder / INDEX).read_bytes())


def sign(body: bytes) -> bytes:
    """An index from the text before its member `sha256`, the comma included."""
    return body + b'"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def write_index(folder: Path, document: dict[str, Any]) -> None:
    """Write an index, signed."""
    text = json.dumps({key: value for key, value in document.items() if key != "sha256"}, separators=(",", ":"))
    (folder / INDEX).write_bytes(sign(text[:-1].encode() + b","))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change an index and sign it again. `change` gets the document; what it returns, if anything, replaces it."""
    document = index_of(folder)
    write_index(folder, change(document) or document)


def edit_text(folder: Path, old: str, new: str) -> None:
    """Replace a piece of the text of an index, once, and sign it again."""
    text = (folder / INDEX).read_text()
    body = text[: text.rindex('"sha256":')]
    assert old in body, f"{old!r} is not in the index"
    (folder / INDEX).write_bytes(sign(body.replace(old, new, 1).encode()))


def digests(data: bytes, algorithm: str = "xxh3_128") -> dict[str, Any]:
    """The members of a file in an index that depend on its content."""
    hasher = BlockHasher(algorithm, BLOCK)
    hasher.update(memoryview(data))
    whole, blocks = hasher.finish()
    return {"bytes": len(data), "digest": whole.hex(), "blocks": base64.b64encode(b"".join(blocks)).decode()}


def replace_file(folder: Path, path: str, data: bytes, **members: Any) -> None:
    """Write another content for a file of a checkpoint, with right digests in the index."""
    (folder / path).write_bytes(data)

    def change(document: dict[str, Any]) -> None:
        entry = next(entry for entry in document["files"] if entry["path"] == path)
        entry.update(digests(data, document["hash"]), **members)

    edit_index(folder, change)


def shards_of(folder: Path) -> list[str]:
    """Paths of the shards, as the index has them."""
    return [entry["path"] for entry in index_of(folder)["files"] if entry["start"] is not None]


def meta_of(folder: Path) -> str:
    """The path of the meta."""
    document = index_of(folder)
    return document["files"][document["meta"]]["path"]


def edit_meta(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the meta, with right digests in the index."""
    path = meta_of(folder)
    document = json.loads((folder / path).read_bytes())
    document = change(document) or document
    replace_file(folder, path, json.dumps(document).encode())


def shard(header: bytes | dict[str, Any], data: bytes, align: int = 64) -> bytes:
    """A safetensors file with any header at all, padded as ours are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text + data


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]
