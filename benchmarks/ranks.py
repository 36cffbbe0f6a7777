"""Several ranks save one checkpoint together, and load it: shardstore and DCP in turn, in the same processes.

`python -m benchmarks.ranks STATE ROUNDS FOLDER` is one rank; RANK and WORLD_SIZE say which.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardstore
from benchmarks import gpt_ranks
from benchmarks.children import ask_all
from benchmarks.machine import settle
from benchmarks.runner import Result
from benchmarks.states import STATES, Tree, leaves, like
from shardstore.specs import BLOCK


class Ours:
    """shardstore, with its defaults."""

    name, kind, lacks = "shardstore", "ours", ""
    calls: ClassVar = {
        "save": "save(state, path)",
        "load-into": "load(path, into=state)",
        "reshard": "load(path, into=state)",
    }

    def save(self, state: Tree, place: Path) -> None:
        shardstore.save(state, place)

    def load(self, state: Tree, place: Path) -> None:
        shardstore.load(place, into=state)

    def save_alone(self, state: Tree, place: Path) -> None:
        """By this rank alone, a state of whole tensors."""
        shardstore.save(state, place, group=None)


class Dcp:
    """torch.distributed.checkpoint, with its plans cached as its documents advise."""

    name, kind, lacks = "dcp", "peer", "hash"
    calls: ClassVar = {"save": "dcp.save, enable_plan_caching", "load-into": "dcp.load", "reshard": "dcp.load"}

    def save(self, state: Tree, place: Path) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=self._writer(place), planner=planner)

    def load(self, state: Tree, place: Path) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(place))

    def save_alone(self, state: Tree, place: Path) -> None:
        """By this rank alone, a state of whole tensors."""
        dcp.save(state, storage_writer=self._writer(place), no_dist=True)

    def _writer(self, place: Path) -> dcp.FileSystemWriter:
        threads = max(1, (os.cpu_count() or 1) // dist.get_world_size())
        return dcp.FileSystemWriter(place, thread_count=threads, sync_files=False)


SYSTEMS = (Ours(), Dcp())


@dataclass
class Row:
    """What became of one system at one task. `traffic`: bytes, and how many they should be."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    traffic: dict[str, int] = field(default_factory=dict)


class Rank:
    """This process's part."""

    def __init__(self, state: str, folder: Path) -> None:
        self._folder = folder
        self._state = gpt_ranks.build(state)
        self._want = [part.clone() for part in gpt_ranks.parts(self._state)]
        self._nbytes = sum(tensor.nbytes for _, tensor in leaves(self._state))
        self.rows = {(task, system.name): Row() for task in Ours.calls for system in SYSTEMS}

    def measure(self, rounds: int) -> None:
        """A warm-up, whose results are checked, and the rounds."""
        for system in SYSTEMS:
            self._source(system)
        for turn in range(rounds + 1):
            for system in SYSTEMS if turn % 2 else reversed(SYSTEMS):
                self._go(system, first=turn == 0)

    def _source(self, system: Any) -> None:
        """What one process has saved, for the ranks to load."""
        state = like(self._state, gpt_ranks.whole)
        if dist.get_rank() == 0:
            system.save_alone(state, self._folder / f"alone-{system.name}")
        dist.barrier()

    def _go(self, system: Any, *, first: bool) -> None:
        place = self._folder / system.name
        self._timed("save", system, system.save, place, first=first)
        if first:
            self.rows["save", system.name].traffic = {"written": _size(place), "of": self._nbytes}
        self._timed("load-into", system, system.load, place, first=first)
        self._timed("reshard", system, system.load, self._folder / f"alone-{system.name}", first=first)
        if dist.get_rank() == 0:
            shutil.rmtree(place)

    def _timed(self, task: str, system: Any, act: Callable[[Tree, Path], None], place: Path, *, first: bool) -> None:
        """One go, from when all ranks are ready until all are done."""
        row = self.rows[task, system.name]
        if first and task != "save":
            for part in gpt_ranks.parts(self._state):
                part.zero_()
        settle(self._nbytes * 5 // 4 // dist.get_world_size() if task == "save" else 0)
        read = _bytes_read()
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        act(self._state, place)
        cpu = time.process_time() - cpu
        dist.barrier()
        seconds, moved = time.perf_counter() - start, _bytes_read() - read
        if not first:
            row.seconds.append(seconds)
            row.cpu.append(_sum(cpu))
            return
        if task != "save":
            self._check(system.name, task)
            own = sum(part.nbytes for part in self._want)
            structure = sum(path.stat().st_size for path in place.rglob("*.json"))  # where everything is
            allowed = own + BLOCK * len(self._want) + structure
            row.traffic = {"read": _most(moved), "own": _most(own), "of": _most(allowed)}

    def _check(self, name: str, task: str) -> None:
        same = all(map(torch.equal, gpt_ranks.parts(self._state), self._want))
        if _sum(not same):
            raise ValueError(f"{name}: {task}: the result is wrong on a rank")


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def _size(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def _sum(value: float) -> float:
    return _reduced(value, dist.ReduceOp.SUM)


def _most(value: float) -> int:
    return int(_reduced(value, dist.ReduceOp.MAX))


def _reduced(value: float, how: Any) -> float:
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, how)
    return float(number)


def measure(state: str, rounds: int, place: Path) -> list[Result]:
    """Start the ranks, and return what they found. Raises RuntimeError if one failed."""
    size = STATES[state].ranks
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=place) as folder:
        said = ask_all("benchmarks.ranks", [[state, str(rounds), folder]] * size)[0]
    by_name = {system.name: system for system in SYSTEMS}
    results = []
    for task, name, row in said["rows"]:
        system = by_name[name]
        results.append(
            Result(
                state, task, name, system.kind, system.calls[task], system.lacks, said["tensors"], said["nbytes"], **row
            )
        )
    return results


def main(state: str, rounds: str, folder: str) -> None:
    """What one rank does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    try:
        mine = Rank(state, Path(folder))
        mine.measure(int(rounds))
        rows = [(task, name, asdict(row)) for (task, name), row in mine.rows.items()]
        print(json.dumps({"rows": rows, "tensors": len(mine._want), "nbytes": mine._nbytes}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
