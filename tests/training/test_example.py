"""The examples in docs and README run, and go on when they are started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardstore.run import Run
from tests.kit.weed import wait_until

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(folder):
    """Run the example as a newcomer does."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), str(folder)]
    return subprocess.run(command, env=ENV, check=False, capture_output=True, text=True, timeout=120)


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


def readme_example():
    """The block of the README that trains."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "Checkpointer(" in block]
    assert len(found.splitlines()) <= 15
    return found


@pytest.mark.slow
def test_the_example_of_the_readme_as_it_stands(tmp_path):
    """Killed in the midst and started again: it does all of its steps, and resumes from a save of its own."""
    command = [sys.executable, "-c", readme_example()]
    first = subprocess.Popen(command, cwd=tmp_path, env=ENV)
    wait_until(lambda: any(tmp_path.glob("run/step-*/shardstore.json")), "a checkpoint")
    first.kill()
    assert first.wait() == -signal.SIGKILL
    second = subprocess.run(command, cwd=tmp_path, env=ENV, check=False, capture_output=True, text=True, timeout=120)
    assert (second.returncode, second.stderr) == (0, "")
    with Run(tmp_path / "run") as run:
        history = run.losses()
        assert list(history) == list(range(1, 1001))
        assert [event.kind for event in history.events] == ["start", "resume"]
        assert history.events[1].step in range(100, 1000, 100)
        assert [one.step for one in run.checkpoints() if one.usable][-3:] == [800, 900, 1000]
