"""Stores around a store, for tests: each is a Store itself."""

from __future__ import annotations

import errno as _errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from shardstore.errors import StoreUnavailable, from_os_error
from shardstore.storage.port import Blob, Body, Capabilities, Entry, Store

T = TypeVar("T")

CHANGING = frozenset({"put", "delete"})
READING = frozenset({"get", "read_into", "map", "stat", "list", "folders", "now"})
CALLS = CHANGING | READING
PATIENCE_S = 60.0  # how long a gate holds before the test is given up


class Wrapper:
    """Passes every call on; `around` may be overridden to do something before or after."""

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.url = store.url

    def around(self, call: str, key: str, make: Callable[[], T]) -> T:
        """Make one call. `call` is its name, `key` what it is about ("" for `now`, the prefix for `list`)."""
        return make()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def prepare(self) -> None:
        self.inner.prepare()

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        self.around("put", key, lambda: self.inner.put(key, body, if_absent=if_absent, if_match=if_match))

    def get(self, key: str, *, limit: int) -> Blob:
        return self.around("get", key, lambda: self.inner.get(key, limit=limit))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.around("read_into", key, lambda: self.inner.read_into(key, offset, buffers))

    def map(self, key: str) -> memoryview:
        return self.around("map", key, lambda: self.inner.map(key))

    def stat(self, key: str) -> Entry:
        return self.around("stat", key, lambda: self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterable[Entry]:
        return self.around("list", prefix, lambda: tuple(self.inner.list(prefix)))

    def folders(self) -> Sequence[str]:
        return self.around("folders", "", self.inner.folders)

    def delete(self, key: str) -> None:
        self.around("delete", key, lambda: self.inner.delete(key))

    def unfinished(self) -> Sequence[Entry]:
        return self.inner.unfinished()

    def discard(self, key: str) -> None:
        self.inner.discard(key)

    def now(self) -> float:
        return self.around("now", "", self.inner.now)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Fault:
    """The `nth` call (from 1) of those named in `calls`, on keys that end in `key`, goes wrong; so do `times` - 1 more.

    `when`: "before" the call takes effect; "after" it: the answer is lost (StoreUnavailable, whatever `errno` says);
    "kill": this process is killed in place of the call; "killed": right after it.
    """

    nth: int
    errno: int = _errno.EIO
    calls: frozenset[str] = CALLS
    when: Literal["before", "after", "kill", "killed"] = "before"
    times: int = 1
    key: str = ""


class FaultyStore(Wrapper):
    """Fails by plan. `fired` holds what went wrong, as (call, key)."""

    def __init__(self, store: Store, *plan: Fault) -> None:
        super().__init__(store)
        self.fired: list[tuple[str, str]] = []
        self._seen = [0] * len(plan)
        self._plan = plan
        self._lock = threading.Lock()

    def around(self, call: str, key: str, make: Callable[[], T]) -> T:
        fault = self._due(call, key)
        if fault is None:
            return make()
        self.fired.append((call, key))
        if fault.when == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.when == "before":
            raise from_os_error(OSError(fault.errno, os.strerror(fault.errno)), call, key)
        make()
        if fault.when == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StoreUnavailable(f"{call} {key!r}: the answer was lost", errno=fault.errno, filename=key)

    def _due(self, call: str, key: str) -> Fault | None:
        with self._lock:
            for at, fault in enumerate(self._plan):
                if call in fault.calls and key.endswith(fault.key):
                    self._seen[at] += 1
                    if fault.nth <= self._seen[at] < fault.nth + fault.times:
                        return fault
        return None


class Call(NamedTuple):
    """One call. `nbytes`: of a put or a read. `ok`: whether it came back without an error."""

    name: str
    key: str
    nbytes: int
    ok: bool


class CountingStore(Wrapper):
    """Keeps a log of the calls, in the order of their ends."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def count(self, *names: str) -> int:
        """How many calls had one of these names."""
        return sum(call.name in names for call in self.calls)

    def keys(self, *names: str) -> list[str]:
        """The keys of the calls with one of these names, in order."""
        return [call.key for call in self.calls if call.name in names]

    def put(self, key: str, body: Body, **conditions: Any) -> None:
        self._log("put", key, body.nbytes, lambda: self.inner.put(key, body, **conditions))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self._log("read_into", key, nbytes, lambda: self.inner.read_into(key, offset, buffers))

    def around(self, call: str, key: str, make: Callable[[], T]) -> T:
        return self._log(call, key, 0, make)

    def _log(self, name: str, key: str, nbytes: int, make: Callable[[], T]) -> T:
        ok = False
        try:
            made = make()
            ok = True
            return made
        finally:
            with self._lock:
                self.calls.append(Call(name, key, nbytes, ok))


class FlippingStore(Wrapper):
    """Flips one bit of what is put under `key`, after it has left the body and its hashing: damage on the way."""

    def __init__(self, store: Store, key: str, bit: int) -> None:
        super().__init__(store)
        self._key = key
        self._bit = bit

    def put(self, key: str, body: Body, **conditions: Any) -> None:
        self.inner.put(key, _Flipped(body, self._bit) if key == self._key else body, **conditions)


class _Flipped:
    def __init__(self, body: Body, bit: int) -> None:
        self._body = body
        self._bit = bit
        self.nbytes = body.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        at = self._bit // 8
        for buffer in self._body:
            if 0 <= at < buffer.nbytes:
                changed = bytearray(buffer)
                changed[at] ^= 1 << self._bit % 8
                yield memoryview(changed)
            else:
                yield buffer
            at -= buffer.nbytes


@dataclass(eq=False)
class Gate:
    """Where calls wait. `reached`: somebody stands there. `open()` lets them, and all that come later, go on."""

    call: str
    key: str
    when: Literal["before", "after"]
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        self.opened.set()

    def wait_until_reached(self) -> None:
        """Until a call stands at the gate; TimeoutError after a minute."""
        if not self.reached.wait(PATIENCE_S):
            raise TimeoutError(f"nobody came to {self.call} {self.key!r}")

    def pass_through(self) -> None:
        """Stand at the gate until it is opened; TimeoutError after a minute."""
        self.reached.set()
        if not self.opened.wait(PATIENCE_S):
            raise TimeoutError(f"nobody opened the gate at {self.call} {self.key!r}")


class SlowStore(Wrapper):
    """Makes calls wait as long as the test wants, without sleeping; `gate` says which."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._gates: list[Gate] = []

    def gate(self, call: str, key: str = "", when: Literal["before", "after"] = "before") -> Gate:
        """A closed gate for the calls of that name on keys that end so."""
        gate = Gate(call, key, when)
        self._gates.append(gate)
        return gate

    def around(self, call: str, key: str, make: Callable[[], T]) -> T:
        mine = [gate for gate in self._gates if gate.call == call and key.endswith(gate.key)]
        for gate in mine:
            if gate.when == "before":
                gate.pass_through()
        made = make()
        for gate in mine:
            if gate.when == "after":
                gate.pass_through()
        return made
