"""The fault proxy does what it is told to; else the tests that use it prove nothing."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardstore.errors import StoreError, StoreUnavailable
from shardstore.events import to_log
from shardstore.storage import Bytes
from shardstore.storage.s3 import S3Store
from tests.kit.contract import REPOSITORY
from tests.kit.mishaps import (
    Hold,
    access_denied,
    answering,
    cut,
    cut_hard,
    flipping_answer,
    flipping_request,
    ignoring_conditions,
    killing,
    losing,
    never,
    paged,
    reset,
    reset_midway,
    short,
    slow_down,
    stalled,
)  # fmt: skip
from tests.kit.proxy import FOREVER, Action, FaultProxy
from tests.kit.s3 import MIB, Place, hasty

pytestmark = pytest.mark.usefixtures("no_waits")
DATA = bytes(range(256)) * 4096


@pytest.fixture
def store(place: Place, proxy: FaultProxy) -> S3Store:
    """A store behind the proxy that makes each request once."""
    return S3Store(place.url, {**hasty(proxy.url), "attempts": 1}, to_log)


def test_log(store: S3Store, proxy: FaultProxy):
    """Every request, with its operation, key, query, headers and status, in order."""
    store.put("a/b +%", Bytes(DATA))
    store.read_into("a/b +%", 5, [memoryview(bytearray(9))])
    store.put("big", Bytes(DATA * 6))
    store.delete("big")
    with pytest.raises(StoreError):
        store.stat("big")
    parts = ["create_multipart_upload", "upload_part", "upload_part", "complete_multipart_upload"]
    assert proxy.ops() == ["put_object", "get_object", *parts, "delete_object", "head_object"]
    put, get, *_, head = proxy.requests()
    assert put.key.endswith("/a/b +%")
    assert put.header("content-length") == str(len(DATA))
    assert (get.header("range"), get.status) == ("bytes=5-13", 206)
    assert sorted(request.part for request in proxy.requests("upload_part")) == [1, 2]
    assert head.status == 404
    assert all(request.pid == os.getpid() for request in proxy.log)
    assert put.began < put.ended < get.began


def test_rules_are_counted(store: S3Store, proxy: FaultProxy):
    """The nth of the matching requests and so many after it, and only those; the first of several rules wins."""
    rule = proxy.on("put_object", slow_down, key="x$", nth=2, times=2)
    proxy.on(".*", access_denied, key="x$", nth=3)
    outcomes = []
    for key in ("x", "y", "x", "y", "x", "x"):
        try:
            store.put(key, Bytes(b"1"))
            outcomes.append(0)
        except StoreUnavailable:
            outcomes.append(503)
    assert outcomes == [0, 0, 503, 0, 503, 0]
    assert (rule.seen, rule.hits) == (4, 2)
    assert [request.fault for request in proxy.log] == ["", "", "SlowDown", "", "SlowDown", ""]


@pytest.mark.parametrize("action", [cut, cut_hard, short, stalled], ids=lambda action: action.__name__)
def test_bodies_that_end_early(store: S3Store, proxy: FaultProxy, action: Action):
    """Half a body is what comes; the next request is answered in full."""
    store.put("k", Bytes(DATA))
    proxy.on("get_object", action)
    buffer = memoryview(bytearray(len(DATA)))
    with pytest.raises(StoreUnavailable, match="k"):
        store.read_into("k", 0, [buffer])
    assert buffer[: len(DATA) // 2] == DATA[: len(DATA) // 2]
    assert not any(buffer[len(DATA) // 2 :])
    store.read_into("k", 0, [buffer])
    assert buffer == DATA


@pytest.mark.parametrize(
    ("action", "arrives"),
    [
        (never, False), (reset, False), (reset_midway, False), (slow_down, False),
        (answering(409, "OperationAborted"), False), (losing("reset"), True),
        (losing("silence"), True), (losing("error"), True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_requests_that_do_not_arrive_or_lose_their_answer(
    store: S3Store, place: Place, proxy: FaultProxy, action: Action, arrives: bool
):
    """The client hears nothing good; the server has the object, or has not."""
    proxy.on("put_object", action)
    with pytest.raises(StoreUnavailable):
        store.put("k", Bytes(DATA))
    assert place.names() == ({"k"} if arrives else set())
    store.put("k", Bytes(DATA))
    assert place.read("k") == DATA


def test_hold(store: S3Store, place: Place, proxy: FaultProxy):
    """The server gets a held request only when it is released, though the client has given up long ago."""
    hold = Hold()
    proxy.on("put_object", hold)
    with pytest.raises(StoreUnavailable):
        store.put("k", Bytes(DATA))
    assert place.names() == set()
    assert hold.release() == 200
    assert place.read("k") == DATA


def test_hold_for_a_client_that_waits(store: S3Store, proxy: FaultProxy):
    """A client that still waits gets the answer."""
    hold = Hold()
    proxy.on("put_object", hold)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, "k", Bytes(DATA))
        hold.wait_until_reached()
        assert not put.done()
        assert hold.release() == 200
        put.result()


def test_flipped_bits(store: S3Store, place: Place, proxy: FaultProxy):
    """One bit is changed on the way down; on the way up, too, where no checksum shows it."""
    store.put("k", Bytes(DATA))
    proxy.on("get_object", flipping_answer)
    read = store.get("k", limit=MIB).data
    assert sum((one ^ two).bit_count() for one, two in zip(read, DATA, strict=True)) == 1
    store._uploads._checksums = False
    proxy.on("put_object", flipping_request)
    store.put("k", Bytes(DATA))
    assert sum((one ^ two).bit_count() for one, two in zip(place.read("k"), DATA, strict=True)) == 1


def test_changed_requests_are_signed_anew(store: S3Store, proxy: FaultProxy):
    """Pages of listings get smaller, and conditions are taken off, without the server finding a wrong signature."""
    names = [f"a/{number} +%é" for number in range(5)]
    proxy.on("list_objects_v2", paged(2), times=FOREVER)
    proxy.on("put_object", ignoring_conditions, times=FOREVER)
    for name in names:
        store.put(name, Bytes(b"1"))
    assert [entry.key for entry in store.list()] == names
    assert len(proxy.requests("list_objects_v2")) == 3
    name = f"{store._prefix}k"
    for data in (b"one", b"two"):
        store._uploads.put_once(name, Bytes(data), {"IfNoneMatch": "*"})
    assert store.get("k", limit=9).data == b"two"


def test_a_wrong_signature_is_found(place: Place, proxy: FaultProxy):
    """The server does check signatures: without that the tests of expired credentials would prove nothing."""
    store = S3Store(place.url, {**hasty(proxy.url), "secret": "wrong"}, to_log)
    with pytest.raises(StoreError, match="signature does not match"):
        store.put("k", Bytes(b"1"))
    assert proxy.ops() == ["put_object"]


@pytest.mark.parametrize(("when", "there"), [("before", set()), ("midway", set()), ("after", {"k"})])
def test_a_client_that_is_killed(place: Place, proxy: FaultProxy, when, there: set[str]):
    """SIGKILL hits the process that sent the request, before the server has it, or after."""
    proxy.on("put_object", killing(when))
    program = (
        "import sys; from tests.kit.s3 import hasty; from shardstore.storage.s3 import S3Store\n"
        "from shardstore.events import to_log; from shardstore.storage import Bytes\n"
        "S3Store(sys.argv[1], hasty(sys.argv[2]), to_log).put('k', Bytes(bytes(4 << 20)))\n"
    )
    child = subprocess.run([sys.executable, "-c", program, place.url, proxy.url], check=False, cwd=REPOSITORY)
    assert child.returncode == -signal.SIGKILL
    assert place.names() == there


def test_many_connections(store: S3Store, proxy: FaultProxy):
    """Requests on many connections at once don't get mixed up."""
    for number in range(16):
        store.put(f"{number}", Bytes(bytes([number]) * 10_000))

    def read(number: int) -> bool:
        buffer = bytearray(10_000)
        store.read_into(f"{number % 16}", 0, [memoryview(buffer)])
        return set(buffer) == {number % 16}

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(160)))


def test_pace_and_latency(monkeypatch: pytest.MonkeyPatch):
    """A connection is let wait as long as its bytes take at the given rate, in both directions together."""
    waits: list[float] = []
    monkeypatch.setattr("tests.kit.proxy.time.sleep", waits.append)
    monkeypatch.setattr("tests.kit.proxy.time.monotonic", lambda: 100.0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    with _serving(server), FaultProxy(server.server_port, {}, latency_s=0.25, bytes_per_s=1000.0) as proxy:
        connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"))
        connection.request("PUT", "/b/k", body=bytes(500))
        assert connection.getresponse().read() == bytes(500)
        connection.close()
    assert waits[0] == 0.25
    assert waits[-1] == pytest.approx(1.0)


class _Echo(http.server.BaseHTTPRequestHandler):
    """Gives back what it gets."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _serving(server: http.server.ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
