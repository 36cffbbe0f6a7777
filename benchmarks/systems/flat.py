"""The flat .bin that people write by hand: numpy's bytes in one file, names and shapes in a JSON file beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

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
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        arrays = [(name, tensor.numpy()) for name, tensor in leaves(case.state)]
        names = [[name, str(array.dtype), array.shape] for name, array in arrays]
        (folder / NAMES).write_text(json.dumps(names))
        with (folder / BYTES).open("wb") as file:
            for _, array in arrays:
                array.tofile(file)
        if durable:
            flush(folder / NAMES, folder / BYTES)

    def load_into(self, case: Case, folder: Path) -> None:
        with (folder / BYTES).open("rb") as file:
            for _, tensor in leaves(case.target):
                file.readinto(tensor.numpy())

    def load_fresh(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        names = json.loads((folder / NAMES).read_text())
        with (folder / BYTES).open("rb") as file:
            return {name: _array(file, dtype, shape) for name, dtype, shape in names}

    def load_mapped(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        whole = np.memmap(folder / BYTES, mode="c")
        loaded, at = {}, 0
        for name, dtype, shape in json.loads((folder / NAMES).read_text()):
            end = at + np.dtype(dtype).itemsize * int(np.prod(shape))
            loaded[name] = torch.from_numpy(whole[at:end].view(dtype).reshape(shape))
            at = end
        return loaded

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        return len(json.loads((folder / NAMES).read_text()))


def _array(file: Any, dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(file, dtype, int(np.prod(shape))).reshape(shape))
