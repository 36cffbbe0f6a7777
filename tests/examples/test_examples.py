"""The examples run as a newcomer runs them, only smaller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--layers=1", "--width=32", "--heads=2", "--context=32", "--batch=2", "--steps=6", "--resume-at=3",
    "--text-bytes=50000", "--synthetic-mb=2", "--rounds=1",
]  # fmt: skip


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder of its own, whose temporary files lie below it, too."""
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    script, *rest = map(str, arguments)
    command = [sys.executable, str(ROOT / "examples" / script), *rest]
    return subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=250)


def left_in(folder: Path) -> list[str]:
    """What a run left there, and of temporary files those with our name."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*") if path.name != "tmp") + [
        str(path.relative_to(folder)) for path in folder.glob("tmp/shardstore*")
    ]


def test_quickstart_saves_and_loads(tmp_path):
    """The first thing that a newcomer runs works, says so, and leaves nothing behind."""
    done = run("quickstart.py", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "loaded step 3" in done.stdout
    assert "equal to what was saved: True" in done.stdout
    assert left_in(tmp_path) == []


def test_quickstart_refuses_to_save_twice_in_one_place(tmp_path):
    """A checkpoint that is there already is an error that says what to do, not overwritten."""
    folder = tmp_path / "mine"
    assert run("quickstart.py", folder, folder=tmp_path).returncode == 0
    again = run("quickstart.py", folder, folder=tmp_path)
    assert again.returncode == 1
    assert "CheckpointExists" in again.stderr
    assert "overwrite=True" in again.stderr


@pytest.mark.slow
def test_the_demo_resumes_bit_for_bit_and_finds_the_damage(tmp_path):
    """The whole story in small: equal losses and weights, damage found by load and by verify, figures of every call."""
    done = run("demo.py", *SMALL, "--json", "demo.json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    figures = json.loads((tmp_path / "demo.json").read_text())

    assert figures["equal"] is True
    assert figures["weights_equal"] is True
    assert figures["losses"]["uninterrupted"] == figures["losses"]["resumed"]
    assert len({float.fromhex(loss) for loss in figures["losses"]["resumed"]}) == 3

    damage = figures["damage"]
    assert damage["found"] is True
    assert damage["exit_code"] == 3
    assert damage["blocks"] == [0]
    assert damage["tensors"]
    assert damage["file"] in done.stdout

    assert figures["saved"]["bytes"] > figures["parameters"] * 12
    assert [one["state"] for one in figures["speed"]] == ["this training", "synthetic"]
    for one in figures["speed"]:
        assert len(one["calls"]) == 7
        assert all(call["seconds"] > 0 and call["gb_per_s"] > 0 for call in one["calls"].values())
    assert left_in(tmp_path) == ["demo.json"]


@pytest.mark.slow
def test_the_demo_keeps_its_checkpoint_when_asked(tmp_path):
    """With --keep the checkpoint stays, whole, in a folder that is made; one that is there already is left alone."""
    done = run("demo.py", *SMALL, "--keep", "kept", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-3"]
    verify = [sys.executable, "-m", "shardstore", "verify", str(tmp_path / "kept" / "step-3")]
    assert subprocess.run(verify, cwd=ROOT, check=False, capture_output=True).returncode == 0
    again = run("demo.py", *SMALL, "--keep", "kept", folder=tmp_path)
    assert again.returncode == 1
    assert "kept" in again.stderr
    assert "Traceback" not in again.stderr
