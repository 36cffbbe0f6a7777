"""One save of very many ranks, as rank 0 sees it: its own plan, and the commit of what all have written.

The other ranks are simulated: they say what this one says, but for the parts that they hold. Their files are there,
with nothing in them. `python -m benchmarks.thousand RANKS TENSORS ROUNDS FOLDER` is the process that measures.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardstore
from benchmarks.children import ask
from benchmarks.machine import settle
from benchmarks.runner import Result
from shardstore import tree
from shardstore.hashing import DEFAULT
from shardstore.index import NAME, Contribution, FileEntry, dump_contribution, parse_contribution
from shardstore.plan import ShardOptions
from shardstore.ranks import Answer, Work
from shardstore.saving.api import save_to
from shardstore.saving.attempt import Options
from shardstore.specs import Box

ROWS, COLUMNS = 2, 8  # of each rank's part of each tensor
CALLS = {
    "plan": "what each rank does, the writing of its 64 KB included",
    "commit": "what rank 0 does with what all say",
    "open": "open(path)",
}


class Simulated:
    """Rank 0 of a group whose other ranks exist only as what they would have sent."""

    rank = 0

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self._folder = size, folder
        self.seconds = {"work": 0.0, "answer": 0.0}

    def members(self) -> Sequence[int]:
        return range(self.size)

    def prepare(self) -> None:
        """There is nothing to set up."""

    def share(self, phase: str, work: Work, answer: Answer) -> bytes:
        own = self._timed("work", work)
        sent = self._written(own) if phase == "write" else [own] * self.size
        return self._timed("answer", answer, sent)

    def _timed(self, what: str, call: Any, *given: Any) -> bytes:
        start = time.perf_counter()
        result = call(*given)
        self.seconds[what] += time.perf_counter() - start
        return result

    def _written(self, own: bytes) -> list[bytes]:
        first = parse_contribution(own, DEFAULT, 0)
        return [own, *(self._forged(first, rank) for rank in range(1, self.size))]

    def _forged(self, first: Contribution, rank: int) -> bytes:
        files, parts = [], {}
        for at, file in enumerate(first.files):
            if file.start is None:  # the structure is rank 0's
                continue
            path = file.path.replace("/00001-", f"/{rank + 1:05d}-").replace("model-00001-", f"model-{rank + 1:05d}-")
            with (self._folder / path).open("wb") as empty:
                empty.truncate(file.nbytes)
            parts[len(files)] = {piece: _part(rank) for piece in first.parts[at]}
            files.append(FileEntry(path, file.nbytes, file.digest, file.blocks, file.start, file.pieces, file.root))
        return dump_contribution(Contribution(files, parts, {}, []))


def _part(rank: int) -> Box:
    return Box((ROWS * rank, 0), (ROWS, COLUMNS))


def _state(ranks: int, tensors: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    shape, stride = torch.Size((ROWS * ranks, COLUMNS)), (COLUMNS, 1)
    return {
        f"layers.{at}.weight": DTensor.from_local(
            torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        for at in range(tensors)
    }


def _go(state: dict[str, Any], ranks: int, folder: Path) -> dict[str, float]:
    settle(0)
    group = Simulated(ranks, folder)
    start = time.perf_counter()
    flat = tree.flatten({"model": state}, 0)
    flattened = time.perf_counter() - start
    options = Options(ShardOptions(), None, DEFAULT)
    save_to(
        flat, str(folder), options, ranks=group, overwrite=False, single_writer=False, listener=None,
        storage_options=None,
    )  # fmt: skip
    start = time.perf_counter()
    with shardstore.open(folder) as checkpoint:
        count, shape = len(checkpoint), tuple(checkpoint["model/layers.0.weight"].shape)
    opened = time.perf_counter() - start
    if (count, shape) != (len(state), (ROWS * ranks, COLUMNS)):
        raise ValueError(f"the result is wrong: {count} tensors, the first {shape}")
    return {"plan": flattened + group.seconds["work"], "commit": group.seconds["answer"], "open": opened}


def measure(ranks: int, tensors: int, rounds: int, place: Path) -> list[Result]:
    """Measure in a process of its own. Raises RuntimeError where it failed."""
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=place) as folder:
        said = ask("benchmarks.thousand", str(ranks), str(tensors), str(rounds), folder)
    nbytes = ranks * tensors * ROWS * COLUMNS * 4
    note = f"The index has {said['index'] / 1e6:.1f} MB."
    return [
        Result(
            "thousand", task, "shardstore", "ours", call, "", tensors, nbytes, said[task], note=note * (task == "open")
        )
        for task, call in CALLS.items()
    ]


def main(ranks: str, tensors: str, rounds: str, folder: str) -> None:
    """What that process does; the first go is not counted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(ranks))
    state = _state(int(ranks), int(tensors))
    places = [Path(folder) / str(turn) for turn in range(int(rounds) + 1)]
    goes = [_go(state, int(ranks), place) for place in places][1:]
    found: dict[str, Any] = {task: [go[task] for go in goes] for task in CALLS}
    print(json.dumps({**found, "index": (places[0] / NAME).stat().st_size}))


if __name__ == "__main__":
    main(*sys.argv[1:])
