"""safetensors: one file, tensors under flat names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.portion import Portion
from benchmarks.states import Case, leaves
from benchmarks.systems.base import System, flush

NAME = "state.safetensors"


class Safetensors(System):
    """load_file maps the file and returns before it has read a tensor."""

    name = "safetensors"
    files = "safetensors"
    lacks = "hash, fsync, structure"
    calls: ClassVar = {
        "save": "save_file",
        "save-durable": "save_file, fsync",
        "load-into": "load_file, copy_",
        "load-mapped": "load_file; reads no tensor",
        "open": "safe_open, keys",
        "partial": "safe_open, get_slice, clone",
        "fuse-save": "save_file, fsync",
        "fuse-load-into": "load_file, copy_",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        save_file(dict(leaves(case.state)), folder / NAME)
        if durable:
            flush(folder / NAME)

    def load_into(self, case: Case, folder: Path) -> None:
        loaded = load_file(folder / NAME)
        names, targets = zip(*leaves(case.target), strict=True)
        torch._foreach_copy_(targets, [loaded[name] for name in names])

    def load_mapped(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        return load_file(folder / NAME)

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        with safe_open(folder / NAME, framework="pt") as file:
            return len(file.keys())

    def partial(self, case: Case, folder: Path, wanted: Portion) -> dict[str, torch.Tensor]:  # noqa: ARG002
        with safe_open(folder / NAME, framework="pt") as file:
            return {name: file.get_slice(name)[rows].clone() for name, rows in wanted.items()}


class SafetensorsCloned(System):
    """load_file and a copy of every tensor: what is in memory when it returns, as after any other fresh load."""

    name = "safetensors-clone"
    files = "safetensors"
    lacks = "hash, structure"
    calls: ClassVar = dict.fromkeys(("load-fresh", "load-mapped", "fuse-load-fresh"), "load_file, clone")

    def load_fresh(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        return {name: tensor.clone() for name, tensor in load_file(folder / NAME).items()}

    def load_mapped(self, case: Case, folder: Path) -> Any:
        return self.load_fresh(case, folder)
