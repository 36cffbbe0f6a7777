"""Signals: a flag in the handler, a save between two steps, and nobody else is hurt."""

# ruff: noqa: PT012 - what ends a training is raised somewhere in its block

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardstore import verify
from shardstore.errors import InvalidArgument
from shardstore.training import Checkpointer, Preempted, saver
from shardstore.training.workers import Shield
from tests.kit.faults import Wrapper
from tests.training.kit import Told, saves, small, stores, train

ROOT = Path(__file__).parents[2]


def raised(number):
    """Send a signal to this process; its handler has run when this returns."""
    signal.raise_signal(number)


def test_sigterm_saves_after_the_step_and_leaves(tmp_path):
    """The step is finished and saved; the exit code is 143, or what was asked for; handlers are as before."""
    before = signal.getsignal(signal.SIGTERM)
    state = small()
    with pytest.raises(Preempted) as left, Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
        for _ in range(5):
            raised(signal.SIGTERM)
            train(state)
            ckpt.step()
    assert left.value.code == 143
    assert sorted(saves(tmp_path / "run")) == [1]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit) as left, Checkpointer(tmp_path / "run", state, preempted_exit=0) as ckpt:
        ckpt.resume()
        raised(signal.SIGTERM)
        ckpt.step()
    assert left.value.code == 0


def test_sigusr1_saves_at_the_next_boundary_and_goes_on(tmp_path):
    """Once for each wish, however often it was sent meanwhile."""
    with Checkpointer(tmp_path / "run", small()) as ckpt:
        ckpt.resume()
        assert ckpt.step() is None
        raised(signal.SIGUSR1)
        raised(signal.SIGUSR1)
        assert ckpt.step().step == 2
        assert ckpt.step() is None


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_G02_G03_signals_during_a_save_neither_nest_nor_break_it(tmp_path, number):
    """Signals at each write of a save: that save is whole, and the wish is granted after it."""

    class Signals(Wrapper):
        def put(self, key, body, **conditions):
            if "step-00000001" in self.url and threading.current_thread() is threading.main_thread():
                raised(number)
            super().put(key, body, **conditions)

    with stores(Signals), Checkpointer(tmp_path / "run", small(), every_steps=1) as ckpt:
        ckpt.resume()
        ckpt.step()
        assert verify(saves(tmp_path / "run")[1]).ok
        if number == signal.SIGTERM:
            with pytest.raises(Preempted):
                ckpt.step()
        else:
            assert ckpt.step().step == 2
    assert all(verify(place).ok for place in saves(tmp_path / "run").values())
    assert sorted(saves(tmp_path / "run")) == [1, 2]


def test_earlier_handlers_are_called_too(tmp_path):
    """Who had a handler before is told of the signal, and has it again afterwards."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with Checkpointer(tmp_path / "run", small()) as ckpt:
            ckpt.resume()
            raised(signal.SIGUSR1)
            assert ckpt.step() is not None
        raised(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1] * 2


def test_G01_a_worker_thread_is_told_that_it_has_no_handlers(tmp_path):
    """No crash there: training goes on without, and says so."""
    told, done = Told(), []

    def work():
        with Checkpointer(tmp_path / "run", small(), listener=told) as ckpt:
            ckpt.resume()
            done.append(ckpt.step())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (done, sorted(saves(tmp_path / "run"))) == ([None], [1])
    assert any("SIGTERM, SIGUSR1 are not handled" in what for what in told.warnings)


@pytest.mark.parametrize(
    "how",
    [{"stop_signals": ["NOPE"]}, {"save_signals": "USR2"}, {"stop_signals": ["KILL"]}, {"save_signals": ["TERM"]}],
)
def test_G10_wrong_names_are_refused_at_construction(tmp_path, how):
    """Not days later, when the signal comes."""
    with pytest.raises(InvalidArgument):
        Checkpointer(tmp_path / "run", small(), **how)


def test_G10_names_are_configurable(tmp_path):
    """Sites that use SIGUSR1 for themselves choose another one."""
    with Checkpointer(tmp_path / "run", small(), save_signals=["USR2"], stop_signals=[]) as ckpt:
        ckpt.resume()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        raised(signal.SIGUSR2)
        assert ckpt.step() is not None


def test_G05_forked_children_have_no_handlers(tmp_path):
    """SIGTERM to a child ends it as ever; the parent's flag is not touched, and the child saves nothing."""
    with Checkpointer(tmp_path / "run", small()) as ckpt:
        ckpt.resume()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert ckpt._signals.stop_at is None
        assert ckpt.step() is None


def test_grace_that_is_too_short_for_a_save_begins_none(tmp_path):
    """The measured time of the last save decides; what was saved before stays."""
    told, state = Told(), small()
    with (
        pytest.raises(Preempted),
        Checkpointer(tmp_path / "run", state, every_steps=2, grace_seconds=30, listener=told) as ckpt,
    ):
        ckpt.resume()
        for _ in range(3):
            if ckpt.completed == 2:
                ckpt._saver.seconds = 31.0
                raised(signal.SIGTERM)
            ckpt.step()
    assert sorted(saves(tmp_path / "run")) == [2]
    assert any("step 3 is not saved" in what for what in told.warnings)


def test_saves_in_the_background_say_nothing_of_the_grace(tmp_path, monkeypatch):
    """Beside a training they take many times as long as a save for which it waits: the last step is saved."""
    within = saver.in_background

    def slow(state, work, **options):
        return within(state, lambda flat: dataclasses.replace(work(flat), seconds=31.0), **options)

    monkeypatch.setattr(saver, "in_background", slow)
    with (
        pytest.raises(Preempted),
        Checkpointer(tmp_path / "run", small(), every_steps=2, background=True, grace_seconds=30) as ckpt,
    ):
        ckpt.resume()
        for _ in range(3):
            if ckpt.completed == 2:
                raised(signal.SIGTERM)
            ckpt.step()
    assert sorted(saves(tmp_path / "run")) == [2, 3]


def test_a_stop_finishes_the_background_save_and_saves_the_last_step(tmp_path):
    """Two checkpoints: the one that was being written, and that of the step in which the signal came."""
    with pytest.raises(Preempted), Checkpointer(tmp_path / "run", small(), every_steps=2, background=True) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.step()
        raised(signal.SIGTERM)
        ckpt.step()
    assert sorted(saves(tmp_path / "run")) == [2, 3]


SCRIPT = """
import os, signal, sys
from tests.training.loop import Training
from shardstore.training import Checkpointer
training = Training(workers=2)
def at_step(step):
    if step == 3:
        os.killpg(0, signal.SIGTERM)
with Checkpointer(sys.argv[1], training.state) as ckpt:
    training.run(ckpt, at_step=at_step)
"""


@pytest.mark.slow
def test_G03_sigterm_to_the_whole_process_group_with_workers(tmp_path):
    """The DataLoader's workers get it, too: the step is saved, and the exit code is 143."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], cwd=ROOT, check=False, capture_output=True, text=True,
        start_new_session=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert sorted(saves(tmp_path / "run")) == [4]


def test_the_shield_ignores_signals_and_calls_what_was_there():
    """A worker_init_fn of the user's still runs."""
    before, seen = signal.getsignal(signal.SIGUSR2), []
    try:
        Shield([signal.SIGUSR2], seen.append)(3)
        assert (signal.getsignal(signal.SIGUSR2), seen) == (signal.SIG_IGN, [3])
    finally:
        signal.signal(signal.SIGUSR2, before)
