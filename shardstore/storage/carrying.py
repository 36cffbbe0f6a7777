"""Moves the bodies of HTTP requests on the threads that wait for them, from and to the memory where they lie.

An event loop has one thread for all connections, copies what it reads, and stands still while others compute. Blocking
calls on a socket copy nothing and let go of the interpreter's lock. So s3fs makes, signs and judges requests
(`s3_session`), and what goes over the wire in between is done here.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import http.client
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

STEP = 1024 * 1024
_IDLE_SECONDS = 12.0  # servers and routers forget connections that rest
_MOST_IDLE = 64
_MOST_ANSWER = 1024 * 1024
_DROPPED = {"expect", "transfer-encoding"}  # a round trip for each body, and what the length says already
_PARTIAL, _ERRORS = 206, 300

current: contextvars.ContextVar[Carrier | None] = contextvars.ContextVar("carrier", default=None)


class Start(Protocol):
    """Begins to run a coroutine on an event loop."""

    def __call__(self, work: Awaitable[T], /) -> Future[T]: ...


class Payload:
    """Buffers as the body of a request: sent without a copy, and again from the start for another try."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers
        self._size = sum(map(len, buffers))
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Only for libraries that look into a body; requests are sent by iterating."""
        end = self._size if size < 0 else min(self._size, self._at + size)
        data = b"".join(bytes(part) for part in self._slices(self._at, end))
        self._at = end
        return data

    def _slices(self, begin: int, end: int) -> Iterator[memoryview]:
        at = 0
        for buffer in self.buffers:
            low, high = max(begin - at, 0), min(end - at, len(buffer))
            if low < high:
                yield buffer[low:high]
            at += len(buffer)

    def __iter__(self) -> Iterator[memoryview]:
        for buffer in self.buffers:
            for at in range(0, len(buffer), STEP):
                yield buffer[at : at + STEP]

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for chunk in self:
            yield chunk


class Landing:
    """Where a range of an object goes: writable buffers of bytes, filled in order. A further try asks for the rest."""

    def __init__(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._at, self._buffers = offset, collections.deque(buffers)
        self.left = sum(map(len, buffers))

    @property
    def wanted(self) -> str:
        """The bytes that are missing, as HTTP names them."""
        return f"{self._at}-{self._at + self.left - 1}"

    def room(self, most: int) -> memoryview:
        """Where the next bytes go, `most` at most."""
        return self._buffers[0][:most]

    def took(self, nbytes: int) -> None:
        """So many bytes have come there."""
        self._at += nbytes
        self.left -= nbytes
        rest = self._buffers[0][nbytes:]
        if rest:
            self._buffers[0] = rest
        else:
            self._buffers.popleft()


class Carrier:
    """What a thread does while it waits for requests: it moves their bytes.

    `seconds`: how long the bytes of one request may take. `into`: where the body of an answer goes, if it is the range
    that is wanted there.
    """

    def __init__(self, seconds: float, into: Landing | None = None) -> None:
        self.seconds, self.into = seconds, into
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._socket: socket.socket | None = None
        self._future: Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None

    def wait(self, start: Start, work: Awaitable[T]) -> T:
        """Run a coroutine by `start`, on an event loop, do here what it hands over, and return what it returns.

        When this returns or raises, by an interrupt too, nobody uses the memory of a body any more.
        """
        try:
            future = start(self._under(work))
            future.add_done_callback(lambda _: self._jobs.put(None))
            with self._lock:
                self._future = future
                if self._stopped:
                    future.cancel()
            for job in iter(self._jobs.get, None):
                job()
            result, error = future.result()
        except BaseException:
            start(self._break_off()).result()
            raise
        if error is not None:
            raise error
        return result[0]

    async def _under(self, work: Awaitable[T]) -> tuple[list[T], Exception | None]:
        """Never raises, since nobody hears it once the future was cancelled, and the loop would complain."""
        current.set(self)
        self._task = asyncio.current_task()
        try:
            return [await work], None
        except Exception as error:  # noqa: BLE001 - raised by the waiting thread
            return [], error

    async def _break_off(self) -> None:
        """End the task, and wait for its end: where the event loop moves bodies, it uses their memory until then."""
        if self._task is not None:
            if not self._task.cancelling():
                self._task.cancel()
            await asyncio.wait([self._task])

    async def hand_over(self, work: Callable[[], T]) -> T:
        """Let the waiting thread do some work."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                loop.call_soon_threadsafe(_settle, done.set_exception, done, error)
            else:
                loop.call_soon_threadsafe(_settle, done.set_result, done, result)

        self._jobs.put(job)
        return await done

    def stop(self) -> None:
        """Break off, from another thread; the waiting one ends soon."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                with suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS, too, without its farewell
            if self._future is not None:
                self._future.cancel()

    @contextmanager
    def using(self, sock: socket.socket) -> Iterator[None]:
        """While this socket carries the bytes."""
        with self._lock:
            if self._stopped:
                raise ConnectionAbortedError("the request was broken off")
            self._socket = sock
        try:
            yield
        finally:
            with self._lock:
                self._socket = None


def _settle(how: Callable[[Any], None], future: asyncio.Future[Any], outcome: object) -> None:
    if not future.done():
        how(outcome)


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, names in small letters, and its body unless that went where it was waited for."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connections:
    """Connections that are kept for the next request. `tls` makes what https wants."""

    def __init__(self, connect_seconds: float, read_seconds: float, tls: Callable[[], ssl.SSLContext]) -> None:
        self._connect_seconds, self._read_seconds = connect_seconds, read_seconds
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[tuple[float, http.client.HTTPConnection]]] = {}

    def exchange(self, carrier: Carrier, method: str, url: str, headers: Mapping[str, Any], body: Any) -> Answer:
        """Make one request, once. Raises OSError, HTTPException, or TimeoutError after the carrier's time."""
        parts = urlsplit(url)
        place = (parts.scheme, parts.netloc)
        connection = self._take(*place)
        try:
            made = _Exchange(connection, carrier, self._read_seconds)
            with carrier.using(connection.sock):
                target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
                made.send(method, target, headers, body)
                answer = made.receive()
        except BaseException:
            connection.close()
            raise
        if made.reusable:
            self._give_back(place, connection)
        else:
            connection.close()
        return answer

    def _take(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        with self._lock:
            idle = self._idle.get((scheme, netloc), [])
            while idle:
                since, connection = idle.pop()
                if time.monotonic() - since < _IDLE_SECONDS and not _readable(connection.sock):
                    return connection
                connection.close()
        if scheme == "https":
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                netloc, timeout=self._connect_seconds, context=self._context()
            )
        else:
            made = http.client.HTTPConnection(netloc, timeout=self._connect_seconds)
        made.connect()
        return made

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = self._make_tls()
            return self._tls

    def _give_back(self, place: tuple[str, str], connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(place, [])
            idle.append((time.monotonic(), connection))
            if len(idle) > _MOST_IDLE:
                idle.pop(0)[1].close()

    def close(self) -> None:
        """Close those that rest."""
        with self._lock:
            for idle in self._idle.values():
                for _, connection in idle:
                    connection.close()
            self._idle.clear()


class _Exchange:
    """A request and its answer on one connection."""

    def __init__(self, connection: http.client.HTTPConnection, carrier: Carrier, read_seconds: float) -> None:
        self._connection, self._carrier, self._read_seconds = connection, carrier, read_seconds
        self._socket = connection.sock
        self._deadline = time.monotonic() + carrier.seconds
        self._watch = select.poll()
        self._watch.register(self._socket, select.POLLIN | select.POLLOUT)
        self._sent = False
        self.reusable = False

    def _hurry(self) -> None:
        """Let the next call on the socket end in time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(self._read_seconds, left))

    def send(self, method: str, target: str, headers: Mapping[str, Any], body: Any) -> None:
        """Send the head and the body; all of it, unless the server answers before that."""
        self._hurry()
        self._connection.putrequest(method, target, skip_accept_encoding="accept-encoding" in map(str.lower, headers))
        for name, value in headers.items():
            if name.lower() not in _DROPPED:
                self._connection.putheader(name, value)
        try:
            self._connection.endheaders()
            for chunk in body if isinstance(body, Payload) else (memoryview(body),) if body else ():
                if not self._push(chunk):
                    return
            self._sent = True
        except (BrokenPipeError, ConnectionResetError):
            pass  # it may have said why

    def _push(self, chunk: memoryview) -> bool:
        """Send all of it; False as soon as there is an answer. TLS has talk of its own, which looks like one."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._hurry()
            self._socket.sendall(chunk)
            return True
        while chunk:
            self._hurry()
            ready = dict(self._watch.poll(1000 * (self._socket.gettimeout() or 0)))
            if not ready:
                raise TimeoutError
            if ready[self._socket.fileno()] & select.POLLIN:
                return False
            chunk = chunk[self._socket.send(chunk) :]
        return True

    def receive(self) -> Answer:
        """Read the answer; its body goes into the carrier's buffers if it is what they wait for."""
        self._hurry()
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        into, body = self._carrier.into, b""
        if into and response.status == _PARTIAL and is_range(headers.get("content-range", ""), into.wanted):
            whole = self._fill(response, into)
        elif response.status >= _ERRORS or not into:
            body = response.read(_MOST_ANSWER)
            whole = response.isclosed() or response.length == 0
        else:
            whole = False  # something else than what was asked for, of any size
        self.reusable = whole and self._sent and not response.will_close
        response.close()
        return Answer(response.status, headers, body)

    def _fill(self, response: http.client.HTTPResponse, into: Landing) -> bool:
        """Read the body to where it goes; whether that was all of it."""
        left = response.length
        read = response.readinto if left is None else response.fp.readinto1
        while into.left:
            self._hurry()
            room = into.room(STEP if left is None else min(STEP, left))
            got = read(room) if room else 0
            if not got:
                raise EOFError("the body ended too early")
            into.took(got)
            left = None if left is None else left - got
        return left == 0


def is_range(shown: str, wanted: str) -> bool:
    """Whether a Content-Range says that this range came."""
    return shown.startswith(f"bytes {wanted}/")


def _readable(sock: socket.socket) -> bool:
    """Whether there is something to read at once: an answer, or the end of the connection."""
    watch = select.poll()
    watch.register(sock, select.POLLIN)
    return bool(watch.poll(0))
