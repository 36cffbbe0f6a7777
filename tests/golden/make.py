"""Writes the golden checkpoints. Run by hand, `python -m tests.golden.make`, only before a format is released.

They are written through the public `save`; only attempt id and time are fixed. `pieces` is made by hand, since one
process alone writes no parts.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shardstore
from shardstore import header
from shardstore.hashing import BlockHasher
from shardstore.index import FileEntry, Index, dump, weight_map
from shardstore.specs import BLOCK, Box, TensorSpec
from shardstore.storage import MemoryStore, memory
from tests.golden import states
from tests.kit.damage import sign

HERE = Path(__file__).parent
ATTEMPT = "0123456789abcdef"
TIME = "2026-01-02T03:04:05.678901Z"
URL = "memory://golden"
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dtypes": (states.dtypes, {"step": 1, "shards": 1}),
    "values": (states.values, {"step": 2**63 - 1, "shards": 4, "hash": "sha256"}),
    "flat": (states.flat, {}),
    "module": (states.module, {"layout": "by_group", "shards": 3}),
    "objects": (states.objects, {"step": 2}),
    "nothing": (lambda: {"n": 1}, {}),
}


def files(name: str) -> dict[str, bytes]:
    """What `save` writes for one case today, with the fixed attempt and time."""
    make, options = CASES[name]
    memory.reset()
    with mock.patch("secrets.token_hex", return_value=ATTEMPT), registered():
        shardstore.save(make(), URL, **options)
    store = MemoryStore(URL)
    found = {entry.key: store.get(entry.key, limit=1 << 20).data for entry in store.list()}
    memory.reset()
    body = found["shardstore.json"].rpartition(b'"sha256":')[0]
    found["shardstore.json"] = sign(re.sub(rb'"time":"[^"]*"', f'"time":"{TIME}"'.encode(), body, count=1))
    return found


def registered() -> Any:
    """With the type that the checkpoint `values` needs; afterwards it is not registered any more."""
    from shardstore.tree import registry

    class Registered:
        def __enter__(self) -> None:
            self.before = [(table, dict(table)) for table in (registry.BY_CLASS, registry.BY_NAME)]
            shardstore.register_type(
                states.Point, "golden.point", lambda p: {"x": p.x, "at": p.at}, lambda d: states.Point(**d)
            )

        def __exit__(self, *error: object) -> None:
            for table, before in self.before:
                table.clear()
                table.update(before)

    return Registered()


def pieces() -> dict[str, bytes]:
    """The checkpoint whose tensor `parts` lies in three pieces, in three shards."""
    state = states.pieces()["model"]
    boxes = [Box((0, 0), (2, 6)), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))]
    made: dict[str, bytes] = {}
    entries: list[FileEntry] = []
    for number, box in enumerate(boxes):
        rows, columns = (slice(at, at + n) for at, n in zip(box.origin, box.shape, strict=True))
        tensors = [("parts", state["parts"][rows, columns].contiguous())]
        tensors += [("whole", state["whole"])] if number == 1 else []
        head = header.build((name, TensorSpec("float32", tuple(tensor.shape))) for name, tensor in tensors)
        data = head + b"".join(tensor.numpy().tobytes() for _, tensor in tensors)
        path = f"model-{number + 1:05d}-of-00003-{ATTEMPT}.safetensors"
        made[path] = data
        entries.append(_entry(path, data, len(head), [1, 0] if number == 1 else [1]))
    skeleton = '{"model":{"$tensors":{"prefix":"model/","first":0,"count":2}},"n":1}'
    meta = f'{{"schema":"shardstore-meta/1","attempt":"{ATTEMPT}","flat":false,"left":[],"state":{skeleton}}}'.encode()
    made[f"state/meta-{ATTEMPT}.json"] = meta
    entries.append(_entry(f"state/meta-{ATTEMPT}.json", meta))
    index = Index(
        attempt=ATTEMPT, time=TIME, hash="xxh3_128", files=entries, meta=3, paths=["model/whole", "model/parts"],
        table=[TensorSpec("float32", (4,)), TensorSpec("float32", (4, 6))], kinds=[0, 1],
        parts={number: {0: box} for number, box in enumerate(boxes)}, world=3, versions={"shardstore": "by hand"},
    )  # fmt: skip
    made["shardstore.json"] = dump(index)
    made["model.safetensors.index.json"] = weight_map(index) or b""
    return made


def _entry(path: str, data: bytes, start: int | None = None, held: list[int] | None = None) -> FileEntry:
    hasher = BlockHasher("xxh3_128", BLOCK)
    hasher.update(memoryview(data))
    whole, blocks = hasher.finish()
    return FileEntry(path, len(data), whole, b"".join(blocks), start, held or [])


def main() -> None:
    """Write all of them anew."""
    torch.set_num_threads(1)
    for name in [*CASES, "pieces"]:
        shutil.rmtree(HERE / name, ignore_errors=True)
        for key, data in (pieces() if name == "pieces" else files(name)).items():
            (HERE / name / key).parent.mkdir(parents=True, exist_ok=True)
            (HERE / name / key).write_bytes(data)


if __name__ == "__main__":
    main()
