"""What is looked at before the first step: room on the disk, and with `verify_on_start` every byte."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from shardstore.errors import Damaged, InvalidArgument, StoreError
from shardstore.run import Run
from shardstore.training import Checkpointer, checks
from tests.kit.damage import flip
from tests.training.kit import Told, saves, small, trained


def with_free(monkeypatch, nbytes, blocks=1000):
    """A file system with so many bytes free."""
    found = SimpleNamespace(f_bavail=nbytes, f_frsize=1, f_blocks=blocks)
    monkeypatch.setattr(checks.os, "statvfs", lambda place: found)


def test_too_little_room_for_one_checkpoint_is_an_error_at_construction(tmp_path, monkeypatch):
    """Nothing is made; the message has both figures. Exactly enough is enough, or a file system that can't tell."""
    trained(tmp_path / "run", 1)
    files = [path for path in saves(tmp_path / "run")[1].rglob("*") if path.is_file()]
    needed = sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
    state = {**small(), "large": torch.zeros(1_000_000)}
    with_free(monkeypatch, 4_000_000)
    with pytest.raises(StoreError, match=r"has 4\.0 MB free, and one checkpoint takes 4\.0 MB: make room") as full:
        Checkpointer(tmp_path / "new", state)
    assert full.value.errno == errno.ENOSPC
    assert not (tmp_path / "new").exists()
    with_free(monkeypatch, 0, blocks=0)
    with Checkpointer(tmp_path / "new", state):
        pass
    with_free(monkeypatch, needed)
    with pytest.raises(StoreError):
        Checkpointer(tmp_path / "run", small())
    with_free(monkeypatch, 20_000)
    with Checkpointer(tmp_path / "run", small()) as ckpt:
        ckpt.resume()


def test_object_stores_are_not_asked_for_room(monkeypatch):
    """They have no answer."""
    with_free(monkeypatch, 0)
    with Checkpointer("memory://room", small()) as ckpt:
        assert ckpt.resume() == 0


def other(folder):
    """A byte of a checkpoint that a resume without the section `extra` does not read."""
    place = next(folder.glob("state/0*.safetensors"))
    return place, -1 + place.stat().st_size


def test_verify_on_start_newest_finds_what_a_resume_would_not_read(tmp_path):
    """Damage in a section that is left out: unseen without it, quarantine and the older one with it."""
    folder, told = tmp_path / "run", Told()
    state = {**small(), "extra": torch.zeros(3_000_000, dtype=torch.uint8)}
    trained(folder, 2, state=state, shards=4)
    largest = max(saves(folder)[2].rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(largest, 1_000_000)
    with Checkpointer(folder, state) as ckpt:
        assert ckpt.resume(reset=["extra"]) == 2
    with Checkpointer(folder, state, verify_on_start="newest", listener=told) as ckpt:
        assert ckpt.resume(reset=["extra"]) == 1
    assert any("resumed from the older step 1: 1 steps are lost" in what for what in told.warnings)
    assert [one.step for one in Run(folder).checkpoints() if one.quarantined] == [2]


def test_verify_on_start_all_puts_every_damaged_one_into_quarantine(tmp_path):
    """The newest is whole and loaded; an older one is not, and that is said before it is needed."""
    folder, told = tmp_path / "run", Told()
    trained(folder, 4)
    for step in (1, 3):
        flip(*other(saves(folder)[step]))
    with Checkpointer(folder, small(), verify_on_start="newest", listener=told) as ckpt:
        assert ckpt.resume() == 4
    assert told.warnings == []
    with Checkpointer(folder, small(), verify_on_start="all", listener=told) as ckpt:
        assert ckpt.resume() == 4
    assert [one.step for one in Run(folder).checkpoints() if one.quarantined] == [1, 3]
    assert len([what for what in told.warnings if "an older checkpoint, is not whole" in what]) == 2


def test_verify_on_start_leaves_what_can_not_be_read_unmarked(tmp_path):
    """A missing file is unfinished, not damaged; a chosen step that is damaged is an error."""
    folder = tmp_path / "run"
    trained(folder, 3)
    other(saves(folder)[1])[0].rename(tmp_path / "late")
    with Checkpointer(folder, small(), verify_on_start="all") as ckpt:
        assert ckpt.resume() == 3
    assert not any(one.quarantined for one in Run(folder).checkpoints())
    flip(*other(saves(folder)[2]))
    with Checkpointer(folder, small(), verify_on_start="newest") as ckpt, pytest.raises(Damaged):
        ckpt.resume(step=2)


def test_verify_on_start_is_checked(tmp_path):
    """A typo is an error, before anything is made."""
    with pytest.raises(InvalidArgument, match="verify_on_start"):
        Checkpointer(tmp_path / "run", small(), verify_on_start="first")
    assert os.listdir(tmp_path) == []
