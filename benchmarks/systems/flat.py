"""The flat .bin that people write by hand: numpy's bytes in one file, names and shapes in a JSON file beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import shardstore
from benchmarks import flat_file
from benchmarks.portion import Portion
from benchmarks.states import Case, leaves
from benchmarks.systems.base import System, flush

NAMES, BYTES = "names.json", "state.bin"


class Flat(System):
    """One thread, no check of any kind."""

    name = "flat"
    kind = "plain"
    files = "flat"
    lacks = "hash, fsync, atomic commit, structure"
    calls: ClassVar = {
        "save": "tofile",
        "save-durable": "tofile, fsync",
        "load-into": "readinto",
        "load-fresh": "fromfile",
        "load-mapped": "memmap; reads no tensor",
        "open": "json.load",
        "partial": "memmap, clone of rows",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        tensors = list(leaves(case.state))
        names = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in tensors]
        (folder / NAMES).write_text(json.dumps(names))
        with (folder / BYTES).open("wb") as file:
            for _, tensor in tensors:
                _bytes(tensor).tofile(file)
        if durable:
            flush(folder / NAMES, folder / BYTES)

    def load_into(self, case: Case, folder: Path) -> None:
        with (folder / BYTES).open("rb") as file:
            for _, tensor in leaves(case.target):
                file.readinto(_bytes(tensor))

    def load_fresh(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        names = json.loads((folder / NAMES).read_text())
        with (folder / BYTES).open("rb") as file:
            return {
                name: _tensor(np.fromfile(file, np.uint8, _nbytes(dtype, shape)), dtype, shape)
                for name, dtype, shape in names
            }

    def load_mapped(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        whole = np.memmap(folder / BYTES, mode="c")
        loaded, at = {}, 0
        for name, dtype, shape in json.loads((folder / NAMES).read_text()):
            end = at + _nbytes(dtype, shape)
            loaded[name] = _tensor(whole[at:end], dtype, shape)
            at = end
        return loaded

    def partial(self, case: Case, folder: Path, wanted: Portion) -> dict[str, torch.Tensor]:
        loaded = self.load_mapped(case, folder)
        return {name: loaded[name][rows].clone() for name, rows in wanted.items()}

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        return len(json.loads((folder / NAMES).read_text()))


class FlatFile(System):
    """What people write to convert the file of a C trainer: numpy reads it, and the state is saved as usual."""

    name = "numpy-save"
    kind = "plain"
    files = "flat-file"
    lacks = "memory for a part at a time, reading back"
    calls: ClassVar = {"convert": "fromfile, shardstore.save"}

    def convert(self, case: Case, folder: Path) -> None:
        shardstore.save(flat_file.read(case, folder), folder / "checkpoint", threads=case.threads)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _nbytes(dtype: str, shape: list[int]) -> int:
    return getattr(torch, dtype).itemsize * math.prod(shape)


def _tensor(data: np.ndarray, dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)
