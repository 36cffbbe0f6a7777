"""shardstore."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import shardstore
from benchmarks.states import Case
from benchmarks.systems.base import System


class Shardstore(System):
    """It always hashes, flushes and commits, and checks every byte that it loads."""

    name = "shardstore"
    kind = "ours"
    files = "shardstore"
    calls: ClassVar = {
        "save": "save(state, path)",
        "save-durable": "save(state, path)",
        "load-into": "load(path, into=state)",
        "load-fresh": "load(path)",
        "load-mapped": 'load(path, mode="map")',
        "open": "open(path)",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:  # noqa: ARG002 - it is durable anyway
        shardstore.save(case.state, str(folder / "checkpoint"), threads=case.threads)

    def load_into(self, case: Case, folder: Path) -> None:
        shardstore.load(str(folder / "checkpoint"), into=case.target, threads=case.threads)

    def load_fresh(self, case: Case, folder: Path) -> Any:
        return shardstore.load(str(folder / "checkpoint"), threads=case.threads)

    def load_mapped(self, case: Case, folder: Path) -> Any:
        return shardstore.load(str(folder / "checkpoint"), mode="map", threads=case.threads)

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        with shardstore.open(str(folder / "checkpoint")) as checkpoint:
            return len(checkpoint)
