"""Which way the bytes of requests take, and what that costs."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiobotocore.httpsession import AIOHTTPSession

import shardstore
from shardstore.events import to_log
from shardstore.storage import Bytes, s3_client
from shardstore.storage.s3 import S3Store
from tests.crash.states import BIG, number_of, state
from tests.kit.mishaps import Hold
from tests.kit.proxy import FaultProxy
from tests.kit.s3 import MIB, Place, hasty, options_for
from tests.kit.weed import Weed

pytestmark = pytest.mark.usefixtures("no_waits")
BODIES = "put_object|upload_part|get_object"


@pytest.fixture
def by_the_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods and paths of requests that the event loop of s3fs has sent."""
    sent: list[str] = []
    send = AIOHTTPSession.send

    async def noted(self: Any, request: Any) -> Any:
        sent.append(f"{request.method} {request.url.partition('?')[0]}")
        return await send(self, request)

    monkeypatch.setattr(AIOHTTPSession, "send", noted)
    return sent


def test_bodies_go_past_the_event_loop(place: Place, proxy: FaultProxy, by_the_loop: list[str]):
    """Every PUT, the commit too, and every read of a range; none waits for an invitation to send its body."""
    options = hasty(proxy.url)
    shardstore.save(state(BIG), place.url, storage_options=options)
    assert not [request for request in by_the_loop if request.startswith("PUT")]
    by_the_loop.clear()
    assert number_of(shardstore.load(place.url, storage_options=options)) == BIG
    assert not [request for request in by_the_loop if "safetensors" in request and request.startswith("GET")]
    assert proxy.requests("upload_part")
    assert not [request for request in proxy.log if request.header("expect")]


def test_a_session_that_people_bring(place: Place, proxy: FaultProxy, by_the_loop: list[str]):
    """It gets every request."""
    config = {"http_session_cls": AIOHTTPSession}
    options = options_for(proxy.url, part_bytes=5 * MIB, config_kwargs=config)
    shardstore.save(state(BIG), place.url, storage_options=options)
    assert number_of(shardstore.load(place.url, storage_options=options)) == BIG
    assert len(by_the_loop) == len(proxy.log)


def test_releases_without_sessions_to_choose(
    place: Place, by_the_loop: list[str], seaweed: Weed, monkeypatch: pytest.MonkeyPatch
):
    """All goes the way of the event loop."""
    monkeypatch.setattr(s3_client, "signature", lambda _: inspect.Signature())
    store = S3Store(place.url, options_for(seaweed.s3, default_cache_type="none"), to_log)
    store.put("k", Bytes(b"abc"))
    buffer = bytearray(2)
    store.read_into("k", 1, [memoryview(buffer)])
    assert buffer == b"bc"
    assert len(by_the_loop) == 2


@pytest.mark.parametrize("session", [{}, {"http_session_cls": AIOHTTPSession}], ids=["threads", "event loop"])
def test_memory_is_left_alone_after_an_interrupt(place: Place, proxy: FaultProxy, session: dict[str, Any]):
    """A read that is broken off by Ctrl-C has ended when the exception comes out: what comes later goes nowhere."""
    store = S3Store(place.url, options_for(proxy.url, config_kwargs=session), to_log)
    place.store.put("k", Bytes(b"x" * MIB))
    hold, memory = Hold(), bytearray(MIB)
    proxy.on("get_object", hold)
    with pytest.raises(KeyboardInterrupt), interrupted_when(hold):
        store.read_into("k", 0, [memoryview(memory)])
    assert hold.release() == 206
    proxy.wait_for(lambda: proxy.log[0].ended)
    store.read_into("k", 0, [memoryview(bytearray(9))])  # the event loop has gone on
    assert not any(memory)


@contextmanager
def interrupted_when(hold: Hold) -> Iterator[None]:
    """SIGINT for the main thread, once a request is held."""

    def interrupt() -> None:
        hold.wait_until_reached()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_through_a_proxy(place: Place, proxy: FaultProxy, seaweed: Weed):
    """Where the configuration of s3fs names a proxy, everything goes through it, bodies too."""
    options = options_for(seaweed.s3, part_bytes=5 * MIB, config_kwargs={"proxies": {"http": proxy.url}})
    shardstore.save(state(BIG), place.url, storage_options=options)
    assert number_of(shardstore.load(place.url, storage_options=options)) == BIG
    assert {"put_object", "upload_part", "get_object", "head_object"} <= set(proxy.ops())


def test_parts_are_equal(place: Place, proxy: FaultProxy):
    """Some services want them so, and no connection has much more to carry than another."""
    options = {**hasty(proxy.url), "part_bytes": 8 * MIB}
    S3Store(place.url, options, to_log).put("k", Bytes(bytes(21 * MIB)))
    assert [int(request.header("content-length")) / MIB for request in proxy.requests("upload_part")] == [7, 7, 7]


def test_what_reads_cost(place: Place, proxy: FaultProxy):
    """One request for each range, nothing before it."""
    store = S3Store(place.url, hasty(proxy.url), to_log)
    place.store.put("k", Bytes(bytes(3 * MIB)))
    for at in range(3):
        store.read_into("k", at * MIB, [memoryview(bytearray(MIB))])
    assert proxy.ops() == ["get_object"] * 3
