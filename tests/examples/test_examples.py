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
def test_the_demo_keeps_every_promise_and_shows_it(tmp_path):
    """The whole story in small, with all its evidence in the JSON; what is kept is whole."""
    how = ["--json", "demo.json", "--plot", "demo.png", "--keep", "kept"]
    done = run("demo.py", *SMALL, *how, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    figures = json.loads((tmp_path / "demo.json").read_text())
    check_resume_and_damage(figures, done.stdout)
    check_run(figures["run"])
    assert [one["state"] for one in figures["speed"]] == ["this training", "synthetic"]
    for one in figures["speed"]:
        assert len(one["calls"]) == 7
        assert all(call["seconds"] > 0 and call["gb_per_s"] > 0 for call in one["calls"].values())
    assert left_in(tmp_path) == ["demo.json", "demo.png", "kept"]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["branch", "run", "step-3", "whole"]
    verify = [sys.executable, "-m", "shardstore", "verify", str(tmp_path / "kept" / "step-3")]
    assert subprocess.run(verify, cwd=ROOT, check=False, capture_output=True).returncode == 0


def check_resume_and_damage(figures, said):
    """Equal losses and weights, damage found by load and by verify."""
    assert figures["equal"] is True
    assert figures["weights_equal"] is True
    assert figures["losses"]["uninterrupted"] == figures["losses"]["resumed"]
    assert len({float.fromhex(loss) for loss in figures["losses"]["resumed"]}) == 3
    damage = figures["damage"]
    assert damage["found"] is True
    assert damage["exit_code"] == 3
    assert damage["blocks"] == [0]
    assert damage["tensors"]
    assert damage["file"] in said
    assert figures["saved"]["bytes"] > figures["parameters"] * 12


def check_run(run):
    """Killed in a save, asked to save, stopped, turned and forked, with nothing lost or different."""
    assert run["sigkill"]["exit_code"] == -9
    assert any(name.startswith("attempt-") for name in run["sigkill"]["files"])
    assert run["sigkill"]["steps_done"] - run["sigkill"]["resumes_from"] <= 10
    assert run["sigusr1"]["resumed_from"] == run["sigkill"]["resumes_from"]
    assert run["sigusr1"]["saved_step"] % 10
    assert run["sigterm"]["exit_code"] == 143
    assert run["sigterm"]["last_step"] == run["sigterm"]["saved_step"] == run["end"]["from"]
    assert run["end"]["losses_equal"] is True
    assert run["end"]["weights_equal"] is True
    assert len(run["end"]["losses"]) == 60
    assert (run["pivot"]["generation"], run["pivot"]["samples_after"]) == (1, 0)
    assert run["fork"]["step"] == run["fork"]["from"] == 40
    assert run["fork"]["common"] is True
    assert run["fork"]["run"] != run["fork"]["branch"]
    assert any("config.dropout was 0.1, and is 0.0 now" in line for line in run["fork"]["told"])


def test_the_demo_leaves_a_folder_that_is_there_alone(tmp_path):
    """With --keep it makes a new one, or says that it can't."""
    (tmp_path / "kept").mkdir()
    again = run("demo.py", *SMALL, "--keep", "kept", folder=tmp_path)
    assert again.returncode == 1
    assert "kept" in again.stderr
    assert "Traceback" not in again.stderr
    assert left_in(tmp_path / "kept") == []
