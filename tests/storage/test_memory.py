"""The memory store, where it is more than the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardstore.errors import InvalidArgument, KeyMissing
from shardstore.storage import Bytes, MemoryStore, memory
from tests.kit.contract import keys, read


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    memory.reset()
    yield
    memory.reset()


def test_nested_roots_see_each_other():
    """Stores of one process are windows onto one tree; names that only begin alike are strangers."""
    run, step, other = (MemoryStore(f"memory://{path}") for path in ("run", "run/step-1/", "run2"))
    step.put("index", Bytes(b"x"))
    run.put("step-1/meta", Bytes(b"y"))
    other.put("z", Bytes(b"z"))
    assert keys(run) == ["step-1/index", "step-1/meta"]
    assert keys(step) == ["index", "meta"]
    assert read(MemoryStore("memory://"), "run2/z") == b"z"
    run.delete("step-1/index")
    assert keys(step) == ["meta"]


def test_reset_forgets():
    """Afterwards nothing is there."""
    store = MemoryStore("memory://a")
    store.put("k", Bytes(b"x"))
    memory.reset()
    with pytest.raises(KeyMissing, match="memory://a/k"):
        store.get("k", limit=9)


@pytest.mark.parametrize("url", ["memory:/a", "mem://a", "a", "memory://../a", "memory://a//b", "memory://a/./b"])
def test_bad_urls(url: str):
    """What is no place in memory is refused."""
    with pytest.raises(InvalidArgument):
        MemoryStore(url)


def test_what_was_put_is_a_copy():
    """Later changes of the caller's memory don't show."""
    data = bytearray(b"abc")
    store = MemoryStore("memory://a")
    store.put("k", Bytes(data))
    data[:] = b"xyz"
    assert read(store, "k") == b"abc"
