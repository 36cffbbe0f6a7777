"""The example with torchrun, as the docs tell: saved by two ranks, loaded by three, and by a plain process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(folder: Path, ranks: int) -> str:
    """The example's output; `ranks` 0 is a plain process."""
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, str(ROOT / "examples/fsdp.py")]
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_two_ranks_save_three_and_one_process_go_on(tmp_path: Path):
    """Each start loads the very bits that the one before saved, weights and moments, and trains on."""
    first, second, third = (run(tmp_path, ranks) for ranks in (2, 3, 0))
    assert "training from the start" in first
    for before, after, step in ((first, second, 10), (second, third, 20)):
        saved = re.search(rf"saved step {step}, sum (\w{{16}}):", before)
        loaded = re.search(rf"loaded step {step}, sum (\w{{16}})\n", after)
        assert saved is not None
        assert loaded is not None
        assert saved[1] == loaded[1]
    assert "saved step 30" in third
