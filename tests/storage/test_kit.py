"""The tools of `tests/kit` do what they say; else the tests that use them prove nothing."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardstore.errors import KeyMissing, StoreError, StoreUnavailable
from shardstore.storage import Bytes, MemoryStore, memory
from tests.kit.contract import REPOSITORY, read
from tests.kit.faults import CHANGING, Call, CountingStore, Fault, FaultyStore, FlippingStore, SlowStore


@pytest.fixture
def base() -> MemoryStore:
    """An empty store."""
    memory.reset()
    return MemoryStore("memory://a")


def test_faulty_store_fails_the_nth(base: MemoryStore):
    """Exactly the calls of the plan, before they take effect, with the errno."""
    store = FaultyStore(base, Fault(2, errno.ENOSPC, CHANGING, key="k"))
    store.put("k", Bytes(b"1"))
    store.put("other", Bytes(b"x"))
    store.get("k", limit=9)
    with pytest.raises(StoreError, match="no space") as caught:
        store.put("k", Bytes(b"2"))
    assert caught.value.errno == errno.ENOSPC
    assert read(base, "k") == b"1"
    store.put("k", Bytes(b"3"))
    assert read(base, "k") == b"3"
    assert store.fired == [("put", "k")]


def test_faulty_store_loses_answers(base: MemoryStore):
    """The call took effect, and nobody is told."""
    with pytest.raises(StoreUnavailable, match="lost"):
        FaultyStore(base, Fault(1, when="after")).put("k", Bytes(b"1"), if_absent=True)
    assert read(base, "k") == b"1"


@pytest.mark.parametrize("when", ["kill", "killed"])
def test_faulty_store_kills(tmp_path: Path, when: str):
    """The process ends by SIGKILL, before or after the call."""
    script = """
import sys
from shardstore.storage import Bytes, LocalStore
from tests.kit.faults import Fault, FaultyStore
FaultyStore(LocalStore(sys.argv[1]), Fault(1, when=sys.argv[2])).put("k", Bytes(b"1"))
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path, when], cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "k").exists() == (when == "killed")


@pytest.mark.parametrize("bit", [0, 7, 8, 23, 24, 47])
def test_flipping_store_flips_one_bit(base: MemoryStore, bit: int):
    """Exactly that bit differs in the store, in no other file, and the caller's memory is not touched."""
    data = [b"\0\0\0", b"", b"\0\0\0"]
    store = FlippingStore(base, "k", bit)
    store.put("k", Bytes(*data))
    store.put("other", Bytes(*data))
    assert int.from_bytes(read(base, "k"), "little") == 1 << bit
    assert read(base, "other") == bytes(6)
    assert data == [b"\0\0\0", b"", b"\0\0\0"]


def test_counting_store_logs(base: MemoryStore):
    """Names, keys, bytes and success, in order."""
    store = CountingStore(base)
    store.put("k", Bytes(b"abc"))
    store.read_into("k", 1, [memoryview(bytearray(2))])
    with pytest.raises(KeyMissing):
        store.get("no", limit=1)
    assert store.calls == [Call("put", "k", 3, True), Call("read_into", "k", 2, True), Call("get", "no", 0, False)]
    assert store.count("put", "get") == 2
    assert store.keys("get") == ["no"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_slow_store_waits_at_its_gates(base: MemoryStore, when):
    """A call stands at the gate until it is opened; others pass."""
    store = SlowStore(base)
    gate = store.gate("put", "slow", when)
    thread = threading.Thread(target=store.put, args=("slow", Bytes(b"1")))
    thread.start()
    gate.wait_until_reached()
    store.put("fast", Bytes(b"2"))
    assert [e.key for e in base.list()] == (["fast", "slow"] if when == "after" else ["fast"])
    gate.open()
    thread.join()
    assert read(base, "slow") == b"1"
