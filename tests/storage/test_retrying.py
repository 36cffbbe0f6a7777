"""Retries: which calls, how often, and what a listener hears."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import pytest

from shardstore.errors import InvalidArgument, KeyMissing, StoreError, StoreUnavailable
from shardstore.events import Event, Retried
from shardstore.storage import Bytes, MemoryStore, RetryingStore, Store, memory, unwrap
from tests.kit.contract import Pieces, read
from tests.kit.faults import CountingStore, Fault, FaultyStore

HICCUP = errno.EIO
CALLS: dict[str, Callable[[Store], Any]] = {
    "put": lambda s: s.put("new", Bytes(b"x")),
    "get": lambda s: s.get("k", limit=9),
    "read_into": lambda s: s.read_into("k", 0, [memoryview(bytearray(1))]),
    "stat": lambda s: s.stat("k"),
    "list": lambda s: list(s.list()),
    "delete": lambda s: s.delete("k"),
    "now": lambda s: s.now(),
}


@pytest.fixture
def base() -> MemoryStore:
    """A store with one file, `k`."""
    memory.reset()
    made = MemoryStore("memory://a")
    made.put("k", Bytes(b"abc"))
    return made


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_call_is_made_again(base: MemoryStore, call: str, when: Any):
    """Hiccups before and after a call took effect are survived; the listener hears of each."""
    heard: list[Event] = []
    faulty = FaultyStore(base, Fault(1, HICCUP, frozenset({call}), when, times=2))
    CALLS[call](RetryingStore(faulty, wait_s=0, listener=heard.append))
    assert [name for name, _ in faulty.fired] == [call, call]
    assert [(e.call, e.attempt, e.wait) for e in heard if isinstance(e, Retried)] == [(call, 2, 0.0), (call, 3, 0.0)]
    assert all(isinstance(e, Retried) and call in e.error for e in heard)


@pytest.mark.parametrize("call", CALLS)
def test_tries_are_bounded(base: MemoryStore, call: str):
    """After the last try the error itself comes out."""
    faulty = FaultyStore(base, Fault(1, HICCUP, frozenset({call}), times=99))
    with pytest.raises(StoreUnavailable, match="I/O error") as caught:
        CALLS[call](RetryingStore(faulty, attempts=3, wait_s=0, listener=lambda _: None))
    assert caught.value.errno == HICCUP
    assert len(faulty.fired) == 3


def test_a_time_limit_ends_the_tries(base: MemoryStore):
    """No try begins after the time is over."""
    faulty = FaultyStore(base, Fault(1, times=99))
    with pytest.raises(StoreUnavailable):
        RetryingStore(faulty, attempts=64, timeout_s=0.05, wait_s=0.01, listener=lambda _: None).get("k", limit=9)
    assert 1 <= len(faulty.fired) < 64


@pytest.mark.parametrize("conditions", [{"if_absent": True}, {"if_match": "0" * 32}])
def test_a_conditional_put_is_made_once(base: MemoryStore, conditions: dict):
    """Its answer may have been lost after it took effect: only the caller can find out by reading."""
    heard: list[Event] = []
    faulty = FaultyStore(base, Fault(1))
    with pytest.raises(StoreUnavailable):
        RetryingStore(faulty, wait_s=0, listener=heard.append).put("new", Bytes(b"x"), **conditions)
    assert len(faulty.fired) == 1
    assert heard == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_lasting_errors_are_not_tried_again(base: MemoryStore, code: int):
    """A full disk, a refusal and a missing key stay what they are."""
    faulty = FaultyStore(base, Fault(1, code))
    with pytest.raises(StoreError) as caught:
        RetryingStore(faulty, listener=lambda _: None).put("k", Bytes(b"x"))
    assert isinstance(caught.value, KeyMissing) == (code == errno.ENOENT)
    assert len(faulty.fired) == 1


def test_a_body_is_iterated_for_every_try(base: MemoryStore):
    """Each try writes the whole body from its beginning."""
    body = Pieces(b"ab", b"cd")
    RetryingStore(FaultyStore(base, Fault(1, when="after")), wait_s=0, listener=lambda _: None).put("new", body)
    assert body.iterations == 2
    assert read(base, "new") == b"abcd"


def test_an_error_of_the_listener_ends_the_call(base: MemoryStore):
    """A listener that raises stops the work, as with all events."""
    counting = CountingStore(FaultyStore(base, Fault(1, times=9)))

    def angry(event: Event) -> None:
        raise ZeroDivisionError(event)

    with pytest.raises(ZeroDivisionError):
        RetryingStore(counting, wait_s=0, listener=angry).get("k", limit=9)
    assert counting.count("get") == 1


def test_without_a_listener_it_is_logged(base: MemoryStore, caplog: pytest.LogCaptureFixture):
    """A retry is a warning in the log."""
    with caplog.at_level(logging.WARNING, "shardstore"):
        RetryingStore(FaultyStore(base, Fault(1)), wait_s=0).get("k", limit=9)
    assert any("get k failed" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "settings",
    [{"attempts": n} for n in (65, 0, -1, 10**9, True, 2.0, "5", None)]
    + [{"timeout_s": n} for n in (0, -1, 1e9, float("inf"), float("nan"), True, "5", None)]
    + [{"wait_s": n} for n in (-1, float("inf"), float("nan"), None)],
    ids=str,
)
def test_absurd_settings_are_refused(base: MemoryStore, settings: dict):
    """At construction, not at the first hiccup."""
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
        RetryingStore(base, **settings)


def test_unwrap(base: MemoryStore):
    """The store at the heart."""
    assert unwrap(RetryingStore(RetryingStore(base))) is base
    assert unwrap(base) is base
