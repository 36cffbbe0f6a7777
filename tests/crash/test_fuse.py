"""A network file system that is real: two FUSE mounts of one SeaweedFS, as two machines would have them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import shardstore
from shardstore.errors import InvalidArgument, ShardstoreError
from shardstore.index import NAME
from shardstore.storage import LocalStore
from tests.crash.places import age, look, patient, settled
from tests.crash.states import BIG, number_of, state
from tests.crash.zygote import Zygote
from tests.kit.inject import injected
from tests.kit.weed import wait_until

pytestmark = [pytest.mark.mounts, pytest.mark.torture]

ROUNDS = 12


def seen_everywhere(places: list[Path], number: int) -> None:
    """Both mounts come to show this state, and it is whole there; they may learn of it a moment later."""
    for place in places:
        wait_until(lambda place=place: look(place) == number, f"state {number} at {place}")
        assert settled(place, number) == number


@pytest.mark.parametrize("number", [3, 5, BIG])
def test_save_load_and_verify(weed_mounts: tuple[Path, Path], number: int):
    """What is saved through one mount is loaded and verified through both, and so is what replaces it."""
    places = [mount / f"plain-{number}" for mount in weed_mounts]
    shardstore.save(state(number), places[0], step=number)
    seen_everywhere(places, number)
    with pytest.raises(FileExistsError):
        shardstore.save(state(number + 1), places[1])
    shardstore.save(state(number + 2), places[1], step=number + 2, overwrite=True)
    seen_everywhere(places, number + 2)


def test_maps_are_refused(weed_mounts: tuple[Path, Path]):
    """mode="map" says why it is refused, and what to do; so does the store, which promises no durability."""
    place = weed_mounts[0] / "mapped"
    shardstore.save(state(3), place)
    with pytest.raises(InvalidArgument, match=r"fuse\.seaweedfs.*SIGBUS.*mode='copy'"):
        shardstore.load(place, mode="map")
    can = LocalStore(place).capabilities
    assert (can.exclusive, can.durable, can.mappable) == (True, False, False)
    assert number_of(shardstore.load(place)) == 3


@pytest.mark.parametrize("turn", range(ROUNDS))
@pytest.mark.parametrize("overwrite", [False, True], ids=["save", "overwrite"])
def test_L11_two_savers_through_two_mounts(weed_mounts: tuple[Path, Path], zygote: Zygote, turn: int, overwrite: bool):
    """Processes that stand at their commits, on two mounts, are let go at once: one at most succeeds, and it loads."""
    places = [mount / f"race-{turn}-{overwrite}" for mount in weed_mounts]
    if overwrite:
        shardstore.save(state(9), places[0], step=9)
        seen_everywhere(places, 9)
    options = {"overwrite": overwrite, "signal": signal.SIGSTOP, "nth": 2, "at": NAME}
    savers = [zygote.start("save", place=place, number=n, **options) for n, place in enumerate(places)]
    assert all(saver.wait().stopped for saver in savers)
    for saver in savers:
        saver.wake()
    answers = [saver.wait().value for saver in savers]
    winners = [n for n, answer in enumerate(answers) if answer["error"] is None]
    assert len(winners) <= 1, answers
    assert all("FileExistsError" in answer["kinds"] or not winners for answer in answers if answer["error"]), answers
    if winners:
        seen_everywhere(places, winners[0])
    else:  # neither could find out: whatever is there is whole
        wait_until(lambda: look(places[0]) == look(places[1]), "one view of both mounts")
        settled(places[0], 0, 1, 9 if overwrite else None)


def test_a_creator_that_was_asleep_on_another_mount(weed_mounts: tuple[Path, Path], zygote: Zygote):
    """Stopped at every system call of its commit; another saves through the other mount: one wins, and it loads."""
    whole = zygote.run("save", place=weed_mounts[0] / "whole", number=3, level="commit").value
    assert whole["error"] is None
    assert whole["steps"] >= 5
    for nth in range(1, whole["steps"] + 1):
        places = [mount / f"asleep-{nth}" for mount in weed_mounts]
        sleeper = zygote.start("save", place=places[0], number=3, signal=signal.SIGSTOP, nth=nth, level="commit")
        assert sleeper.wait().stopped
        committed = look(places[0]) is not None
        if committed:
            seen_everywhere(places, 3)
        age(places[0], 11)
        other = _save_meanwhile(places[1], 4)
        sleeper.wake()
        answer = sleeper.wait().value
        assert (answer["error"] is None) + (other is None) <= 1, f"step {nth}"
        assert committed <= (answer["error"] is None), f"step {nth}: {answer}"
        assert committed or other is None, f"step {nth}: {other}"
        seen_everywhere(places, 3 if committed else 4)


def _save_meanwhile(place: Path, number: int) -> ShardstoreError | None:
    with injected(patient):
        try:
            shardstore.save(state(number), place, step=number)
        except ShardstoreError as error:
            return error
    return None
