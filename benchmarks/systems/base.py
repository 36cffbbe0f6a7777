"""What a system is: who saves and loads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.portion import Portion
from benchmarks.states import Case, Tree, difference, zero


class System:
    """One way to save and load. It takes part in the tasks that `calls` names, and has the methods that they need.

    A save gets an empty folder, a load the folder that `save` of a system with the same `files` has filled. In tasks on
    S3 that is a place in a bucket, a `benchmarks.bucket.Remote`. `benchmarks.choice` says who is left out of a run.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "peer"  # ours, peer, plain (no checkpoint library) or limit (bare system calls)
    files: ClassVar[str]  # systems with the same word here read each other's files
    calls: ClassVar[dict[str, str]] = {}  # by task, what is called
    lacks: ClassVar[str] = ""  # what it does not do, of: hash, fsync, atomic commit
    cannot: ClassVar[dict[str, str]] = {}  # by state, why it is not measured there

    def missing(self) -> str | None:
        """Why it can't be measured here, None if it can."""
        return None

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        """Save the state. With `durable` it is flushed to the disk before this returns."""
        raise NotImplementedError

    def load_into(self, case: Case, folder: Path) -> None:
        """Fill the tensors of `case.target`, where they are."""
        raise NotImplementedError

    def load_fresh(self, case: Case, folder: Path) -> Any:
        """Load into memory of its own, and return what `tree` understands."""
        raise NotImplementedError

    def load_mapped(self, case: Case, folder: Path) -> Any:
        """Load without a copy, the bytes staying in the files."""
        raise NotImplementedError

    def open(self, case: Case, folder: Path) -> int:
        """Open, learn all names, types and shapes, close; return how many tensors there are."""
        raise NotImplementedError

    def partial(self, case: Case, folder: Path, wanted: Portion) -> dict[str, Any]:
        """Some rows of some tensors, in memory of their own, by dotted names."""
        raise NotImplementedError

    def verify(self, case: Case, folder: Path) -> bool:
        """Read all bytes and check them, keeping none."""
        raise NotImplementedError

    def background(self, case: Case, folder: Path) -> Any:
        """Begin a background save; return what has `done()` and `result()` once the state may be changed."""
        raise NotImplementedError

    def held(self, case: Case, folder: Path, hold: Callable[..., None]) -> Any:  # noqa: ARG002
        """The same, calling `hold` before each piece of work; None where that can't be had."""
        return None

    def release(self, case: Case) -> None:
        """Give back what background saves keep for the next one."""

    def convert(self, case: Case, folder: Path) -> None:
        """Make a checkpoint of the flat file of a C trainer that lies in the folder."""
        raise NotImplementedError

    def list(self, case: Case, folder: Path) -> int:
        """How many checkpoints a run has."""
        raise NotImplementedError

    def newest(self, case: Case, folder: Path) -> int:
        """The step of a run's newest checkpoint."""
        raise NotImplementedError

    def tree(self, loaded: Any, _case: Case) -> Tree:
        """What was loaded, as dicts of tensors; not timed."""
        return loaded

    def wrong(self, case: Case, folder: Path) -> str | None:
        """What is wrong with what was saved into the folder; not timed."""
        if self.calls.keys() & {"load-into", "s3-load-into"}:
            zero(case.target)
            self.load_into(case, folder)
            return difference(case.state, case.target)
        return difference(case.state, self.tree(self.load_fresh(case, folder), case))


def flush(*paths: Path) -> None:
    """Flush files to the disk, and the folder that they lie in."""
    for path in (*paths, *{path.parent for path in paths}):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def needs(module: str) -> str | None:
    """Why a system without that module can't be measured."""
    return None if importlib.util.find_spec(module) else f"needs the package {module}, of the extra `bench`"
