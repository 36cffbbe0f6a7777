"""Retention in training: nothing good is deleted, and nothing that goes wrong there stops a training."""

from __future__ import annotations

import shutil

import pytest

from shardstore import verify
from shardstore.check import verifying
from shardstore.training import Checkpointer, KeepBest, KeepEvery, KeepLast, keeping
from tests.kit.faults import Fault, FaultyStore, FlippingStore
from tests.training.kit import Told, saves, small, stores, train, trained


@pytest.mark.parametrize(("background", "threads"), [(True, 1), (False, 2)])
def test_reading_back_in_the_background_takes_one_thread(background, threads, tmp_path, monkeypatch):
    """It disturbs the steps as little as the save did; a training that waits for it has all cores read."""
    found = []
    monkeypatch.setattr(verifying, "default_threads", lambda: 2)
    check = keeping.verify_uncached
    monkeypatch.setattr(keeping, "verify_uncached", lambda *given: (found.append(given[2]), check(*given))[1])
    with Checkpointer(tmp_path / "run", small(), every_steps=1, keep=KeepLast(2), background=background) as ckpt:
        ckpt.resume()
        ckpt.step()
    assert found == [threads]


def test_what_no_policy_keeps_goes_one_save_later(tmp_path):
    """Any policy that keeps one is enough; the folder goes, too."""
    trained(tmp_path / "run", 10, keep=[KeepLast(2), KeepEvery(4), KeepBest("loss", 1, mode="max")])
    kept = set(saves(tmp_path / "run"))
    assert {4, 8, 9, 10} <= kept
    assert len(kept) <= 6
    assert {int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("step-*")} == kept


def test_X06_a_flipped_bit_in_the_new_one_keeps_the_older(tmp_path):
    """KeepLast(1) with a store that damages what it takes after hashing: the older survives, and is told why."""
    told = Told()

    class Flips(FlippingStore):
        def put(self, key, body, **conditions):
            self._key = key if "step-0000000" in self.url and "00002" not in self.url and "safetensors" in key else ""
            super().put(key, body, **conditions)

    with stores(lambda store: Flips(store, "", 800)):
        trained(tmp_path / "run", 5, keep=KeepLast(1), listener=told, every_steps=2)
    left = saves(tmp_path / "run")
    assert 2 in left
    assert verify(left[2]).ok
    assert any("damaged in the store, so nothing older is removed" in what for what in told.warnings)
    with Checkpointer(tmp_path / "run", small()) as ckpt:
        assert ckpt.resume() == 2


@pytest.mark.parametrize("nth", range(1, 8))
def test_X06_a_save_that_fails_at_any_write_keeps_the_older(tmp_path, nth):
    """K=1 and the second save fails at its n-th write: the first is there and whole."""
    trained(tmp_path / "run", 1, keep=KeepLast(1))
    fails = Fault(nth, errno=28, calls=frozenset({"put", "delete"}))

    def wrap(store):
        return FaultyStore(store, fails) if "step-00000002" in store.url else store

    with stores(wrap):
        state = small()
        with Checkpointer(tmp_path / "run", state, every_steps=1, keep=KeepLast(1)) as ckpt:
            ckpt.resume()
            train(state)
            ckpt.step()
            assert verify(saves(tmp_path / "run")[1]).ok
            raise_nothing_new(ckpt)


def raise_nothing_new(ckpt):
    """Leave without the save of a clean end."""
    ckpt._saved_step = ckpt.completed


def test_X06_failing_deletions_are_told_and_training_goes_on(tmp_path):
    """A store that deletes nothing costs space and warnings, not the run."""
    told = Told()

    class Refuses(FaultyStore):
        def _due(self, call, key):
            return Fault(1, errno=13) if call == "delete" and key.endswith("shardstore.json") else None

    with stores(Refuses):
        trained(tmp_path / "run", 4, keep=KeepLast(1), listener=told)
    assert sorted(saves(tmp_path / "run")) == [1, 2, 3, 4]
    assert any("could not be removed" in what for what in told.warnings)


def test_X10_lives_of_one_save_each_do_not_fill_the_disk(tmp_path):
    """What is to go is known again after a restart, though no process lives for two saves."""
    for step in range(1, 8):
        trained(tmp_path / "run", step, keep=KeepLast(2))
    assert sorted(saves(tmp_path / "run")) == [5, 6, 7]


def test_X18_no_more_than_one_too_many(tmp_path):
    """K are kept, and the one that goes with the next save."""
    for keep in (1, 3):
        trained(tmp_path / f"run-{keep}", 6, keep=KeepLast(keep))
        assert sorted(saves(tmp_path / f"run-{keep}")) == list(range(6 - keep, 7))


def test_a_policy_that_raises_stops_nothing(tmp_path):
    """It is the user's code; what it raises is told, and all stays."""
    told = Told()

    class Bad:
        def kept(self, checkpoints, facts):
            raise ZeroDivisionError

    trained(tmp_path / "run", 3, keep=Bad(), listener=told)
    assert sorted(saves(tmp_path / "run")) == [1, 2, 3]
    assert any("ZeroDivisionError" in what for what in told.warnings)


def test_pins_stay(tmp_path):
    """A pinned checkpoint is kept, whatever the policies say."""
    trained(tmp_path / "run", 1)
    with Checkpointer(tmp_path / "run", small(), every_steps=1, keep=KeepLast(1)) as ckpt:
        ckpt.run.pin(1)
        for _ in range(ckpt.resume(), 6):
            ckpt.step()
    assert sorted(saves(tmp_path / "run")) == [1, 5, 6]


def test_P14_the_best_that_is_gone_or_has_moved_stops_nothing(tmp_path):
    """The best is a step of this run, no path: the folder may be moved, and the best removed by hand."""
    best = KeepBest("loss", 1, mode="max")
    trained(tmp_path / "run", 3, keep=best)
    (tmp_path / "run").rename(tmp_path / "moved")
    first = saves(tmp_path / "moved")[1]
    trained(tmp_path / "moved", 5, keep=best)
    assert first.exists()
    shutil.rmtree(first)
    told = Told()
    trained(tmp_path / "moved", 8, keep=best, listener=told)
    assert told.warnings == []
    assert set(saves(tmp_path / "moved")) >= {7, 8}
