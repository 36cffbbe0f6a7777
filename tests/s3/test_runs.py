"""A run in a bucket: listing, owners, losses by segments, pins, fork, removal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardstore.errors import Fenced
from shardstore.run import Run
from tests.kit.contract import together
from tests.kit.runs import Trainer, steps
from tests.kit.s3 import Place


@pytest.fixture
def run(place: Place) -> Iterator[Run]:
    """A run that does not exist yet."""
    with Run(place.url, place.options) as made:
        yield made


def test_a_run_from_begin_to_fork(run, place):
    """Saves of two owners, losses, a pin, a pivot, a fork, a removal: all is as on disks."""
    trainer = Trainer(run)
    with run.take_owner():
        for step in range(1, 31):
            run.record_loss(step, 1 / step)
            if step % 10 == 0:
                trainer.save(step)
                run.log.flush()
    trainer.resume(10)
    with run.take_owner():
        run.log.event("resume", 10)
        run.record_loss(11, 9.0)
        trainer.save(11)
        run.log.flush()
    assert steps(run.checkpoints()) == [10, 20, 30, 11]
    assert [one.step for one in run.checkpoints() if one.line] == [10, 11]
    assert run.newest().step == 11
    assert list(run.losses()) == list(range(1, 12))
    assert len([key for key in place.names() if key.startswith("losses/")]) == 4
    run.pin(20)
    assert run.pivot().generation == 1
    with run.fork(10, f"{place.url}-fork") as new:
        assert new.verify(10).ok
        assert len(new.losses()) == 10
    (thirty,) = [one for one in run.checkpoints() if one.step == 30]
    assert run.remove(thirty) == []
    assert steps(run.checkpoints()) == [10, 20, 11]
    assert not any(thirty.attempt in key for key in place.names())


def test_racing_owners(run, place):
    """Owners that start at once get epochs of their own, by conditional PUTs; all but the highest are fenced off."""
    run.create()
    owners = together(4, lambda _: Run(place.url, place.options).take_owner())
    assert sorted(owner.epoch for owner in owners) == [1, 2, 3, 4]
    for owner in owners:
        if owner.epoch == 4:
            owner.check()
        else:
            with pytest.raises(Fenced):
                owner.check()
