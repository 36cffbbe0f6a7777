"""Many overwrite, many read, all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import shardstore
from shardstore.check import plan_leftovers, remove
from shardstore.errors import CheckpointExists, Damaged, ShardstoreError
from tests.crash.states import number_of, state
from tests.kit.mishaps import slow_down
from tests.kit.proxy import FOREVER, FaultProxy
from tests.kit.s3 import Place, options_for
from tests.s3.places import named, settled

pytestmark = pytest.mark.usefixtures("no_waits")
TURNS = 6


@pytest.fixture(params=["grace", "no grace"])
def grace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the files of a replaced checkpoint stay for a while, as they do, or go at once."""
    if request.param == "no grace":
        for function in (plan_leftovers, remove):
            monkeypatch.setitem(function.__kwdefaults__, "grace", -9.0)
    return request.param == "grace"


@pytest.mark.parametrize("trouble", [False, True], ids=["calm", "trouble"])
def test_two_overwriters_and_four_readers(place: Place, proxy: FaultProxy, grace: bool, trouble: bool):
    """Each load is one whole version or an error of ours that says why; in the end the last one is there, whole."""
    options = options_for(proxy.url, attempts=8)
    shardstore.save(state(0), place.url, step=0, storage_options=options)
    if trouble:
        proxy.on(".*", slow_down, times=FOREVER, when=lambda request: request.began % 7 == 0)
    done = threading.Event()
    loaded: list[int] = []
    errors: list[ShardstoreError] = []

    def overwrite(writer: int) -> int:
        last = 0
        for turn in range(TURNS):
            number = 100 * (writer + 1) + turn
            try:
                shardstore.save(state(number), place.url, step=number, overwrite=True, storage_options=options)
                last = number
            except CheckpointExists:
                pass
        return last

    def read(_: int) -> None:
        while not done.is_set():
            try:
                loaded.append(number_of(shardstore.load(place.url, storage_options=options)))
            except ShardstoreError as error:
                errors.append(error)

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, number) for number in range(4)]
        writers = [pool.submit(overwrite, number) for number in range(2)]
        try:
            last = {writer.result() for writer in writers}
        finally:
            done.set()
        _finish(*(reader.result for reader in readers))
    proxy.clear()
    seen = settled(place, *last)
    assert seen
    assert len(loaded) > 8
    assert len(set(loaded)) > 2
    assert not [error for error in errors if isinstance(error, Damaged) or not str(error)]
    assert not (grace and not trouble and errors)
    assert named(place) <= place.names()


def _finish(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()
