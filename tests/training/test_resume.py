"""Resume: exactly what was saved, never silently older, never from zero unasked."""

# ruff: noqa: PT012 - what ends a training is raised somewhere in its block

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from shardstore.errors import (
    CheckpointNotFound,
    Damaged,
    Fenced,
    InvalidArgument,
    Mismatch,
    NothingToResume,
    StoreError,
    UnsupportedState,
    UnsupportedVersion,
)
from shardstore.run import Run
from shardstore.training import Checkpointer, KeepLast
from tests.kit.damage import edit_text, flip
from tests.kit.faults import READING, Fault, FaultyStore, Wrapper
from tests.kit.inject import injected
from tests.kit.same import assert_same
from tests.training.kit import Told, saves, shard, small, stores, train, trained, weights


def drawn():
    """The next numbers of the global generators."""
    return [random.gauss(0, 1), float(np.random.rand()), torch.rand(2)]  # noqa: NPY002


def test_R01_R09_global_generators_go_on_where_they_were(tmp_path):
    """Python's half-used gauss pair, NumPy and torch: the same draws, though the script seeds before the resume."""
    random.seed(1)
    random.gauss(0, 1)
    state = small()
    with Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
        expected = [drawn() for _ in range(5)]
    random.seed(1337)
    np.random.seed(1337)  # noqa: NPY002
    torch.manual_seed(1337)
    with Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
        assert_same([drawn() for _ in range(5)], expected)


def generators():
    """One of each kind."""
    return {
        "pcg": np.random.default_rng(42), "philox": np.random.Generator(np.random.Philox(1)),
        "sfc": np.random.Generator(np.random.SFC64(2)), "mt": np.random.Generator(np.random.MT19937(4)),
        "legacy": np.random.RandomState(3), "torch": torch.Generator().manual_seed(5), "python": random.Random(6),
    }  # fmt: skip


def draws(all_of_them):
    """The next numbers of each."""
    numpy = [all_of_them[name].normal(size=3) for name in ("pcg", "philox", "sfc", "mt", "legacy")]
    return [*numpy, torch.rand(3, generator=all_of_them["torch"]), all_of_them["python"].gauss(0, 1)]


def test_R02_R03_registered_generators_go_on_where_they_were(tmp_path):
    """128-bit states, counters and legacy ones: all give the draws that come next, also with a default device set."""
    mine, again = generators(), generators()
    draws(mine)
    with Checkpointer(tmp_path / "run", small(), generators=mine) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    expected = draws(mine)
    with torch.device("meta"), Checkpointer(tmp_path / "run", small_on_cpu(), generators=again) as ckpt:
        ckpt.resume()
    assert_same(draws(again), expected)


def small_on_cpu():
    """A state on the CPU, whatever the default device is."""
    with torch.device("cpu"):
        return small()


def test_R03_an_unknown_generator_is_refused_by_name(tmp_path):
    """What can't be saved exactly is an error at construction, before anything is made."""

    class Own(np.random.PCG64):
        pass

    with pytest.raises(UnsupportedState, match="'mine' has the bit generator Own"):
        Checkpointer(tmp_path / "run", small(), generators={"mine": np.random.Generator(Own(1))})
    with pytest.raises(InvalidArgument, match="no generator"):
        Checkpointer(tmp_path / "run", small(), generators={"mine": 3})
    assert not (tmp_path / "run").exists()


def test_R03_another_kind_of_generator_is_an_error(tmp_path):
    """A PCG64 is not filled with the state of an MT19937."""
    trained(tmp_path / "run", 1, generators={"g": np.random.default_rng(1)})
    with pytest.raises(Mismatch, match="of the kind"):
        trained(tmp_path / "run", 2, generators={"g": random.Random(1)})


