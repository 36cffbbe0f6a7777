"""torch.save and torch.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.portion import Portion
from benchmarks.states import Case, leaves, like
from benchmarks.systems.base import System, flush

NAME = "state.pt"


def copy(case: Case, loaded: Any) -> None:
    """Copy what was loaded into the target, as a load_state_dict does."""
    torch._foreach_copy_([tensor for _, tensor in leaves(case.target)], [tensor for _, tensor in leaves(loaded)])


class Torch(System):
    """The defaults."""

    name = "torch"
    files = "torch"
    lacks = "verified load, atomic commit"
    calls: ClassVar = {
        "save": "torch.save",
        "save-durable": "torch.save, fsync",
        "load-into": "torch.load, copy_",
        "load-fresh": "torch.load",
        "open": "torch.load(mmap=True)",
        "fuse-save": "torch.save, fsync",
        "fuse-load-into": "torch.load, copy_",
        "fuse-load-fresh": "torch.load",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        torch.save(case.state, folder / NAME)
        if durable:
            flush(folder / NAME)

    def load_into(self, case: Case, folder: Path) -> None:
        copy(case, torch.load(folder / NAME, weights_only=True))

    def load_fresh(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        return torch.load(folder / NAME, weights_only=True)

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        return sum(1 for _ in leaves(torch.load(folder / NAME, weights_only=True, mmap=True)))


class TorchUnchecked(System):
    """Its fastest save: no CRC-32 in the archive."""

    name = "torch-nocrc"
    files = "torch"
    lacks = "checksum, atomic commit"
    calls: ClassVar = {
        "save": "torch.save, set_crc32_options(False)",
        "save-durable": "torch.save, set_crc32_options(False), fsync",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(compute_crc32=False)
        try:
            Torch().save(case, folder, durable=durable)
        finally:
            torch.serialization.set_crc32_options(before)

    def wrong(self, case: Case, folder: Path) -> str | None:
        return Torch().wrong(case, folder)


class TorchMapped(System):
    """Reads by page faults on a private map."""

    name = "torch-mmap"
    files = "torch"
    lacks = "verified load"
    calls: ClassVar = {
        "load-into": "torch.load(mmap=True), copy_",
        "load-fresh": "torch.load(mmap=True), clone",
        "load-mapped": "torch.load(mmap=True); reads no tensor",
        "partial": "torch.load(mmap=True), clone of rows",
    }

    def load_into(self, case: Case, folder: Path) -> None:
        copy(case, self.load_mapped(case, folder))

    def load_fresh(self, case: Case, folder: Path) -> Any:
        return like(self.load_mapped(case, folder), torch.clone)

    def load_mapped(self, case: Case, folder: Path) -> Any:  # noqa: ARG002
        return torch.load(folder / NAME, weights_only=True, mmap=True)

    def partial(self, case: Case, folder: Path, wanted: Portion) -> dict[str, torch.Tensor]:
        loaded = dict(leaves(self.load_mapped(case, folder)))
        return {name: loaded[name][rows].clone() for name, rows in wanted.items()}
