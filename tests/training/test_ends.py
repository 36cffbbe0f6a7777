"""Scripts that end while a background save runs, however they end and wherever they save: committed, or not 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardstore
from shardstore.run import Run
from tests.kit.s3 import _proxy, place, proxy, seaweed

__all__ = ["_proxy", "place", "proxy", "seaweed"]

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

BEGIN = """
import json, os, sys, threading, torch, shardstore
from shardstore.training import Checkpointer
place, options = sys.argv[1], json.loads(sys.argv[2])
state = {"model": torch.nn.Linear(1000, 1500)}
"""
SAVE = "shardstore.save_async(state, place, storage_options=options)\n"
IN_A_THREAD = """
def work():
    threading.main_thread().join()
    shardstore.save_async(state, place, storage_options=options)
threading.Thread(target=work).start()
"""
TRAIN = """
with Checkpointer(place, state, every_steps=1, background=True, storage_options=options) as ckpt:
    ckpt.resume()
    ckpt.step()
    {end}
"""


def script(code, url, options=None):
    """Run a script to its end."""
    command = [sys.executable, "-c", BEGIN + code, str(url), json.dumps(options)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("code", "end"), [(SAVE, 0), (SAVE + "sys.exit(5)", 5), (IN_A_THREAD, 0)], ids=["end", "exit", "thread"]
)
def test_right_after_save_async_to_a_bucket(place, code, end):
    """The save is finished, also one that a thread begins when the main one has ended; the exit code stays."""
    done = script(code, place.url, place.options)
    assert done.returncode == end, done.stderr
    assert shardstore.verify(place.url, storage_options=place.options).ok


@pytest.mark.s3
def test_a_failure_right_after_save_async_to_a_bucket(place):
    """The server takes nothing from this user: the process fails, and says why."""
    done = script(SAVE, place.url, {**place.options, "secret": "wrong"})
    assert done.returncode == 1
    assert "the last background save failed" in done.stderr


@pytest.mark.s3
@pytest.mark.parametrize(("end", "code", "steps"), [("", 0, [1]), ("1 / 0", 1, [1])], ids=["end", "error"])
def test_a_training_in_a_bucket_finishes_its_running_save(place, end, code, steps):
    """Also after an exception, which is what comes out."""
    done = script(TRAIN.format(end=end), place.url, place.options)
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == bool(code)
    with Run(place.url, place.options) as run:
        assert [one.step for one in run.checkpoints()] == steps
        assert run.verify(1).ok


def test_a_training_that_never_closes_finishes_its_running_save(tmp_path):
    """Without the `with`, and gone right after the step: the checkpoint is committed all the same."""
    code = (
        "ckpt = Checkpointer(place, state, every_steps=1, background=True)\n"
        "ckpt.resume()\nckpt.step()\nprint(ckpt._pending.done())\n"
    )
    done = script(code, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "run") as run:
        assert [one.step for one in run.checkpoints()] == [1]
        assert run.verify(1).ok
