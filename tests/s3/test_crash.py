"""Processes that die, or sleep, at every request of a save over S3."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import shardstore
from shardstore.check import plan_leftovers, remove
from shardstore.errors import CheckpointExists
from shardstore.events import to_log
from shardstore.index import HF_NAME, NAME
from shardstore.storage.s3 import S3Store
from tests.crash.states import BIG, state
from tests.kit.mishaps import killing
from tests.kit.proxy import FaultProxy
from tests.kit.s3 import Place
from tests.s3.jobs import S3Zygote
from tests.s3.places import named, settled

pytestmark = [pytest.mark.torture, pytest.mark.usefixtures("no_waits")]

BEFORE, AFTER, NEXT = 3, 4, 5
MOST = 200
OVERWRITES = [pytest.param(False, id="save"), pytest.param(True, id="overwrite")]


@pytest.fixture(scope="module")
def zygote() -> Iterator[S3Zygote]:
    """Forks child processes that have all imported."""
    with S3Zygote() as made:
        yield made


def prune(place: Place) -> None:
    """Remove what may be removed after a day."""
    for leftover in plan_leftovers(place.store, old=-9, grace=-9):
        if leftover.removable:
            assert remove(leftover, place.store, old=-9, grace=-9) == []


def recovers(place: Place, seen: int | None) -> None:
    """The next save works, and when a day has gone by nothing useless is left."""
    if seen is not None:
        with pytest.raises(CheckpointExists):
            shardstore.save(state(NEXT), place.url, storage_options=place.options)
    shardstore.save(state(NEXT), place.url, step=NEXT, overwrite=seen is not None, storage_options=place.options)
    assert settled(place, NEXT) == NEXT
    prune(place)
    assert settled(place, NEXT) == NEXT
    assert place.names() - {HF_NAME} == named(place)


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("when", ["before", "midway", "after"])
def test_a_process_killed_at_every_request(
    place: Place, proxy: FaultProxy, zygote: S3Zygote, when: str, overwrite: bool
):
    """SIGKILL before the server hears of the nth request, when it has half of it, and before its answer comes."""
    done = False
    for nth in range(1, MOST):
        url = f"{place.url}-{nth}"
        at = Place(url, S3Store(url, place.options, to_log), place.options)
        if overwrite:
            shardstore.save(state(BEFORE), url, step=BEFORE, storage_options=place.options)
        before, old = BEFORE if overwrite else None, named(at)
        proxy.clear()
        rule = proxy.on("put_object" if when == "midway" else ".*", killing(when), nth=nth)
        outcome = zygote.run("save", url=url, endpoint=proxy.url, number=AFTER, overwrite=overwrite)
        seen = settled(at, before, AFTER)
        assert old <= at.names(), f"request {nth}"
        assert seen == AFTER or not done, f"request {nth} takes back the commit"
        done = done or seen == AFTER
        recovers(at, seen)
        if not rule.hits:
            assert outcome.value == {"error": None}
            assert seen == AFTER
            assert nth > (4 if when == "midway" else 10)
            return
        assert outcome.signal == signal.SIGKILL
    pytest.fail("no run ended by itself")


@pytest.mark.parametrize("when", ["before", "midway", "after"])
@pytest.mark.parametrize("op", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_a_process_killed_while_it_sends_parts(place: Place, proxy: FaultProxy, zygote: S3Zygote, op: str, when: str):
    """SIGKILL at each kind of request of an upload in parts: no checkpoint, and the next save works."""
    proxy.on(op, killing(when))
    outcome = zygote.run("save", url=place.url, endpoint=proxy.url, number=BIG)
    assert outcome.signal == signal.SIGKILL
    assert settled(place, None) is None
    assert len(place.uploads()) == (0 if (op, when) in _NOTHING_LEFT else 1)
    shardstore.save(state(NEXT), place.url, step=NEXT, storage_options=place.options)
    assert settled(place, NEXT) == NEXT


_NOTHING_LEFT = {
    ("create_multipart_upload", "before"), ("create_multipart_upload", "midway"),  # it has no body
    ("complete_multipart_upload", "after"),
}  # fmt: skip


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_a_save_that_sleeps_at_its_commit(place: Place, proxy: FaultProxy, zygote: S3Zygote, overwrite: bool):
    """Stopped with SIGSTOP when all is written but the index: nothing of it is removed, and it commits when woken."""
    if overwrite:
        shardstore.save(state(BEFORE), place.url, step=BEFORE, storage_options=place.options)
    rule = proxy.on("put_object", killing("before", signal.SIGSTOP), key=f"/{NAME}$")
    child = zygote.start("save", url=place.url, endpoint=proxy.url, number=AFTER, overwrite=overwrite)
    assert child.wait().stopped
    files = place.names()
    assert len(files) > 3
    for leftover in plan_leftovers(place.store):
        assert not leftover.removable
        assert remove(leftover, place.store) != []
    assert place.names() == files
    settled(place, BEFORE if overwrite else None)
    child.wake()
    assert child.wait().value == {"error": None}
    assert rule.hits == 1
    assert settled(place, AFTER) == AFTER
