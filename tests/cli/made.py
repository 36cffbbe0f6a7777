"""Checkpoints made by hand, without torch, so that tests can have any name, tie and time in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from shardstore import header
from shardstore.check import MARK_SCHEMA
from shardstore.hashing import BlockHasher
from shardstore.index import NAME, FileEntry, Index, dump, mark_name, weight_map
from shardstore.specs import BLOCK, TensorSpec

TENSORS = {
    "model/wte.weight": ("float32", (1200, 1000)),  # more than one block
    "model/lm_head.weight": ("float32", (1200, 1000)),  # tied to it
    "model/h.0.bias": ("bfloat16", (16,)),
    "optimizer/step": ("int64", ()),
}
TIES = {"model/lm_head.weight": "model/wte.weight"}
ATTEMPT = "3f9a2c10b7d4e6f1"
DIGEST = "xxh3_128"


def _file(folder: Path, path: str, data: bytes, start: int | None = None, pieces: list[int] | None = None) -> FileEntry:
    hasher = BlockHasher(DIGEST, BLOCK)
    hasher.update(memoryview(data))
    whole, blocks = hasher.finish()
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    return FileEntry(path, len(data), whole, b"".join(blocks), start, pieces or [])


def checkpoint(
    folder: Path, *, step=7, tensors=TENSORS, ties=TIES, attempt=ATTEMPT, time="2026-03-01T12:30:00.250000Z", left=()
) -> Path:
    """Write a whole checkpoint: the section `model` in one shard, all else in another, and meta."""
    paths, specs = list(tensors), [TensorSpec(*spec) for spec in tensors.values()]
    aliases = {paths.index(alias): paths.index(target) for alias, target in ties.items()}
    stored = [number for number in range(len(paths)) if number not in aliases]
    shards = {
        f"model-00001-of-00001-{attempt}.safetensors": [n for n in stored if paths[n].startswith("model/")],
        f"state/00001-of-00001-{attempt}.safetensors": [n for n in stored if not paths[n].startswith("model/")],
    }
    files = []
    for path, numbers in shards.items():
        names = [paths[n] if "/" in path else paths[n].removeprefix("model/") for n in numbers]
        head = header.build(zip(names, (specs[n] for n in numbers), strict=True))
        data = b"".join(bytes([(n + 1) % 256]) * specs[n].nbytes for n in numbers)
        files += [_file(folder, path, head + data, len(head), numbers)] if numbers else []
    meta = json.dumps({"schema": "shardstore-meta/1", "attempt": attempt, "left": list(left)}).encode()
    files.append(_file(folder, f"state/meta-{attempt}.json", meta))
    table = list(dict.fromkeys(specs))
    index = Index(
        attempt, time, DIGEST, files, len(files) - 1, paths, table, [table.index(spec) for spec in specs], aliases,
        step=step, versions={"shardstore": "0.1.0", "torch": "2.13.0"},
    )  # fmt: skip
    (folder / NAME).write_bytes(dump(index))
    if derived := weight_map(index):
        (folder / "model.safetensors.index.json").write_bytes(derived)
    return folder


def unfinished(folder: Path, *, attempt="00000000deadbeef", hours=0.0, state="writing") -> Path:
    """Write what a save leaves that died `hours` ago: one shard and its mark."""
    shard, mark = folder / f"model-00001-of-00002-{attempt}.safetensors", folder / mark_name(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    shard.write_bytes(b"x" * 1000)
    mark.write_text(json.dumps({"schema": MARK_SCHEMA, "attempt": attempt, "state": state}))
    then = mark.stat().st_mtime - hours * 3600
    os.utime(mark, (then, then))
    return folder


def flip(file: Path, at: int) -> None:
    """Change one bit of one byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
