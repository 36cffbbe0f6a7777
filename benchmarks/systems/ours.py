"""shardstore."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import shardstore
from benchmarks.bucket import Remote, Where
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


def _options(case: Case, folder: Where) -> dict[str, Any]:
    """On S3 nothing but the way there: all else is the default."""
    return {"storage_options": folder.options} if isinstance(folder, Remote) else {"threads": case.threads}
