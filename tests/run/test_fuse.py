"""A run on a network file system, seen from two machines: two FUSE mounts of one store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardstore.errors import Fenced
from shardstore.run import Run
from tests.kit.contract import together
from tests.kit.fuse import two_mounts
from tests.kit.runs import Trainer, steps

pytestmark = [pytest.mark.mounts, pytest.mark.slow]


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two mount points of one store."""
    with two_mounts(tmp_path_factory.mktemp("fuse")) as points:
        yield points


def test_two_machines_see_one_run(mounts):
    """What one saves, records and removes, the other one sees; an older owner on the other machine is fenced off."""
    with Run(mounts[0] / "seen") as here, Run(mounts[1] / "seen") as there:
        trainer = Trainer(here)
        old = here.take_owner()
        for step in (10, 20, 30):
            trainer.save(step)
            here.record_loss(step, 1 / step)
        here.log.flush()
        assert steps(there.checkpoints()) == [10, 20, 30]
        assert there.newest().step == 30
        assert dict(there.losses()) == {10: 0.1, 20: 0.05, 30: 1 / 30}
        (ten,) = [one for one in there.checkpoints() if one.step == 10]
        assert there.remove(ten) == []
        assert steps(here.checkpoints()) == [20, 30]
        assert not (mounts[0] / "seen" / ten.name).exists()
        there.take_owner()
        with pytest.raises(Fenced):
            old.check()


def test_L11_racing_owners_on_two_mounts(mounts):
    """Owners that start at once on two machines get epochs of their own."""
    places = [mounts[number % 2] / "race" for number in range(4)]
    with Run(places[0]) as run:
        run.create()
    owners = together(4, lambda number: Run(places[number]).take_owner())
    assert sorted(owner.epoch for owner in owners) == [1, 2, 3, 4]
