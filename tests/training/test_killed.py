"""SIGKILL at any moment: the next start goes on by itself, and the end is that of a run that nothing stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardstore.run import Run
from tests.kit.same import assert_same
from tests.training.loop import BATCHES, EPOCHS

ROOT = Path(__file__).parents[2]
INTERVAL = 2


def start(folder, kill_at, mode):
    """Train in a process of its own, which dies before its `kill_at`-th call that changes a file; 0: not at all."""
    command = [sys.executable, "-m", "tests.training.loop", str(folder), str(kill_at), mode]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=120)


def check_loss(folder, mode):
    """What a dead process has left: no more than an interval is lost, or in the background two."""
    with Run(folder) as run:
        newest = run.newest()
        recorded = max(run.losses(), default=0)
        assert recorded - (newest.step if newest else 0) <= INTERVAL * (2 if mode == "background" else 1)


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "wanted"), [("foreground", 10), ("background", 5), ("preempted", 5)])
def test_G07_killed_at_any_store_operation_the_end_is_the_same(tmp_path, mode, wanted):
    """Weights, moments, losses and random numbers are equal bit for bit, after many deaths at random calls.

    `preempted`: SIGTERM comes first, and SIGKILL in the middle of the save that follows.
    """
    chance = random.Random(f"{mode}-4")
    assert start(tmp_path / "whole", 0, mode).returncode == 0
    expected = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert len(expected[1]) == EPOCHS * BATCHES
    kills = lives = 0
    while kills < wanted:
        folder = tmp_path / f"run-{lives}"
        lives += 1
        while (done := start(folder, chance.randrange(1, 200) if kills < wanted else 0, mode).returncode) != 0:
            assert done == -signal.SIGKILL or (done == 143 and mode == "preempted")
            kills += 1
            if (folder / "run.json").exists():
                check_loss(folder, mode)
        assert_same(torch.load(f"{folder}.pt", weights_only=False), expected)