def test_P06_the_learning_rate_is_that_of_a_run_without_stops(tmp_path):
    """The scheduler steps before ckpt.step(): the trace over twenty steps does not lag after a resume."""

    def trace(folder, *stops):
        seen = []
        for stop in stops:
            state = small()
            state["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 20)
            with Checkpointer(folder, state) as ckpt:
                for _ in range(ckpt.resume(), stop):
                    seen.append(state["optimizer"].param_groups[0]["lr"])
                    train(state)
                    state["scheduler"].step()
                    ckpt.step()
        return seen

    assert trace(tmp_path / "b", 7, 20) == trace(tmp_path / "a", 20)


def test_P13_a_wrong_path_is_an_error_and_a_new_run_starts_at_zero(tmp_path):
    """What is asked for and not there is never taken for a wish to start over."""
    with Checkpointer(tmp_path / "run", small()) as ckpt:
        with pytest.raises(CheckpointNotFound, match="check from_run"):
            ckpt.resume(from_run=tmp_path / "typo")
        with pytest.raises(CheckpointNotFound, match="no checkpoint of step 5"):
            ckpt.resume(step=5)
        with pytest.raises(InvalidArgument, match="sections"):
            ckpt.resume(reset=["typo"])
        with pytest.raises(InvalidArgument, match=r"call resume\(\) first"):
            ckpt.step()
        assert ckpt.resume() == 0
        with pytest.raises(InvalidArgument, match="once"):
            ckpt.resume()


def test_damage_is_passed_over_with_a_report_and_never_met_again(tmp_path):
    """The newest is damaged: step 2 is loaded, steps lost are told, and later resumes stay on the new line."""
    folder, told = tmp_path / "run", Told()
    trained(folder, 2)
    expected = trained(tmp_path / "whole", 5)
    trained(folder, 3)
    flip(shard(saves(folder)[3]), -1 + shard(saves(folder)[3]).stat().st_size)
    state = small()
    with pytest.raises(KeyboardInterrupt), Checkpointer(folder, state, every_steps=2, listener=told) as ckpt:
        assert ckpt.resume() == 2
        for _ in range(2, 5):
            ckpt.step(loss=train(state))
        raise KeyboardInterrupt
    assert any("3" in what and "1 steps are lost" in what for what in told.warnings)
    state = small()
    with Checkpointer(folder, state) as ckpt:
        assert ckpt.resume() == 4
        ckpt.step(loss=train(state))
        assert list(ckpt.run.losses()) == [1, 2, 3, 4, 5]
    assert_same(weights(state), weights(expected))
    assert [one.step for one in Run(folder).checkpoints() if one.quarantined] == [3]


def test_fallback_false_wants_the_newest_or_an_error(tmp_path):
    """No mark is set then, and the error comes again; nor is one in quarantine passed over."""
    folder = tmp_path / "run"
    trained(folder, 2)
    flip(shard(saves(folder)[2]), 3)
    for _ in range(2):
        with pytest.raises(Damaged):
            trained(folder, 3, resume={"fallback": False})
    assert trained(folder, 1)
    with pytest.raises(Damaged, match="quarantine"):
        trained(folder, 3, resume={"fallback": False})


def test_a_missing_file_is_no_damage(tmp_path):
    """A shard that arrives late: passed over with a report, no mark, and a later resume takes the newest."""
    folder, told = tmp_path / "run", Told()
    trained(folder, 2)
    late = shard(saves(folder)[2])
    late.rename(tmp_path / "late")
    with Checkpointer(folder, small(), listener=told) as ckpt:
        assert ckpt.resume() == 1
    assert any("unfinished" in what for what in told.warnings)
    (tmp_path / "late").rename(late)
    with Checkpointer(folder, small()) as ckpt:
        assert ckpt.resume() == 2


def test_damage_that_a_second_read_does_not_confirm_is_no_damage(tmp_path):
    """A bit that flipped on the way to memory: the newest is loaded after all, and no mark is set."""
    flipped = []

    class Flips(Wrapper):
        def read_into(self, key, offset, buffers):
            super().read_into(key, offset, buffers)
            if key.endswith(".safetensors") and not flipped:
                flipped.append(key)
                buffers[0][buffers[0].nbytes - 1] ^= 1

    expected = trained(tmp_path / "run", 2)
    state = small(seed=9)
    with Checkpointer(tmp_path / "run", state) as ckpt, injected(Flips):
        assert ckpt.resume() == 2
    assert flipped
    assert_same(weights(state), weights(expected))
    assert not any(one.quarantined for one in Run(tmp_path / "run").checkpoints())


def test_other_errors_end_the_resume_and_leave_no_mark(tmp_path):
    """A store that fails, another shape, another schema: the error is raised, and the newest stays what it is."""
    folder = tmp_path / "run"
    trained(folder, 2)
    with Checkpointer(folder, {"model": torch.nn.Linear(3, 5)}) as ckpt, pytest.raises(Mismatch):
        ckpt.resume()
    with Checkpointer(folder, small(), schema="other") as ckpt, pytest.raises(Mismatch, match="schema"):
        ckpt.resume()
    fails = Fault(1, errno=13, calls=READING, key=".safetensors", times=100)
    with Checkpointer(folder, small()) as ckpt, stores_of_loads(fails), pytest.raises(StoreError):
        ckpt.resume()
    with Checkpointer(folder, small()) as ckpt:
        assert ckpt.resume() == 2
    assert not any(one.quarantined for one in Run(folder).checkpoints())


def test_a_hiccup_or_a_newer_version_leaves_no_mark(tmp_path):
    """One I/O error is nothing but a retry; a checkpoint of a newer version ends the resume, and is not passed over."""
    folder = tmp_path / "run"
    trained(folder, 2)
    hiccup = Fault(1, errno=5, calls=READING, key=".safetensors")
    with Checkpointer(folder, small()) as ckpt, stores_of_loads(hiccup):
        assert ckpt.resume() == 2
    index = saves(folder)[2] / "shardstore.json"
    data = index.read_bytes()
    edit_text(index.parent, '"shardstore/1"', '"shardstore/9"')
    with pytest.raises(UnsupportedVersion):
        trained(folder, 3)
    index.write_bytes(data)
    with Checkpointer(folder, small()) as ckpt:
        assert ckpt.resume() == 2
    assert not any(one.quarantined for one in Run(folder).checkpoints())


def stores_of_loads(fault):
    """Loads, and they alone, meet a fault."""
    return injected(lambda store: FaultyStore(store, fault))


def test_a_run_that_has_had_checkpoints_does_not_start_from_zero(tmp_path):
    """All damaged, or all removed: an error that says so, at each start."""
    folder = tmp_path / "run"
    trained(folder, 2)
    for place in saves(folder).values():
        flip(shard(place), 5)
    for _ in range(2):
        with pytest.raises(NothingToResume, match="quarantine"):
            trained(folder, 3)
    for place in saves(folder).values():
        (place / "shardstore.json").unlink()
    with pytest.raises(NothingToResume, match="gone"):
        trained(folder, 3)


def test_a_chosen_older_step_begins_a_new_line(tmp_path):
    """`resume(step=2)` with 3 to 5 there and KeepLast(2): after the next start it stays on the new line."""
    folder = tmp_path / "run"
    trained(folder, 5, keep=KeepLast(9))
    trained(folder, 4, resume={"step": 2}, keep=[KeepLast(2)])
    with Checkpointer(folder, small()) as ckpt:
        assert ckpt.resume() == 4
        assert ckpt.run.newest().step == 4


def test_another_run_to_begin_with(tmp_path):
    """The first start takes the other run's newest, later ones this run's own; the other one is left as it is."""
    trained(tmp_path / "old", 3)
    state = small(seed=9)
    with Checkpointer(tmp_path / "new", state) as ckpt:
        assert ckpt.resume(from_run=tmp_path / "old") == 3
        ckpt.step(loss=train(state))
        facts = ckpt.run.losses().events[0].facts
        assert facts["run"] == Run(tmp_path / "old").id
    with Checkpointer(tmp_path / "new", small()) as ckpt:
        assert ckpt.resume(from_run=tmp_path / "old") == 4
    assert_same(weights(trained(tmp_path / "old", 4)), weights(state))


def test_a_fork_goes_on_from_its_copy(tmp_path):
    """A forked run resumes from the checkpoint it was made with, without complaints."""
    trained(tmp_path / "old", 3)
    with Run(tmp_path / "old") as old:
        old.fork(2, tmp_path / "new").close()
    told = Told()
    with Checkpointer(tmp_path / "new", small(), listener=told) as ckpt:
        assert ckpt.resume() == 2
        ckpt.step(loss=1.0)
        assert list(ckpt.run.losses()) == [1, 2, 3]
    assert told.warnings == []


def test_what_differs_in_the_config_is_told_and_one_section_may_stay(tmp_path):
    """A changed learning rate and a source that is gone are named; `reset` leaves a section as it was built."""
    state = {**small(), "sampler": {"at": 5}}
    trained(tmp_path / "run", 1, state=state, config={"lr": 0.1, "data": ["a", "b"]})
    told, state = Told(), {**small(), "sampler": {"at": 0}}
    with Checkpointer(tmp_path / "run", state, config={"lr": 0.2, "data": ["a"]}, listener=told) as ckpt:
        assert ckpt.resume(reset=["sampler"]) == 1
    assert state["sampler"] == {"at": 0}
    assert [what.partition("was saved, ")[2] for what in told.warnings] == [
        "config.lr was 0.1, and is 0.2 now", "config.data was ['a', 'b'], and is ['a'] now",
    ]  # fmt: skip
    with Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
    assert state["sampler"] == {"at": 5}


def test_the_older_of_two_is_fenced_off(tmp_path):
    """Two Checkpointers on one run: the older one's next save is an error, and leaves nothing behind."""
    old_state = small()
    with pytest.raises(Fenced), Checkpointer(tmp_path / "run", old_state, every_steps=1) as old:
        old.resume()
        old.step()
        trained(tmp_path / "run", 3)
        old.step()
    assert sorted(saves(tmp_path / "run")) == [1, 2, 3]
    assert len({path.parent for path in (tmp_path / "run").glob("step-00000002-*/*.*")}) == 1


def test_nan_losses_are_recorded_as_such(tmp_path):
    """The history shows where it went wrong."""
    with Checkpointer(tmp_path / "run", small()) as ckpt:
        ckpt.resume()
        ckpt.step(loss=math.nan, lr=0.5)
        ckpt.step(loss=torch.tensor(1.5, requires_grad=True))
    with Run(tmp_path / "run") as run:
        history = run.losses()
        assert math.isnan(history[1])
        assert (history[2], run.losses("lr")[1]) == (1.5, 0.5)


@pytest.mark.parametrize("state", [{"shardstore": 1}, {"w": torch.ones(2)}, torch.nn.Linear(1, 1), {"f": open}])
def test_states_that_can_not_be_saved_are_refused_at_construction(tmp_path, state):
    """Not at the first save, hours later; and no run is made."""
    with pytest.raises((InvalidArgument, UnsupportedState)):
        Checkpointer(tmp_path / "run", state)
    assert not (tmp_path / "run").exists()


def test_a_run_that_can_not_be_written_is_an_error_at_construction(tmp_path):
    """The store is probed by a write before a step is trained."""
    with (
        stores(lambda store: FaultyStore(store, Fault(1, errno=30, calls=frozenset({"put"}), times=99))),
        pytest.raises(StoreError),
    ):
        Checkpointer(tmp_path / "run", small())
