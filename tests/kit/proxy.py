"""A small HTTP proxy in front of an S3 server, that logs every request and does to some what networks and servers do.

It passes the `Host` header on as it came: signatures cover it, and the server checks them against what it gets. So a
client is simply given the proxy's URL as its endpoint. What the proxy changes in a request, it signs anew.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tests.kit.sigv4 import sign

CHUNK = 256 * 1024
PATIENCE_S = 60.0  # how long a test waits for something to happen before it is given up
FOREVER = 1_000_000_000

Headers = list[tuple[str, str]]


@dataclass
class Request:
    """One request. `op` is S3's name of it: `put_object`, `upload_part`, `list_objects_v2`, ...

    `status`: what the client was sent, 0 for nothing. `fault`: what was done to it. `began`, `answered`,
    `ended`: places in the order of all that begins and ends. What a client does after an answer has a later place than
    `answered`; `ended` is when the proxy is through with it.
    """

    method: str
    target: str
    headers: Headers
    began: int
    answered: int = 0
    ended: int = 0
    status: int = 0
    fault: str = ""
    bucket: str = field(init=False)
    key: str = field(init=False)
    query: dict[str, str] = field(init=False)
    op: str = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.target)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        self.bucket, self.key = unquote(bucket), unquote(key)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.op = _operation(self.method, self.key, self.query)

    def header(self, name: str) -> str:
        """A header, "" where there is none; names in small letters."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def pid(self) -> int:
        """The process that sent it, where its client has `user_agent_extra` set to `pid/<number>`."""
        found = re.search(r"\bpid/(\d+)", self.header("user-agent"))
        return int(found[1]) if found else 0

    @property
    def part(self) -> int:
        """The number of a part, 0 for others."""
        return int(self.query.get("partNumber", 0))

    @property
    def access_key(self) -> str:
        """Whose credentials signed it."""
        found = re.search(r"Credential=([^/]+)/", self.header("authorization"))
        return found[1] if found else ""


def _operation(method: str, key: str, query: Mapping[str, str]) -> str:
    if not key:
        if method == "GET":
            return "list_multipart_uploads" if "uploads" in query else "list_objects_v2"
        return {"PUT": "create_bucket", "HEAD": "head_bucket", "POST": "delete_objects"}.get(method, "delete_bucket")
    if method == "POST":
        return "create_multipart_upload" if "uploads" in query else "complete_multipart_upload"
    if "uploadId" in query:
        return {"PUT": "upload_part", "GET": "list_parts", "DELETE": "abort_multipart_upload"}.get(method, method)
    return f"{method.lower()}_object"


Action = Callable[["Exchange"], None]


@dataclass
class Rule:
    """What is done to which requests. `seen`: how many were of that kind; `hits`: to how many it was done."""

    does: Action
    op: str
    key: str
    part: int
    nth: int
    times: int
    when: Callable[[Request], bool]
    seen: int = 0
    hits: int = 0

    def matches(self, request: Request) -> bool:
        return (
            re.fullmatch(self.op, request.op) is not None
            and re.search(self.key, request.key) is not None
            and self.part in (0, request.part)
            and self.when(request)
        )

    def due(self) -> bool:
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


class Hangup(Exception):
    """The connection to the client is at its end."""


