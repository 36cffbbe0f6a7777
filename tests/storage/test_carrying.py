"""The way of large bodies: blocking calls on the threads that wait. Against small servers that do as they are told."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pytest

from shardstore.storage.carrying import Carrier, Connections, Landing, Payload
from tests.kit import tls

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
DATA = bytes(range(256)) * 2048
PARTIAL = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-524287/524288\r\n"
WHOLE = PARTIAL + b"Content-Length: 524288\r\n\r\n" + DATA

Script = Callable[[socket.socket, BinaryIO], bool]
"""Deals with one request; whether another may follow on this connection."""


class Server:
    """Accepts connections one after another, and lets a script answer each request."""

    def __init__(self, script: Script, context: ssl.SSLContext | None = None) -> None:
        self._script, self._context = script, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}/b/k?x=1"
        self.connections = 0
        self.heads: list[list[bytes]] = []
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with contextlib.suppress(OSError, ValueError):
                if self._context:
                    client = self._context.wrap_socket(client, server_side=True)
                with client, client.makefile("rb") as source:
                    while self._one(client, source):
                        pass
            client.close()
            self.closed.set()

    def _one(self, client: socket.socket, source: BinaryIO) -> bool:
        head = list(iter(lambda: source.readline().strip(), b""))
        if not head:
            return False
        self.heads.append(head)
        return self._script(client, source)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def serving() -> Iterator[Callable[..., Server]]:
    """Makes servers, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(script: Script, context: ssl.SSLContext | None = None) -> Server:
            server = Server(script, context)
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture
def connections() -> Iterator[Connections]:
    """Without TLS."""
    made = Connections(5, 5, ssl.create_default_context)
    yield made
    made.close()


def reading(seconds: float = 30) -> tuple[Carrier, bytearray]:
    """A carrier that waits for all of DATA, in two buffers, and the memory behind them."""
    memory = bytearray(len(DATA))
    view = memoryview(memory)
    return Carrier(seconds, Landing(0, [view[:1000], view[1000:]])), memory


def answering(*pieces: bytes, again: bool = True) -> Script:
    """Sends these bytes, whatever is asked for."""

    def answer(client: socket.socket, source: BinaryIO) -> bool:
        for piece in pieces:
            client.sendall(piece)
        return again

    return answer


def test_reads_go_into_their_memory_on_one_connection(serving, connections: Connections):
    """Three ranges, one after another: all right, and the connection is opened once."""
    server = serving(answering(WHOLE))
    for _ in range(3):
        carrier, memory = reading()
        answer = connections.exchange(carrier, "GET", server.url, {"Range": "bytes=0-524287"}, None)
        assert carrier.into.left == 0
        assert memory == DATA
        assert (answer.status, answer.body) == (206, b"")
    assert server.connections == 1
    assert server.heads[0][0] == b"GET /b/k?x=1 HTTP/1.1"
    assert b"Range: bytes=0-524287" in server.heads[0]


def test_a_connection_that_the_server_has_closed_is_not_used_again(serving, connections: Connections):
    """Servers close what rests; the next request takes a new connection and does not fail."""
    server = serving(answering(WHOLE, again=False))
    for _ in range(3):
        carrier, memory = reading()
        connections.exchange(carrier, "GET", server.url, {}, None)
        assert memory == DATA
        assert server.closed.wait(30)
        server.closed.clear()
    assert server.connections == 3


def test_bodies_are_sent_whole_and_without_an_invitation(serving, connections: Connections):
    """Every byte in order; `Expect` would cost a round trip for each."""
    came: list[bytes] = []

    def store(client: socket.socket, source: BinaryIO) -> bool:
        came.append(source.read(3 * len(DATA)))
        client.sendall(b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 0\r\n\r\n")
        return True

    server = serving(store)
    headers = {"Expect": "100-continue", "Content-Length": str(3 * len(DATA))}
    for _ in range(2):
        payload = Payload([memoryview(DATA), memoryview(DATA), memoryview(DATA)])
        answer = connections.exchange(Carrier(30), "PUT", server.url, headers, payload)
        assert (answer.status, answer.headers["etag"]) == (200, "x")
    assert came == [3 * DATA] * 2
    assert server.connections == 1
    assert not [line for line in server.heads[0] if line.lower().startswith(b"expect")]


def test_an_answer_that_comes_before_the_body_was_sent(serving, connections: Connections):
    """A server that refuses a body does not read it, whether it hangs up or not: what it says is heard."""
    heard = threading.Event()

    def refuse(client: socket.socket, source: BinaryIO) -> bool:
        client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\n\r\ndenied")
        return heard.wait(0 if len(server.heads) == 1 else 30)

    server = serving(refuse)
    payload = Payload([memoryview(bytes(64 << 20))])
    for _ in range(2):
        answer = connections.exchange(Carrier(10), "PUT", server.url, {"Content-Length": str(64 << 20)}, payload)
        assert (answer.status, answer.body) == (403, b"denied")
    heard.set()
    connections.exchange(Carrier(10), "PUT", server.url, {"Content-Length": "0"}, None)
    assert server.connections == 3


def test_bodies_in_chunks(serving, connections: Connections):
    """A server that tells no length."""
    chunked = PARTIAL + b"Transfer-Encoding: chunked\r\n\r\n80000\r\n" + DATA + b"\r\n0\r\n\r\n"
    server = serving(answering(chunked))
    carrier, memory = reading()
    connections.exchange(carrier, "GET", server.url, {}, None)
    assert memory == DATA


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\n", PARTIAL.replace(b"0-524287/", b"1-524288/")], ids=["all", "another range"]
)
def test_what_was_not_asked_for_is_not_read(serving, connections: Connections, head: bytes):
    """The memory stays as it was, however much comes, and the connection is given up."""
    server = serving(answering(head + b"Content-Length: 1000000000\r\n\r\n" + DATA, again=False))
    carrier, memory = reading()
    answer = connections.exchange(carrier, "GET", server.url, {}, None)
    assert carrier.into.left == len(DATA)
    assert not any(memory)
    assert answer.body == b""
    connections.exchange(carrier, "GET", server.url, {}, None)
    assert server.connections == 2


