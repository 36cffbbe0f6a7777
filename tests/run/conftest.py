"""What the tests of runs share: a run on real files in memory or in the memory store, and one that trains in it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardstore.events import Noticed
from shardstore.run import Run
from shardstore.storage import memory
from tests.kit.runs import Trainer


@pytest.fixture(params=["files", "memory"])
def url(request, shm_path: Path) -> Iterator[str]:
    """A place for a run: in a folder, and in the memory store."""
    if request.param == "files":
        yield str(shm_path / "run")
        return
    yield f"memory://{secrets.token_hex(4)}/run"
    memory.reset()


@pytest.fixture
def folder(shm_path: Path) -> Path:
    """A folder for a run."""
    return shm_path / "run"


@pytest.fixture
def heard() -> list[str]:
    """What the listener of `run` was told."""
    return []


@pytest.fixture
def listener(heard: list[str]) -> Callable[[object], None]:
    """Keeps notices in `heard`."""
    return lambda event: heard.append(event.what) if isinstance(event, Noticed) else None


@pytest.fixture
def run(url: str, listener) -> Iterator[Run]:
    """A run that does not exist yet."""
    with Run(url, listener=listener) as made:
        yield made


@pytest.fixture
def trainer(run: Run) -> Trainer:
    """Makes the run, and saves to it."""
    return Trainer(run)