class Exchange:
    """One request on its way, for actions: they take its body, pass it on, and answer."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, source: BinaryIO, request: Request) -> None:
        self.proxy, self.client, self.request = proxy, client, request
        self._source = source
        self._body: bytes | None = None

    # -- the request

    def take_body(self) -> bytes:
        """The whole body of the request, from the client."""
        if self._body is None:
            self._invite()
            self._body = b"".join(bytes(chunk) for chunk in self._incoming())
        return self._body

    def take_half(self) -> bytes:
        """The first half of the body; the rest is not read any more."""
        self._invite()
        return self._source.read(int(self.request.header("content-length") or 0) // 2)

    def _invite(self) -> None:
        if self.request.header("expect").lower() == "100-continue":
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _incoming(self) -> Iterator[memoryview]:
        if self.request.header("transfer-encoding").lower() == "chunked":
            yield memoryview(_read_chunked(self._source))
            return
        yield from _pieces(self._source, int(self.request.header("content-length") or 0))

    # -- the server

    def ask(self, *, half: bool = False) -> Answer:
        """Pass the request on, and give the head of the server's answer. `half`: send half the body, and hang up."""
        server = socket.create_connection(("127.0.0.1", self.proxy.server_port))
        try:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.sendall(self._head())
            if half:
                server.sendall(self.take_half())
                raise Hangup
            self._send_body(server)
            return Answer(server, self.request.method)
        except BaseException:
            server.close()
            raise

    def _head(self) -> bytes:
        dropped = {"connection", "expect", "transfer-encoding"}
        headers = [(name, value) for name, value in self.request.headers if name.lower() not in dropped]
        headers.append(("Connection", "close"))
        if self.request.header("transfer-encoding"):
            headers.append(("Content-Length", str(len(self.take_body()))))
        return _head(f"{self.request.method} {self.request.target} HTTP/1.1", headers)

    def _send_body(self, server: socket.socket) -> None:
        if self._body is not None:
            server.sendall(self._body)
            return
        self._invite()
        pace = self.proxy.pace(self.client)
        for chunk in self._incoming():
            pace(len(chunk))
            server.sendall(chunk)
        self._body = b""  # it is gone

    # -- the client

    def pass_on(self) -> None:
        """What happens where nothing is done: the server's answer goes to the client as it comes."""
        with contextlib.closing(self.ask()) as answer:
            self.reply(answer.status, answer.headers)
            pace = self.proxy.pace(self.client)
            for chunk in answer.body():
                pace(len(chunk))
                self.client.sendall(chunk)

    def reply(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Send a head, and what of the body is at hand."""
        self.request.status, self.request.answered = status, self.proxy._tick()
        self.client.sendall(_head(f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}", headers) + body)

    def reset(self) -> None:
        """End the connection the hard way: the client gets ECONNRESET."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Hangup

    def wait_for_hangup(self) -> None:
        """Say nothing until the client hangs up, or the proxy is closed."""
        with contextlib.suppress(OSError):
            while self.client.recv(CHUNK):
                pass
        raise Hangup


class Answer:
    """An answer of the server: `status` and `headers`; its body is read when it is asked for."""

    def __init__(self, server: socket.socket, method: str) -> None:
        self._server = server
        self._source = server.makefile("rb")
        line, self.headers = _read_head(self._source)
        self.status = int(line.split()[1])
        self._empty = method == "HEAD" or self.status in (204, 304)
        found = [value for name, value in self.headers if name.lower() == "content-length"]
        self._chunked = not found and any(name.lower() == "transfer-encoding" for name, _ in self.headers)
        if not found and not self._empty:  # the client gets a length always, so that its connection can go on
            self._whole: bytes | None = _read_chunked(self._source) if self._chunked else self._source.read()
            drop = {"transfer-encoding", "connection"}
            self.headers = [(name, value) for name, value in self.headers if name.lower() not in drop]
            self.headers.append(("Content-Length", str(len(self._whole))))
        else:
            self._whole = None
            self.headers = [(name, value) for name, value in self.headers if name.lower() != "connection"]
        self.nbytes = 0 if self._empty else int(next(v for n, v in self.headers if n.lower() == "content-length"))

    def body(self) -> Iterator[memoryview]:
        if self._whole is not None:
            yield memoryview(self._whole)
        else:
            yield from _pieces(self._source, self.nbytes)

    def read(self) -> bytes:
        return b"".join(bytes(chunk) for chunk in self.body())

    def close(self) -> None:
        self._source.close()
        self._server.close()


class FaultProxy:
    """Listens on `url` and passes on to an S3 server on this machine; each connection has a thread.

    `latency_s`: so much later every request is dealt with. `bytes_per_s`: each connection carries no more, each way.
    `secrets`: secret keys by access keys, to sign changed requests.
    """

    def __init__(
        self, server_port: int, secrets: Mapping[str, str], *, latency_s: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        self.server_port, self.secrets = server_port, dict(secrets)
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.log: list[Request] = []
        self._rules: list[Rule] = []
        self._ticks = 0
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._paces: dict[socket.socket, _Pace] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on(
        self, op: str, does: Action, *, key: str = "", part: int = 0, nth: int = 1, times: int = 1,
        when: Callable[[Request], bool] = lambda request: True,
    ) -> Rule:  # fmt: skip
        """From the `nth` request on that matches, do this to `times` of them. Of several rules the first wins.

        `op`: a regular expression for the operation; `key`: one to be found in the key; `part`: the number of a part.
        """
        rule = Rule(does, op, key, part, nth, times, when)
        with self._changed:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and the log."""
        with self._changed:
            self._rules.clear()
            self.log.clear()

    def ops(self, pattern: str = ".*") -> list[str]:
        """The operations that came in, in order."""
        return [request.op for request in self.requests(pattern)]

    def requests(self, pattern: str = ".*", key: str = "") -> list[Request]:
        """The requests for an operation that came in, in order."""
        with self._changed:
            return [r for r in self.log if re.fullmatch(pattern, r.op) and re.search(key, r.key)]

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Until something holds, looked at after every beginning and end of a request; TimeoutError after a minute."""
        with self._changed:
            if not self._changed.wait_for(ready, PATIENCE_S):
                raise TimeoutError("what was waited for did not happen")

    def pace(self, client: socket.socket) -> Callable[[int], None]:
        """For one body: waits, before so many bytes are moved, as long as the bandwidth of a connection asks for."""
        pace = self._paces.get(client)
        if pace is None:
            return lambda nbytes: None
        pace.begin()
        return pace

    def close(self) -> None:
        """End all connections, and the threads."""
        with self._changed:
            self._closed = True
            still_open = list(self._open)
        for each in (self._listener, *still_open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    # -- connections

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if self._closed:
                    client.close()
                    return
                self._open.add(client)
                if self.bytes_per_s:
                    self._paces[client] = _Pace(self.bytes_per_s)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        source = client.makefile("rb")
        try:
            while self._one(client, source):
                pass
        except (OSError, Hangup):
            pass
        finally:
            source.close()
            client.close()
            with self._changed:
                self._open.discard(client)
                self._paces.pop(client, None)

    def _one(self, client: socket.socket, source: BinaryIO) -> bool:
        """One request; whether another may follow."""
        line, headers = _read_head(source)
        if not line:
            return False
        method, target, _ = line.split(" ")
        request = Request(method, target, headers, self._tick())
        does = self._begin(request)
        if self.latency_s:
            time.sleep(self.latency_s)
        try:
            does(Exchange(self, client, source, request))
        finally:
            with self._changed:
                request.ended = self._tick()
                self._changed.notify_all()
        return request.header("connection").lower() != "close"

    def _begin(self, request: Request) -> Action:
        with self._changed:
            self.log.append(request)
            due = [rule for rule in self._rules if rule.matches(request) and rule.due()]
            self._changed.notify_all()
            if not due:
                return Exchange.pass_on
            due[0].hits += 1
            request.fault = getattr(due[0].does, "__name__", type(due[0].does).__name__)
            return due[0].does

    def _tick(self) -> int:
        with self._changed:
            self._ticks += 1
            return self._ticks


class _Pace:
    """Called before bytes are moved: waits so that no more than `rate` bytes a second are.

    What a body lost by waiting for the others, up to `SLACK_S`, it may catch up with; pauses between bodies are lost.
    """

    SLACK_S = 0.1

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0

    def begin(self) -> None:
        """Another body."""
        self._free = max(time.monotonic(), self._free)

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        self._free = max(now - self.SLACK_S, self._free) + nbytes / self._rate
        time.sleep(max(0.0, self._free - now))


_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 301: "Moved Permanently", 400: "Bad Request",
            403: "Forbidden", 404: "Not Found", 409: "Conflict", 412: "Precondition Failed",
            416: "Range Not Satisfiable", 500: "Internal Server Error", 501: "Not Implemented",
            503: "Slow Down"}  # fmt: skip


def resigned(exchange: Exchange, target: str, headers: Headers) -> None:
    """Give a request another target or other headers, with a signature that fits."""
    request = exchange.request
    secret = exchange.proxy.secrets[request.access_key]
    request.target, request.headers = target, sign(request.method, target, headers, secret)


def with_query(target: str, **changes: str) -> str:
    """A target with members of its query replaced."""
    path, _, query = target.partition("?")
    members = {**dict(parse_qsl(query, keep_blank_values=True)), **changes}
    pairs = (f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}" for key, value in members.items())
    return f"{path}?{'&'.join(pairs)}"


def _head(line: str, headers: Headers) -> bytes:
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


def _read_head(source: BinaryIO) -> tuple[str, Headers]:
    line = source.readline().decode("latin-1").rstrip("\r\n")
    headers = []
    while text := source.readline().decode("latin-1").rstrip("\r\n"):
        name, _, value = text.partition(":")
        headers.append((name, value.strip()))
    return line, headers


def _pieces(source: BinaryIO, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    while nbytes:
        got = source.readinto1(buffer[: min(CHUNK, nbytes)])  # type: ignore[attr-defined]
        if not got:
            raise Hangup
        nbytes -= got
        yield buffer[:got]


def _read_chunked(source: BinaryIO) -> bytes:
    data = bytearray()
    while size := int(source.readline().split(b";")[0], 16):
        data += source.read(size)
        source.readline()
    while source.readline().strip():
        pass
    return bytes(data)


def main() -> None:
    """A proxy as a process of its own, for measurements: prints its URL, and ends when its input does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int, help="of the S3 server on this machine")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to every request")
    parser.add_argument("--mib-per-s", type=float, default=0.0, help="at most so many on each connection; 0: no limit")
    given = parser.parse_args()
    rate = given.mib_per_s * 1024 * 1024
    with FaultProxy(given.port, {}, latency_s=given.latency_ms / 1000, bytes_per_s=rate) as proxy:
        print(proxy.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