@pytest.mark.parametrize("size", [b"524288", b"262144"], ids=["broken off", "said to be all"])
def test_half_a_body(serving, connections: Connections, size: bytes):
    """Is an error, whatever its head says; another try asks for the other half alone, and then all is there."""
    half = PARTIAL + b"Content-Length: " + size + b"\r\n\r\n" + DATA[:262144]
    carrier, memory = reading()
    with pytest.raises(EOFError):
        connections.exchange(carrier, "GET", serving(answering(half, again=False)).url, {}, None)
    assert carrier.into.wanted == "262144-524287"
    rest = PARTIAL.replace(b"0-524287/", b"262144-524287/") + b"Content-Length: 262144\r\n\r\n" + DATA[262144:]
    connections.exchange(carrier, "GET", serving(answering(rest)).url, {}, None)
    assert carrier.into.left == 0
    assert memory == DATA


def test_a_body_that_trickles(serving, connections: Connections):
    """Each byte comes in time, all of them would not: the time is for the whole."""

    def trickle(client: socket.socket, source: BinaryIO) -> bool:
        client.sendall(WHOLE[:200])
        pause = threading.Event()
        while True:  # until the client hangs up
            client.sendall(b"x")
            pause.wait(0.01)

    server = serving(trickle)
    carrier, _ = reading(seconds=0.3)
    with pytest.raises(TimeoutError):
        connections.exchange(carrier, "GET", server.url, {}, None)


def test_stop_breaks_off(serving, connections: Connections):
    """A thread that waits for an answer ends at once with an error; another request with this carrier is not made."""
    asked = threading.Event()

    def silence(client: socket.socket, source: BinaryIO) -> bool:
        asked.set()
        return bool(source.read(1))  # until the client hangs up

    server = serving(silence)
    carrier, _ = reading()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            connections.exchange(carrier, "GET", server.url, {}, None)
        except (OSError, http.client.HTTPException) as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert asked.wait(30)
    carrier.stop()
    thread.join()
    assert len(errors) == 1
    assert not isinstance(errors[0], TimeoutError)
    with pytest.raises(ConnectionAbortedError):
        connections.exchange(carrier, "GET", server.url, {}, None)
    assert len(server.heads) == 1


def _storing(client: socket.socket, source: BinaryIO) -> bool:
    """Takes 8 MiB, and says how many came."""
    client.sendall(b"HTTP/1.1 200 OK\r\nETag: %d\r\nContent-Length: 0\r\n\r\n" % len(source.read(8 << 20)))
    return True


def test_tls(serving):
    """Certificates are checked against what `verify` names, and not at all where it is False."""
    from shardstore.storage.s3_session import _tls

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.CERTIFICATE)
    server = serving(answering(WHOLE), context)
    for verify in (str(tls.CERTIFICATE), False):
        made = Connections(5, 5, lambda verify=verify: _tls(verify, None))
        for _ in range(2):
            carrier, memory = reading()
            made.exchange(carrier, "GET", server.url, {}, None)
            assert memory == DATA
        made.close()
    assert server.connections == 2
    storing = serving(_storing, context)
    made = Connections(5, 5, lambda: _tls(False, None))
    payload = Payload([memoryview(bytes(8 << 20))])
    answer = made.exchange(Carrier(30), "PUT", storing.url, {"Content-Length": str(8 << 20)}, payload)
    assert (answer.status, answer.headers["etag"]) == (200, str(8 << 20))
    made.close()
    made = Connections(5, 5, lambda: _tls(True, None))
    with pytest.raises(ssl.SSLCertVerificationError):
        made.exchange(reading()[0], "GET", server.url, {}, None)


def test_payloads_can_be_looked_into():
    """As a file, for libraries that want one: told, sought, read, from the start again."""
    payload = Payload([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")])
    assert len(payload) == 7
    assert (payload.read(2), payload.tell(), payload.read()) == (b"ab", 2, b"cdefg")
    assert (payload.seek(-3, 2), payload.read(9)) == (4, b"efg")
    assert (payload.seek(0), payload.seek(1, 1), payload.read(3)) == (0, 1, b"bcd")
    assert b"".join(payload) == b"abcdefg"
