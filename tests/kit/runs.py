"""Runs made by hand, without torch: whole checkpoints with any step, owner, number and parent."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from shardstore import header, strictjson
from shardstore.check import MARK_SCHEMA
from shardstore.hashing import BlockHasher
from shardstore.index import NAME, FileEntry, Index, dump, mark_name, weight_map
from shardstore.run import Run, RunCheckpoint, folder_name
from shardstore.specs import BLOCK, TensorSpec
from shardstore.storage import Bytes

_DIGEST = "xxh3_128"
_numbers = itertools.count(1)


def new_attempt() -> str:
    """An attempt id that no other checkpoint of the tests has."""
    return f"{next(_numbers):016x}"


def _file(path: str, data: bytes, start: int | None = None, pieces: list[int] | None = None) -> FileEntry:
    hasher = BlockHasher(_DIGEST, BLOCK)
    hasher.update(memoryview(data))
    whole, blocks = hasher.finish()
    return FileEntry(path, len(data), whole, b"".join(blocks), start, pieces or [])


def contents(attempt: str, **members: Any) -> tuple[Index, dict[str, bytes]]:
    """The index of a small checkpoint with a weight, and its files."""
    spec = TensorSpec("float32", (4, 4))
    head = header.build([("w", spec)])
    shard = f"model-00001-of-00001-{attempt}.safetensors", head + bytes.fromhex(attempt) * 8
    skeleton = {"schema": "shardstore-meta/1", "attempt": attempt, "flat": True, "left": [], "state": {"w": {"$t": 0}}}
    meta = f"state/meta-{attempt}.json", strictjson.dumps(skeleton)
    files = [_file(*shard, len(head), [0]), _file(*meta)]
    members = {"time": "2026-03-01T12:30:00.250000Z", **members}
    index = Index(attempt, hash=_DIGEST, files=files, meta=1, paths=["model/w"], table=[spec], kinds=[0], **members)
    return index, dict([shard, meta])


@dataclass
class Trainer:
    """Saves as a training would, one owner after the other."""

    run: Run
    id: str = ""
    owner: int = 1
    seq: int = 0
    parent: str | None = None
    saved: dict[int, RunCheckpoint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.run.create().run

    def save(self, step: int, **members: Any) -> RunCheckpoint:
        """One committed checkpoint, as the listing shows it."""
        attempt = members.pop("attempt", None) or new_attempt()
        members = {
            "run": self.id, "step": step, "owner": self.owner, "seq": self.seq, "parent": self.parent, **members
        }  # fmt: skip
        index, files = contents(attempt, **members)
        folder = folder_name(step, attempt)
        for path, data in files.items():
            self.run.store.put(f"{folder}/{path}", Bytes(data))
        self.run.store.put(f"{folder}/{NAME}", Bytes(dump(index)))
        self.run.store.put(f"{folder}/model.safetensors.index.json", Bytes(weight_map(index) or b""))
        self.run.commit_hint(step, attempt)
        self.seq, self.parent = self.seq + 1, attempt
        self.saved[step] = next(one for one in self.run.checkpoints() if one.attempt == attempt)
        return self.saved[step]

    def resume(self, step: int | None = None) -> None:
        """Go on from a step, as the next owner."""
        self.owner += 1
        self.parent = self.saved[step].attempt if step is not None else self.parent

    def begin(self, step: int, attempt: str | None = None) -> str:
        """A save that does not come to its commit: one shard under a mark. Returns its folder."""
        attempt = attempt or new_attempt()
        _, files = contents(attempt)
        folder = folder_name(step, attempt)
        mark = {"schema": MARK_SCHEMA, "attempt": attempt, "state": "writing"}
        self.run.store.put(f"{folder}/{mark_name(attempt)}", Bytes(strictjson.dumps(mark)))
        path, data = next(iter(files.items()))
        self.run.store.put(f"{folder}/{path}", Bytes(data))
        return folder


def steps(found: list[RunCheckpoint]) -> list[int]:
    """The steps of checkpoints, in their order."""
    return [one.step for one in found]
