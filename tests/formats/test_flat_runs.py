"""Run folders of flat files, imported as runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore import formats
from shardstore.errors import CheckpointExists, CheckpointNotFound, Damaged, InvalidArgument, ShardstoreError
from shardstore.formats import Layout, Options
from shardstore.training import Checkpointer
from tests.formats.trainings import state_of, tied, train

STEPS = (2, 4, 5)


@pytest.fixture
def folder(shm_path: Path) -> tuple[Any, Path]:
    """A training that went five steps, and the folder that its trainer kept."""
    training, made = tied(), shm_path / "old"
    made.mkdir()
    losses = []
    for step in range(1, 6):
        losses += train(training, 1, seed=step)
        if step in STEPS:
            path = str(made / f"step_{step:06d}.bin")
            formats.by_name("flat").write(state_of(training, step=step), path, Options(layout=Layout.of(*training)))
    (made / ".loss.json").write_text(json.dumps(losses))
    (made / ".samples.json").write_text('[{"step": 5, "text": "abc"}]')
    (made / ".state.json").write_text('{"lr": 0.5}')
    return training, made


def test_newest_step_becomes_a_run_from_which_training_goes_on(folder: tuple[Any, Path], shm_path: Path) -> None:
    """Losses come into the log, the other files become sidecars, and the resumed training is the original's equal."""
    training, old = folder
    url, fresh = str(shm_path / "run"), tied()
    made = formats.convert(old, url, model=fresh[0], optimizer=fresh[1])
    assert (made.source, made.target, made.step) == ("flat-run", "shardstore", 5)
    assert "random states" in made.notes[0]
    with shardstore.Run(url) as run:
        assert [one.step for one in run.checkpoints()] == [5]
        assert list(run.losses().items()) == list(enumerate(json.loads((old / ".loss.json").read_text()), 1))
        assert run.sidecar("samples").read() == [{"step": 5, "text": "abc"}]
        assert run.sidecar("state").read() == {"lr": 0.5}
        assert run.verify(5).ok
    with Checkpointer(url, state_of(fresh)) as ckpt:
        assert ckpt.resume() == 5
        assert train(fresh, 3, seed=9) == train(training, 3, seed=9)


@pytest.mark.parametrize(("steps", "wanted"), [("all", [2, 4, 5]), ([4, 2], [2, 4]), ("newest", [5])])
def test_chosen_steps(folder: tuple[Any, Path], shm_path: Path, steps: Any, wanted: list[int]) -> None:
    """All or some steps come in order, each continuing the one before; losses go as far as the last of them."""
    formats.convert(folder[1], str(shm_path / "run"), steps=steps)
    with shardstore.Run(str(shm_path / "run")) as run:
        assert [one.step for one in run.checkpoints()] == wanted
        assert list(run.losses()) == list(range(1, wanted[-1] + 1))
        assert all(one.line for one in run.checkpoints())


def test_the_newest_as_one_checkpoint(folder: tuple[Any, Path], shm_path: Path) -> None:
    """With a format for the target, the folder is its newest file."""
    formats.convert(folder[1], str(shm_path / "s"), to_format="shardstore")
    formats.convert(str(shm_path / "s"), str(shm_path / "b.bin"))
    assert (shm_path / "b.bin").read_bytes() == (folder[1] / "step_000005.bin").read_bytes()


@pytest.mark.parametrize(
    "losses",
    ["[[1, 0.5], [2, 0.25]]", '[{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]', '{"2": 0.25, "1": 0.5}',
     "[0.5, 0.25]", "[[2, 9], [1, 0.5], [2, 0.25]]"],
)  # fmt: skip
def test_forms_of_losses(folder: tuple[Any, Path], shm_path: Path, losses: str) -> None:
    """Losses may name their steps, or stand one for each step from 1 on; the last one of a step counts."""
    (folder[1] / ".loss.json").write_text(losses)
    formats.convert(folder[1], str(shm_path / "run"))
    with shardstore.Run(str(shm_path / "run")) as run:
        assert dict(run.losses()) == {1: 0.5, 2: 0.25}


@pytest.mark.parametrize(
    "losses", ['["x"]', "[", "3", '{"x": 1}', "[[1]]", "[NaN]", '[{"step": -1, "loss": 1}]', f"[1{'0' * 400}]"]
)
def test_losses_that_are_none(folder: tuple[Any, Path], shm_path: Path, losses: str) -> None:
    """A damaged history is an error before a run is made."""
    (folder[1] / ".loss.json").write_text(losses)
    with pytest.raises(Damaged, match="loss"):
        formats.convert(folder[1], str(shm_path / "run"))
    with pytest.raises(ShardstoreError):
        shardstore.load(f"{shm_path}/run@latest")


def test_folders_without_the_small_files(folder: tuple[Any, Path], shm_path: Path) -> None:
    """Only the flat files must be there."""
    for name in (".loss.json", ".samples.json", ".state.json"):
        (folder[1] / name).unlink()
    formats.convert(folder[1], str(shm_path / "run"))
    with shardstore.Run(str(shm_path / "run")) as run:
        assert len(run.losses()) == 0
        assert run.sidecar("samples").read() is None


def test_wrong_choices(folder: tuple[Any, Path], shm_path: Path) -> None:
    """A step that isn't there, a choice that is none, and a target that is a run are refused."""
    for steps, error in (([3], CheckpointNotFound), ("some", InvalidArgument), ([], InvalidArgument)):
        with pytest.raises(error):
            formats.convert(folder[1], str(shm_path / "run"), steps=steps)
    formats.convert(folder[1], str(shm_path / "run"))
    with pytest.raises(CheckpointExists):
        formats.convert(folder[1], str(shm_path / "run"))
