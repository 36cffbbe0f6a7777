"""A store around a store: calls that failed in a way that may pass are made again, after a wait that grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import stamina

from shardstore.errors import InvalidArgument, StoreUnavailable
from shardstore.events import Listener, Retried, to_log
from shardstore.storage.port import Blob, Body, Capabilities, Entry, Store

T = TypeVar("T")

ATTEMPTS = 5
TIMEOUT_S = 120.0
_MAX_ATTEMPTS = 64
_MAX_SECONDS = 86_400.0
_MAX_WAIT_S = 10.0


class Retries:
    """Makes a call again that raised StoreUnavailable: at most `attempts` times in all, not after `timeout_s` seconds.

    `wait_s` is the first wait, in seconds; it doubles up to 10 s, and up to as much again is added at random, so that a
    thousand ranks do not come back at once. Raises InvalidArgument for settings that can't be.
    """

    def __init__(self, attempts: int, timeout_s: float, wait_s: float, listener: Listener) -> None:
        _check_settings(attempts, timeout_s, wait_s)
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._listener = listener
        self._lock = threading.Lock()

    def again(self, call: str, key: str, make: Callable[[], T]) -> T:
        """Do something until it succeeds, fails for good, or the attempts are used up."""
        try:
            return make()  # without further ado, since there may be thousands of calls
        except StoreUnavailable as error:
            first = error
        tries = stamina.retry_context(
            on=StoreUnavailable,
            attempts=self._attempts,
            timeout=self._timeout_s,
            wait_initial=self._wait_s,
            wait_max=_MAX_WAIT_S,
            wait_jitter=self._wait_s,
        )
        for attempt in tries:
            with attempt:
                try:
                    if attempt.num == 1:
                        raise first
                    return make()
                except StoreUnavailable as error:
                    if attempt.num < self._attempts:
                        self._tell(Retried(call, key, attempt.num + 1, attempt.next_wait, str(error)))
                    raise
        raise StoreUnavailable(f"{call} {key!r} was not tried")  # pragma: no cover  at least one attempt is made

    def _tell(self, event: Retried) -> None:
        with self._lock:
            self._listener(event)


class RetryingStore:
    """Repeats what raised StoreUnavailable, as `Retries` does with these settings.

    A conditional put is made once: where its answer was lost, only reading tells what happened. Listings are read whole
    before they are given out. A body that is put again is iterated again.
    """

    def __init__(
        self,
        store: Store,
        *,
        attempts: int = ATTEMPTS,
        timeout_s: float = TIMEOUT_S,
        wait_s: float = 0.1,
        listener: Listener | None = None,
    ) -> None:
        self._retries = Retries(attempts, timeout_s, wait_s, to_log if listener is None else listener)
        self.inner = store
        self.url = store.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def prepare(self) -> None:
        self._again("prepare", "", self.inner.prepare)

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        if if_absent or if_match is not None:
            self.inner.put(key, body, if_absent=if_absent, if_match=if_match)
        else:
            self._again("put", key, lambda: self.inner.put(key, body))

    def get(self, key: str, *, limit: int) -> Blob:
        return self._again("get", key, lambda: self.inner.get(key, limit=limit))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._again("read_into", key, lambda: self.inner.read_into(key, offset, buffers))

    def map(self, key: str) -> memoryview:
        return self._again("map", key, lambda: self.inner.map(key))

    def stat(self, key: str) -> Entry:
        return self._again("stat", key, lambda: self.inner.stat(key))

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return self._again("list", prefix, lambda: tuple(self.inner.list(prefix)))

    def folders(self) -> Sequence[str]:
        return self._again("folders", "", self.inner.folders)

    def delete(self, key: str) -> None:
        self._again("delete", key, lambda: self.inner.delete(key))

    def unfinished(self) -> Sequence[Entry]:
        return self._again("unfinished", "", self.inner.unfinished)

    def discard(self, key: str) -> None:
        self._again("discard", key, lambda: self.inner.discard(key))

    def now(self) -> float:
        return self._again("now", "", self.inner.now)

    def close(self) -> None:
        self.inner.close()

    def _again(self, call: str, key: str, make: Callable[[], T]) -> T:
        return self._retries.again(call, key, make)


def unwrap(store: Store) -> Store:
    """The store at the heart of its wrappers."""
    while isinstance(store, RetryingStore):
        store = store.inner
    return store


def _check_settings(attempts: int, timeout_s: float, wait_s: float) -> None:
    if type(attempts) is not int or not 1 <= attempts <= _MAX_ATTEMPTS:
        raise InvalidArgument(f"attempts must be a whole number from 1 to {_MAX_ATTEMPTS}, not {attempts!r}")
    for name, value, least in (("timeout_s", timeout_s, 0.001), ("wait_s", wait_s, 0.0)):
        if type(value) not in {int, float} or not least <= value <= _MAX_SECONDS:
            raise InvalidArgument(f"{name} must be from {least} to {_MAX_SECONDS:.0f} seconds, not {value!r}")
