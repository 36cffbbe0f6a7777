"""The example in docs and README runs, and goes on when it is started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shardstore.run import Run

ROOT = Path(__file__).parents[2]


def start(folder):
    """Run the example as a newcomer does."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=120)


def test_the_training_example_runs_and_goes_on_when_started_again(tmp_path):
    """A thousand steps; with its last checkpoint taken away, the second start does the rest and ends with the same."""
    first = start(tmp_path / "run")
    assert (first.returncode, first.stderr) == (0, "")
    with Run(tmp_path / "run") as run:
        run.remove(run.newest())
        assert run.newest().step == 900
    second = start(tmp_path / "run")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    with Run(tmp_path / "run") as run:
        assert [event.kind for event in run.losses().events] == ["start", "resume"]
        assert len(run.losses()) == 1000
