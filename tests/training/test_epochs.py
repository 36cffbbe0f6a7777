"""Mid-epoch: what comes after a resume is what would have come without it, bit for bit."""

# ruff: noqa: PT012 - what ends a training is raised somewhere in its block

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from shardstore.errors import InvalidArgument, Mismatch
from shardstore.training import Checkpointer
from tests.kit.same import assert_same
from tests.training.kit import Told
from tests.training.loop import BATCHES, EPOCHS, Noisy, Training, whole


def interrupted(folder, stops, **how):
    """The same as `whole`, in one process after the other, as it were."""
    for stop in stops:
        training = Training(**how)
        with pytest.raises(KeyboardInterrupt), Checkpointer(folder, training.state, every_steps=1) as ckpt:
            training.run(ckpt, stop_after=stop)
    training = Training(**how)
    torch.manual_seed(1337)
    with Checkpointer(folder, training.state) as ckpt:
        training.run(ckpt)
        return training.evidence(), dict(ckpt.run.losses())


@pytest.mark.parametrize(
    "how", [{}, {"generator": True}, {"accumulate": 2}], ids=["plain", "generator", "accumulation"]
)
def test_R08_P11_resumes_in_the_middle_of_epochs_are_bit_equal(tmp_path, how):
    """Dropout, shuffling, augmentation, a scheduler: weights, moments, losses, RNG are those of one whole run."""
    stops = [3, 8, 13] if "accumulate" not in how else [1, 4, 6]
    one, two = whole(tmp_path / "a", **how), interrupted(tmp_path / "b", stops, **how)
    assert len(one[1]) == EPOCHS * BATCHES // how.get("accumulate", 1)
    assert_same(two, one)


@pytest.mark.slow
@pytest.mark.parametrize(("stops", "how"), [([3, 16], {}), ([1, 6], {"accumulate": 2, "generator": True})])
def test_R08_P11_with_worker_processes(tmp_path, stops, how):
    """Random numbers drawn in two workers are those of the run without stops, too."""
    how = {"workers": 2, **how}
    assert_same(interrupted(tmp_path / "b", stops, **how), whole(tmp_path / "a", **how))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    "how", [{}, {"generator": True}, {"accumulate": 2}, {"skip": "replay"}], ids=lambda how: next(iter(how), "plain")
)
def test_R08_a_loader_that_keeps_its_own_place(tmp_path, how):
    """That of torchdata: bit-equal after resumes in the middle of epochs, by its own state or by loading again."""
    how = {"stateful": True, **how}
    stops = [3, 8, 13] if "accumulate" not in how else [1, 4, 6]
    assert_same(interrupted(tmp_path / "b", stops, **how), whole(tmp_path / "a", **how))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("noise", [0, 0.1])
def test_R08_a_loader_that_keeps_its_own_place_with_worker_processes(tmp_path, noise):
    """The same with two workers. Where these draw random numbers, which it doesn't save, batches are loaded again."""
    how = {"stateful": True, "workers": 2, "noise": noise}
    assert_same(interrupted(tmp_path / "b", [3, 16], **how), whole(tmp_path / "a", **how))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("skip", "loaded"), [("auto", 2), ("replay", 8)])
def test_a_loader_that_keeps_its_own_place_loads_nothing_twice(tmp_path, skip, loaded):
    """Three batches of two were used: then one more is loaded alone, or the three once more before it."""
    training = Training(stateful=True, skip=skip)
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path / "run", training.state, every_steps=1) as ckpt:
        training.run(ckpt, stop_after=3)
    again = Training(stateful=True, skip=skip)
    with Checkpointer(tmp_path / "run", again.state) as ckpt:
        ckpt.resume()
        next(ckpt.batches(again.loader, skip=skip))
    assert again.data.given == loaded


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_another_kind_of_loader_after_a_resume(tmp_path):
    """What one kind of loader has saved, the other one takes up by loading again: the same batches come."""
    seen = {}
    for first, second in [(False, True), (True, False), (False, False)]:
        folder = tmp_path / f"{first}-{second}"
        training = Training(stateful=first, generator=True)
        with pytest.raises(KeyboardInterrupt), Checkpointer(folder, training.state, every_steps=1) as ckpt:
            training.run(ckpt, stop_after=3)
        again = Training(stateful=second, generator=True)
        with Checkpointer(folder, again.state) as ckpt:
            ckpt.resume()
            seen[first, second] = len(list(ckpt.batches(again.loader)))
    assert set(seen.values()) == {BATCHES - 3}


def test_skip_is_checked(tmp_path):
    """A typo is an error."""
    with Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(1, 1)}) as ckpt:
        ckpt.resume()
        with pytest.raises(InvalidArgument, match="skip must be"):
            next(ckpt.batches([1, 2], skip="fast"))


def test_P11_the_next_batch_is_the_one_that_was_not_used(tmp_path):
    """A loader of ten, saved after the fourth batch: the fifth comes next, and then a whole epoch."""
    loader = list(range(10))
    state = {"model": torch.nn.Linear(1, 1)}
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path / "run", state, every_steps=4) as ckpt:
        ckpt.resume()
        for _ in ckpt.batches(loader):
            if ckpt.step():
                raise KeyboardInterrupt
    with Checkpointer(tmp_path / "run", state) as ckpt:
        assert ckpt.resume() == 4
        assert list(ckpt.batches(loader)) == list(range(4, 10))
        assert ckpt.epoch == 1
        assert list(ckpt.batches(loader)) == list(range(10))


def test_P11_a_loader_that_became_shorter_is_an_error(tmp_path):
    """Nothing is trained on other data than was saved without a word."""
    state = {"model": torch.nn.Linear(1, 1)}
    with Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
        batches = ckpt.batches(list(range(10)))
        for _ in range(4):
            next(batches)
            ckpt.step()
    with pytest.raises(Mismatch, match="ends after 3"), Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume()
        next(iter(ckpt.batches([1, 2, 3])))


@pytest.mark.slow
def test_persistent_workers_are_warned_of_after_a_resume(tmp_path):
    """Their random numbers go on from epoch to epoch, and can't be brought back: that is said, once."""
    told = Told()
    loader = DataLoader(Noisy(), 8, num_workers=1, persistent_workers=True)
    state = {"model": torch.nn.Linear(1, 1)}
    for _ in range(2):
        with Checkpointer(tmp_path / "run", state, listener=told) as ckpt:
            ckpt.resume()
            for _ in range(2):
                for _ in ckpt.batches(loader):
                    ckpt.step()
    assert len([what for what in told.warnings if "persistent workers" in what]) == 1


def test_P09_a_save_in_the_middle_of_accumulation_is_refused(tmp_path):
    """Gradients are in no checkpoint: `save` says so, and after the step it works."""
    training = Training()
    with Checkpointer(tmp_path / "run", training.state) as ckpt:
        ckpt.resume()
        batches = ckpt.batches(training.loader)
        training.model(next(batches)).mean().backward()
        with pytest.raises(InvalidArgument, match="save after step"):
            ckpt.save()
        training.optimizer.step()
        ckpt.step()
        assert ckpt.save().step == 1


def test_iterators_and_loaders_in_the_state_are_refused(tmp_path):
    """What can't be iterated again can't be brought back; and two can't keep one place."""
    loader = Training().loader
    with Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(1, 1)}) as ckpt:
        ckpt.resume()
        with pytest.raises(InvalidArgument, match="not an iterator"):
            next(ckpt.batches(iter([1, 2])))
        ckpt._state["loader"] = loader
        with pytest.raises(InvalidArgument, match="out of the state"):
            ckpt.batches(loader)
        del ckpt._state["loader"]
