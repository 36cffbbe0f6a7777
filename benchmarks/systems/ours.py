"""shardstore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

import shardstore
from benchmarks.bucket import Remote, Where
from benchmarks.flat_file import NAME as FLAT
from benchmarks.portion import Portion
from benchmarks.states import Case
from benchmarks.systems.base import System
from shardstore.formats import Layout, convert
from shardstore.saving import background


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
        "partial": "open(path)[name][rows]",
        "verify": "verify(path)",
        "stall": "save_async(state, path)",
        "stall-workers": "save_async(state, path)",
        "beside": "save_async(state, path)",
        "convert": "formats.convert(file, path)",
        "list": "Run(path).checkpoints()",
        "newest": "Run(path).newest()",
        "fuse-save": "save(state, path)",
        "fuse-load-into": "load(path, into=state)",
        "fuse-load-fresh": "load(path)",
        "s3-save": "save(state, url)",
        "s3-load-into": "load(url, into=state)",
        "s3-load-fresh": "load(url)",
        "s3-paced-save": "save(state, url)",
        "s3-paced-load": "load(url, into=state)",
    }

    def save(self, case: Case, folder: Where, *, durable: bool) -> None:  # noqa: ARG002 - it is durable anyway
        shardstore.save(case.state, str(folder / "checkpoint"), **_options(case, folder))

    def load_into(self, case: Case, folder: Where) -> None:
        shardstore.load(str(folder / "checkpoint"), into=case.target, **_options(case, folder))

    def load_fresh(self, case: Case, folder: Where) -> Any:
        return shardstore.load(str(folder / "checkpoint"), **_options(case, folder))

    def load_mapped(self, case: Case, folder: Path) -> Any:
        return shardstore.load(str(folder / "checkpoint"), mode="map", threads=case.threads)

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        with shardstore.open(str(folder / "checkpoint")) as checkpoint:
            return len(checkpoint)

    def partial(self, case: Case, folder: Path, wanted: Portion) -> dict[str, torch.Tensor]:
        with shardstore.open(str(folder / "checkpoint")) as checkpoint:
            return {name: checkpoint[_path(name, case)][rows] for name, rows in wanted.items()}

    def verify(self, case: Case, folder: Path) -> bool:
        return shardstore.verify(str(folder / "checkpoint"), threads=case.threads).ok

    def background(self, case: Case, folder: Path) -> Any:
        return shardstore.save_async(case.state, str(folder / "checkpoint"))

    def held(self, case: Case, folder: Path, hold: Callable[..., None]) -> Any:
        return shardstore.save_async(case.state, str(folder / "checkpoint"), listener=hold)

    def release(self, case: Case) -> None:  # noqa: ARG002
        background._background.arena.release()

    def convert(self, case: Case, folder: Path) -> None:
        layout = Layout({name: tuple(tensor.shape) for name, tensor in case.state["model"].items()})
        convert(folder / FLAT, folder / "checkpoint", layout=layout)

    def list(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        with shardstore.Run(folder) as run:
            return len(run.checkpoints())

    def newest(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        with shardstore.Run(folder) as run:
            newest = run.newest()
            return newest.step if newest else -1


def _path(name: str, case: Case) -> str:
    """The path in a checkpoint of what has this dotted name in the state."""
    return f"model/{name}" if name in case.state else name.replace(".", "/", 1)


def _options(case: Case, folder: Where) -> dict[str, Any]:
    """On S3 nothing but the way there: all else is the default."""
    return {"storage_options": folder.options} if isinstance(folder, Remote) else {"threads": case.threads}
