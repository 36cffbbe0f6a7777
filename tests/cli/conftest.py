"""What the tests of the command line share: calls of it, here and in real processes, and a folder of checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardstore
from shardstore.cli import main
from tests.cli import made

ROOT = Path(shardstore.__file__).parents[1]


@pytest.fixture
def call() -> Callable[..., Result]:
    """Call the command line in this process."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words], prog_name="shardstore")


@pytest.fixture
def call_json(call: Callable[..., Result]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Call it with --json; the exit code and the one document on stdout."""

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        result = call(*words, "--json")
        return result.exit_code, json.loads(result.stdout)

    return run


@pytest.fixture
def start() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Call it in a process of its own. `script`: Python that runs instead of `-m shardstore`, with the same words."""

    def run(*words: object, script: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
        how = ["-c", script] if script else ["-m", "shardstore"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        words_ = [sys.executable, *how, *map(str, words)]
        return subprocess.run(words_, text=True, env=env, timeout=120, check=False, **streams)

    return run


@pytest.fixture
def run_folder(shm_path: Path) -> Path:
    """Two whole checkpoints whose steps sort otherwise as text, and two saves that died, 30 hours and now."""
    made.checkpoint(shm_path / "step-10", step=10, attempt="1" * 16, left=["optimizer/hook"])
    made.checkpoint(shm_path / "step-9", step=9, attempt="2" * 16)
    made.unfinished(shm_path / "step-11", attempt="3" * 16, hours=30)
    made.unfinished(shm_path / "step-12", attempt="4" * 16)
    return shm_path
