"""Trainings that are killed: the next start goes on by itself, and the end is that of one that nothing stopped."""

from __future__ import annotations

import random
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.jobs import INTERVAL, Progress, TrainingZygote
from tests.torture.killing import Torture, torturing
from tests.torture.places import PLACES

pytestmark = [pytest.mark.torture, pytest.mark.slow]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainingZygote, dict[str, str]]]:
    """What forks trainings, and the digests of one that nothing stopped."""
    with torturing(tmp_path_factory.mktemp("whole")) as made:
        assert set(made[1]) == {"model", "optimizer", "lr", "rng", "losses"}
        yield made


@pytest.mark.parametrize(
    ("store", "kills"),
    [
        ("disk", 34),
        pytest.param("fuse", 8, marks=pytest.mark.mounts),
        pytest.param("s3", 8, marks=pytest.mark.s3),
    ],
)
def test_SIGKILL_at_random_moments(tmp_path: Path, whole, store: str, kills: int):
    """Fifty in all: no more than an interval is ever lost; weights, moments, losses and random numbers are equal."""
    zygote, expected = whole
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with PLACES[store](tmp_path / store) as place:
        count = Torture(zygote, place, random.Random(f"{seed}-{store}"), tmp_path).run(kills, expected)
    print(count)
    assert count.kills == kills
    assert count.good, [*count.losses, *count.differences]


@pytest.mark.parametrize(
    ("background", "warn", "wanted"), [(False, 0, 10), (True, 0, 6), (False, 12, 3)], ids=["fore", "back", "warned"]
)
def test_G07_killed_before_any_call_that_changes_a_file(tmp_path: Path, whole, background, warn, wanted):
    """The same at the worst moments. `warned`: SIGTERM comes first, and SIGKILL in the middle of the save after it."""
    zygote, expected = whole
    chance = random.Random(f"{background}-{warn}")
    kills = runs = 0
    while kills < wanted:
        path, url = str(tmp_path / f"progress-{runs}"), str(tmp_path / f"run-{runs}")
        progress, runs = Progress(path, new=True), runs + 1
        while True:
            before, progress.resumed = progress.completed, -1
            outcome = zygote.run(
                "train", url=url, progress=path, background=background, warn=warn,
                kill_at=chance.randrange(1, 200) if kills < wanted else 0,
            )  # fmt: skip
            if progress.resumed >= 0:
                assert before - progress.resumed <= INTERVAL * (2 if background else 1)
            if outcome.value and "digests" in outcome.value:
                assert outcome.value["digests"] == expected
                break
            assert outcome.signal in (signal.SIGKILL, signal.SIGTERM) or outcome.value["preempted"]
            kills += outcome.signal == signal.SIGKILL
