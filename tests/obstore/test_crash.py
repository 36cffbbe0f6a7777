"""Processes that die at every request of a save through obstore."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import shardstore
from shardstore.events import to_log
from shardstore.index import HF_NAME
from shardstore.storage.s3 import S3Store
from tests.crash.states import BIG, state
from tests.kit.mishaps import killing
from tests.kit.proxy import FaultProxy
from tests.kit.s3 import Place
from tests.s3.jobs import S3Zygote
from tests.s3.places import named, settled
from tests.s3.test_crash import prune

pytestmark = [pytest.mark.s3, pytest.mark.torture, pytest.mark.usefixtures("no_waits")]

BEFORE, AFTER, NEXT = 3, 4, 5
MOST = 200


@pytest.fixture(scope="module")
def zygote() -> Iterator[S3Zygote]:
    """Forks child processes that have all imported."""
    with S3Zygote("tests.obstore.jobs") as made:
        yield made


@pytest.mark.parametrize("when", ["before", "midway", "after"])
def test_an_overwrite_killed_at_every_request(place: Place, proxy: FaultProxy, zygote: S3Zygote, when: str):
    """SIGKILL before the server hears of it, when it has half of it, before it answers: old or new, whole."""
    done = False
    for nth in range(1, MOST):
        url = f"{place.url}-{nth}"
        at = Place(url, S3Store(url, place.options, to_log), place.options)
        shardstore.save(state(BEFORE), url, step=BEFORE, storage_options=place.options)
        old = named(at)
        proxy.clear()
        rule = proxy.on("put_object" if when == "midway" else ".*", killing(when), nth=nth)
        outcome = zygote.run("save", url=url, endpoint=proxy.url, number=AFTER, overwrite=True)
        seen = settled(at, BEFORE, AFTER)
        assert old <= at.names(), f"request {nth}"
        assert seen == AFTER or not done, f"request {nth} takes back the commit"
        done = done or seen == AFTER
        shardstore.save(
            state(NEXT), url, step=NEXT, overwrite=True, storage_options={**at.options, "engine": "obstore"}
        )
        assert settled(at, NEXT) == NEXT
        prune(at)
        assert at.names() - {HF_NAME} == named(at)
        if not rule.hits:
            assert outcome.value == {"error": None}
            assert seen == AFTER
            assert nth > (4 if when == "midway" else 8)
            return
        assert outcome.signal == signal.SIGKILL
    pytest.fail("no run ended by itself")


@pytest.mark.parametrize("op", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_a_process_killed_while_it_sends_parts(place: Place, proxy: FaultProxy, zygote: S3Zygote, op: str):
    """SIGKILL when the server has got each kind of request of an upload: no checkpoint; the next save works."""
    proxy.on(op, killing("after"))
    outcome = zygote.run("save", url=place.url, endpoint=proxy.url, number=BIG)
    assert outcome.signal == signal.SIGKILL
    assert settled(place, None) is None
    assert len(place.uploads()) == (op != "complete_multipart_upload")
    shardstore.save(state(NEXT), place.url, step=NEXT, storage_options={**place.options, "engine": "obstore"})
    assert settled(place, NEXT) == NEXT
