"""Whole stories of a run, with real deaths: damage, a chosen older step, and what the next starts make of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

from shardstore.run import Run
from shardstore.training import Checkpointer, KeepLast
from tests.kit.damage import flip
from tests.kit.same import assert_same
from tests.training.kit import Told, saves, shard, small, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # the other threads are pytest's


def dies(work: Callable[[], None]) -> None:
    """Do something in a process of its own, which must be killed by it."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # torch's helper threads are the parent's: to wait for them takes for ever
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def training(folder, until, *, kill_at=0, every, resume=None, listener=None, keep=()):
    """Train up to a step; returns the state, the losses, and where it began."""
    state = small(seed=1)
    with Checkpointer(folder, state, every_steps=every, listener=listener, keep=keep) as ckpt:
        begin = ckpt.resume(**resume or {})
        for _ in range(begin, until):
            ckpt.step(loss=train(state))
            if ckpt.completed == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return state, dict(ckpt.run.losses()), begin


def same_end(one, two):
    """Weights, moments and losses are equal bit for bit."""
    assert_same(weights(one[0]), weights(two[0]))
    assert_same(one[0]["optimizer"].state_dict(), two[0]["optimizer"].state_dict())
    assert_same(one[1], two[1])


def test_damage_then_past_it_then_a_death_then_the_end(tmp_path):
    """Step 300 is damaged: 200 is resumed, and said; past 300 it is killed, and goes on from the new 300 to 400."""
    folder = tmp_path / "run"
    expected = training(tmp_path / "whole", 400, every=100)
    dies(lambda: training(folder, 400, kill_at=310, every=100))
    assert sorted(saves(folder)) == [100, 200, 300]
    flip(shard(saves(folder)[300]), 200)

    dies(lambda: training(folder, 400, kill_at=350, every=100))
    found = sorted((one.step, one.quarantined) for one in Run(folder).checkpoints())
    assert found == [(100, False), (200, False), (300, False), (300, True)]
    resumes = [event.step for event in Run(folder).losses().events if event.kind == "resume"]
    assert resumes == [200]
    last = training(folder, 400, every=100)
    assert last[2] == 300
    same_end(last, expected)


def test_damage_is_told_with_the_steps_that_it_costs(tmp_path):
    """The report of the resume in that story: which checkpoint, why, and a hundred steps."""
    folder, told = tmp_path / "run", Told()
    training(folder, 300, every=100)
    flip(shard(saves(folder)[300]), 200)
    assert training(folder, 300, every=100, listener=told)[2] == 200
    report = next(what for what in told.warnings if "resumed from the older step 200" in what)
    assert "100 steps are lost and done again" in report
    assert "damaged, and now in quarantine" in report
    assert "step-00000300-" in report


def test_a_chosen_step_stays_chosen_after_a_death(tmp_path):
    """`resume(step=50)` with 60 to 100 there and KeepLast(2): killed and started again, it is still on the new line."""
    folder = tmp_path / "run"
    expected = training(tmp_path / "whole", 100, every=10)
    training(folder, 100, every=10)
    how = {"every": 10, "keep": KeepLast(2)}
    dies(lambda: training(folder, 100, kill_at=73, resume={"step": 50}, **how))
    with Run(folder) as run:
        assert run.newest().step == 70
        kept = {one.step for one in run.checkpoints() if one.line}
        assert {60, 70} <= kept
    last = training(folder, 100, **how)
    assert last[2] == 70
    same_end(last, expected)
    with Run(folder) as run:
        newest = [one for one in run.checkpoints() if one.line][-2:]
        assert [one.step for one in newest] == [90, 100]
        assert run.verify(run.newest()).ok


@pytest.mark.parametrize("background", [False, True])
def test_a_death_between_two_saves_costs_the_steps_since_the_last_one(tmp_path, background):
    """Seven steps after the save of step 20, of an interval of ten: it goes on from there."""
    folder = tmp_path / "run"

    def work():
        state = small()
        with Checkpointer(folder, state, every_steps=10, background=background) as ckpt:
            ckpt.resume()
            for step in range(27):
                ckpt.step(loss=train(state))
                if step == 20 and background:
                    ckpt._pending.result()
        os._exit(1)

    def killed():
        step = Checkpointer.step

        def counted(self, *arguments, **values):
            saved = step(self, *arguments, **values)
            if self.completed == 27:
                os.kill(os.getpid(), signal.SIGKILL)
            return saved

        Checkpointer.step = counted
        work()

    dies(killed)
    assert training(folder, 27, every=10)[2] == 20
