"""How long save and load take, beside torch.save and torch.load of the same state."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import shardstore

SAVES = ("shardstore.save", "torch.save")
FLUSHED = "torch.save, then fsync"
LOADS = ("shardstore.load", "torch.load")
INTO = ("shardstore.load(into=)", "torch.load, then copy_")
CALLS = (*SAVES, FLUSHED, *LOADS, *INTO)


def synthetic(nbytes: int, tensors: int = 24) -> dict[str, Any]:
    """A state of random float32 weights, of about `nbytes` in all."""
    rows = max(1, nbytes // tensors // 4096)
    return {"model": {f"layers.{number}.weight": torch.rand(rows, 1024) for number in range(tensors)}}


def measure(state: dict[str, Any], folder: Path, rounds: int) -> dict[str, Any]:
    """Medians in seconds, and GB/s (1e9 bytes), of every call; `state` is nested, of tensors and plain data.

    All calls take turns, in each second round backwards, so that a slow moment of the machine hits all of them alike.
    The files of a round are gone before the next one. Loads read what was just written, from the page cache.
    """
    jobs = _jobs(state, _zeros_like(state), folder)
    _clear(folder)
    _check(jobs, state)
    seconds: dict[str, list[float]] = {name: [] for name in CALLS}
    for number in range(rounds):
        _clear(folder)
        for group in (SAVES, LOADS, INTO):
            for name in group if number % 2 == 0 else reversed(group):
                seconds[name].append(_timed(jobs[name]))
                if name == "torch.save":
                    flush = _timed(lambda: _fsync(folder / "torch.pt"))
                    seconds[FLUSHED].append(seconds[name][-1] + flush)
    _clear(folder)
    tensors = {tensor.data_ptr(): tensor for tensor in _tensors(state)}.values()  # tied ones count once
    nbytes = sum(tensor.nbytes for tensor in tensors)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    calls = {name: {"seconds": found, "gb_per_s": nbytes / found / 1e9} for name, found in medians.items()}
    return {"bytes": nbytes, "tensors": len(tensors), "rounds": rounds, "calls": calls}


def _timed(job: Callable[[], Any]) -> float:
    """Seconds that a call takes, without what becomes of its result."""
    began = time.perf_counter()
    result = job()
    seconds = time.perf_counter() - began
    del result
    return seconds


def _check(jobs: dict[str, Callable[[], Any]], state: dict[str, Any]) -> None:
    """Every call once, also to warm up: what is loaded must be what was saved."""
    for name in SAVES:
        jobs[name]()
    for name in (*LOADS, *INTO):
        pairs = zip(_tensors(jobs[name]()), _tensors(state), strict=True)
        if not all(torch.equal(found, saved) for found, saved in pairs):
            raise RuntimeError(f"{name} gave other tensors than were saved")


def _jobs(state: dict[str, Any], target: dict[str, Any], folder: Path) -> dict[str, Callable[[], Any]]:
    ours, torchs = folder / "ours", folder / "torch.pt"

    def torch_into() -> Any:
        for place, tensor in zip(_tensors(target), _tensors(torch.load(torchs)), strict=True):
            place.copy_(tensor)
        return target

    return {
        "shardstore.save": lambda: shardstore.save(state, ours),
        "torch.save": lambda: torch.save(state, torchs),
        "shardstore.load": lambda: shardstore.load(ours),
        "torch.load": lambda: torch.load(torchs),
        "shardstore.load(into=)": lambda: shardstore.load(ours, into=target),
        "torch.load, then copy_": torch_into,
    }


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def _zeros_like(state: Any) -> Any:
    """The same structure with tensors of its own, whose memory has been touched."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state).zero_()
    if isinstance(state, dict):
        return {key: _zeros_like(value) for key, value in state.items()}
    return state


def _fsync(path: Path) -> None:
    """Wait until the disk has the file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
