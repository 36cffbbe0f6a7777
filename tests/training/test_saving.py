"""When and how training saves: cadence, failures, in the background, at the end."""

# ruff: noqa: PT012 - what ends a training is raised somewhere in its block

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardstore.errors import InvalidArgument, StoreError
from shardstore.run import Run
from shardstore.training import Checkpointer, checkpointer
from tests.kit.faults import Fault, FaultyStore, SlowStore
from tests.kit.same import assert_same
from tests.training.kit import Told, saves, small, stores, train, trained, weights


def test_cadence_by_steps_and_seconds_whichever_comes_first(tmp_path, monkeypatch):
    """At multiples of every_steps, and when every_seconds have passed since the last save."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(checkpointer.time, "monotonic", lambda: clock.now)
    with Checkpointer(tmp_path / "run", small(), every_steps=5, every_seconds=60) as ckpt:
        ckpt.resume()
        saved = {}
        for step in range(1, 12):
            clock.now += 1.0 if step < 6 else 25.0
            saved[step] = ckpt.step() is not None
    assert [step for step, was in saved.items() if was] == [5, 8, 10]
    assert sorted(saves(tmp_path / "run")) == [5, 8, 10, 11]


@pytest.mark.parametrize("how", [{"every_steps": 0}, {"every_seconds": -1}, {"max_failures": -1}, {"keep": [3]}])
def test_senseless_arguments_are_refused(tmp_path, how):
    """At construction, and nothing is made."""
    with pytest.raises(InvalidArgument):
        Checkpointer(tmp_path / "run", small(), **how)
    assert not (tmp_path / "run").exists()


def test_a_clean_end_saves_and_an_error_does_not(tmp_path):
    """The last step is saved once; after an exception nothing new is, and it comes out as it was."""
    trained(tmp_path / "run", 3, every_steps=2)
    assert sorted(saves(tmp_path / "run")) == [2, 3]
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path / "run", small()) as ckpt:
        ckpt.resume()
        ckpt.step()
        raise ZeroDivisionError
    assert sorted(saves(tmp_path / "run")) == [2, 3]
    with pytest.raises(InvalidArgument, match="closed"):
        ckpt.step()


def test_failed_saves_are_reported_until_the_budget_is_spent(tmp_path):
    """Two of two allowed fail and training goes on; a good one starts the count anew; the third in a row is raised."""
    told, broken = Told(), {2, 3, 5, 6, 7}
    now = SimpleNamespace(step=0)

    class Fails(FaultyStore):
        def _due(self, call, key):
            return Fault(1, errno=5) if now.step in broken and call == "put" and "step-" in self.url else None

    with stores(Fails), pytest.raises(StoreError), Checkpointer(
        tmp_path / "run", small(), every_steps=1, max_failures=2, listener=told
    ) as ckpt:  # fmt: skip
        ckpt.resume()
        for step in range(1, 9):
            now.step = step
            assert (ckpt.step() is None) == (step in broken)
    assert now.step == 7
    assert sorted(saves(tmp_path / "run")) == [1, 4]
    assert len([what for what in told.warnings if "training goes on" in what]) == 4


def test_background_saves_are_returned_at_the_first_step_after_their_commit(tmp_path):
    """Training goes on while the save waits at the store; what it changes meanwhile is not in the checkpoint."""
    gates = []

    def slow(store):
        if "step-00000002" not in store.url:
            return store
        made = SlowStore(store)
        gates.append(made.gate("put", ".safetensors"))
        return made

    state = small()
    with stores(slow), Checkpointer(tmp_path / "run", state, every_steps=2, background=True) as ckpt:
        ckpt.resume()
        train(state)
        assert ckpt.step() is None
        train(state)
        expected = weights(state)
        assert ckpt.step() is None
        train(state)
        assert ckpt.step() is None
        while not gates:  # the thread has to open its store first
            assert not ckpt._pending.done()
        gates[0].open()
        ckpt._pending._ended.wait()
        saved = ckpt.step()
        assert (saved.step, saved.url) == (2, str(saves(tmp_path / "run")[2]))
    assert sorted(saves(tmp_path / "run")) == [2, 4]
    again = small(seed=3)
    with Checkpointer(tmp_path / "run", again) as ckpt:
        ckpt.resume(step=2)
    assert_same(weights(again), expected)


def test_an_error_finishes_the_running_background_save_and_is_not_masked(tmp_path):
    """Whether that save succeeds or fails: the exception of the loop is what comes out."""
    told = Told()
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path / "run", small(), every_steps=1, background=True) as c:
        c.resume()
        c.step()
        raise ZeroDivisionError
    assert sorted(saves(tmp_path / "run")) == [1]
    fails = Fault(1, errno=28, calls=frozenset({"put"}), key=".safetensors")
    with (
        stores(lambda store: FaultyStore(store, fails)), pytest.raises(ZeroDivisionError),
        Checkpointer(tmp_path / "run", small(), every_steps=1, background=True, listener=told) as c,
    ):  # fmt: skip
        c.resume()
        c.step()
        raise ZeroDivisionError
    assert any("step 2 failed, too" in what for what in told.warnings)


def test_checkpoints_know_their_run_and_their_parent(tmp_path):
    """Owner, number and parent in the index, a hint and the mark of a first commit beside them."""
    trained(tmp_path / "run", 2)
    trained(tmp_path / "run", 3)
    with Run(tmp_path / "run") as run:
        found = run.checkpoints()
        assert [one.order for one in found] == [(1, 0), (1, 1), (2, 2)]
        assert [one.parent for one in found] == [None, found[0].attempt, found[1].attempt]
        assert (run.info.committed, run.owner().ended) == (True, True)
        assert found[2].name in (tmp_path / "run" / "latest.json").read_text()
        assert len(run.losses()) == 3
