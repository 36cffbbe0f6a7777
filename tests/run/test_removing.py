"""How checkpoints go: index first, never half, never with an error that stops anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardstore.check import verify
from shardstore.run import KeepLast, Run, removing
from shardstore.storage import open_store
from tests.kit.faults import CHANGING, CountingStore, Fault, FaultyStore, Wrapper
from tests.kit.runs import Trainer, steps

SECOND_MINUTE = 61


class Dead(BaseException):
    """A process that has died at this point."""


class Dying(Wrapper):
    """Stops at the nth call that changes something, in place of it."""

    def __init__(self, store, nth: int) -> None:
        super().__init__(store)
        self.left = nth

    def around(self, call, key, make):
        if call in CHANGING:
            self.left -= 1
            if not self.left:
                raise Dead
        return make()


def _age(folder: Path) -> None:
    """Make all marks below a folder a minute older."""
    for mark in folder.rglob("attempt-*.json"):
        then = mark.stat().st_mtime - SECOND_MINUTE
        os.utime(mark, (then, then))


def test_the_index_goes_first(trainer, run):
    """Under a mark with all its files the indexes go before any of them, and the mark last."""
    one = trainer.save(10)
    with run.opened(one.name) as place:
        counting = CountingStore(place)
        assert removing.remove_checkpoint(counting, one.attempt) == []
    changes = [(call.name, call.key) for call in counting.calls if call.name in CHANGING]
    mark = f"attempt-{one.attempt}.json"
    assert changes[:3] == [("put", mark), ("delete", "model.safetensors.index.json"), ("delete", "shardstore.json")]
    assert changes[-1] == ("delete", mark)
    assert len(changes) == 6
    assert run.checkpoints() == []
    assert list(run.store.list(f"{one.name}/")) == []


def test_folders_go_too(folder):
    """On a local file system nothing is left of it, the traces of conditional puts included."""
    with Run(folder) as run:
        trainer = Trainer(run)
        one = trainer.save(10)
        with run.opened(one.name) as place:
            place.put("x", removing.Bytes(b""), if_absent=True)
            place.delete("x")
        assert run.remove(one) == []
        assert not Path(one.url).exists()


@pytest.mark.parametrize("nth", range(1, 7))
def test_X16_death_in_the_midst_of_a_removal(folder, nth):
    """Killed before any of its steps: the checkpoint is whole, or not listed; what is left goes a minute later."""
    with Run(folder) as run:
        trainer = Trainer(run)
        one = trainer.save(10)
        trainer.save(20)
        with run.opened(one.name) as place, pytest.raises(Dead):
            removing.remove_checkpoint(Dying(place, nth), one.attempt)
        committed = [found for found in run.checkpoints() if found.state == "committed"]
        assert all(verify(found.url).ok for found in committed)
        assert steps(committed) == ([10, 20] if nth <= 3 else [20])
        assert run.newest().step == 20
        assert run.sweep() == []
        if nth > 3:
            assert Path(one.url).exists()  # not before its time of grace is over
        _age(folder)
        assert run.sweep() == []
        assert steps(run.checkpoints()) == ([10, 20] if nth <= 3 else [20])
        assert Path(one.url).exists() is (nth <= 3)


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("errno", [5, 30])
def test_X06_a_failing_store_raises_nothing(url, nth, errno):
    """Whichever call fails, the removal tells and does not raise; the newest is as it was, and is used."""
    with Run(url) as run:
        trainer = Trainer(run)
        one = trainer.save(10)
        trainer.save(20)
        run.opened = lambda name, opened=run.opened: _Faulty(opened(name), Fault(nth, errno, CHANGING))
        errors = run.remove(one)
        del run.opened
        assert len(errors) == 1
        assert run.newest().step == 20
        assert run.verify(20).ok
        assert all(run.verify(found).ok for found in run.checkpoints() if found.state == "committed")


class _Faulty:
    """A context that gives the store of another one with a fault."""

    def __init__(self, opened, fault: Fault) -> None:
        self.opened, self.fault = opened, fault

    def __enter__(self):
        return FaultyStore(self.opened.__enter__(), self.fault)

    def __exit__(self, *error):
        return self.opened.__exit__(*error)


def test_X06_k_of_one_and_a_save_that_fails(trainer, run):
    """K = 1 and a new save that dies before its commit: the old one is not let go, and is whole."""
    old = trainer.save(10)
    trainer.begin(20)
    plan = run.plan_retention([KeepLast(1)], verified={old.attempt})
    assert all(decision.keep for decision in plan)
    assert run.verify(run.newest()).ok


def test_pinned_since_the_plan(trainer, run):
    """A pin that was set after the plan was made still protects."""
    one = trainer.save(10)
    trainer.save(20)
    run.pin(10)
    assert "pinned" in run.remove(one)[0]
    assert steps(run.checkpoints()) == [10, 20]


def test_only_what_was_meant(trainer, run):
    """Unfinished and foreign ones are not removed, nor what has another attempt by now; what is gone is fine."""
    one = trainer.save(10)
    trainer.begin(20)
    trainer.save(30, run="0123456789abcdef")
    states = {found.state: found for found in run.checkpoints()}
    assert "unfinished: not touched" in run.remove(states["unfinished"])[0]
    assert "foreign: not touched" in run.remove(states["foreign"])[0]
    with run.opened(one.name) as place:
        assert "not touched" in removing.remove_checkpoint(place, "f" * 16)[0]
    assert run.verify(10).ok
    assert run.remove(one) == []
    assert run.remove(one) == []


def test_quarantine_ends_with_the_checkpoint(trainer, run):
    """With a checkpoint its mark of quarantine goes."""
    trainer.save(10)
    trainer.save(20)
    run.quarantine(10, "damaged")
    (one,) = [found for found in run.checkpoints() if found.quarantined]
    assert run.remove(one) == []
    assert list(run.store.list("marks/")) == []


def test_foreign_files_stay(folder):
    """What somebody has put into a checkpoint's folder stays, and so does the folder."""
    with Run(folder) as run:
        one = Trainer(run).save(10)
        Path(one.url, "notes.txt").write_text("mine")
        Path(one.url, "model.safetensors.index.json").write_text('{"weight_map": {"w": "pytorch_model.bin"}}')
        assert run.remove(one) == []
        left = sorted(path.name for path in Path(one.url).iterdir())
        assert left == ["model.safetensors.index.json", "notes.txt"]


def test_sweep_spares_what_is_young(folder):
    """A save that may be at work is left alone until its mark is a day old; then it goes, folder and all."""
    with Run(folder) as run:
        trainer = Trainer(run)
        trainer.save(10)
        name = trainer.begin(20)
        _age(folder)
        assert run.sweep() == []
        assert (folder / name).exists()
        for mark in (folder / name).glob("attempt-*.json"):
            os.utime(mark, (0, 0))
        assert run.sweep() == []
        assert not (folder / name).exists()
        assert steps(run.checkpoints()) == [10]


def test_a_store_that_can_not_be_opened_is_told(trainer, run):
    """An error while it looks is told, too."""
    one = trainer.save(10)
    with run.opened(one.name) as place:
        broken = FaultyStore(place, Fault(1, 13, times=99))
        assert "permission is denied" in removing.remove_checkpoint(broken, one.attempt)[0]
        assert removing.sweep(broken)
    assert open_store(run.url).get(f"{one.name}/shardstore.json", limit=1 << 20)
