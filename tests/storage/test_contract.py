"""Every store of the package, and the wrappers, against the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardstore.storage import LocalStore, MemoryStore, RetryingStore, memory, open_store
from tests.kit.contract import MakeStore, SharedStoreContract, StoreContract
from tests.kit.faults import CALLS, CountingStore, Fault, FaultyStore, FlippingStore, SlowStore


class TestLocal(SharedStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return lambda: LocalStore(tmp_path / "run [1]*?.d #2")


class TestMemory(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        memory.reset()
        return lambda: MemoryStore("memory://here/root")


class TestOpened(SharedStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return lambda: open_store(f"file://{tmp_path}/root")


class TestRetryingOnTrouble(StoreContract):
    """A store that fails twice at every unconditional call keeps the contract when it is wrapped."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        memory.reset()

        def make() -> RetryingStore:
            faults = [Fault(1, calls=frozenset({call}), times=2) for call in CALLS - {"put"}]
            return RetryingStore(FaultyStore(MemoryStore("memory://here/root"), *faults), wait_s=0, listener=_silent)

        return make


class TestWrappers(StoreContract):
    """The wrappers of the kit are stores."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        memory.reset()
        return lambda: SlowStore(
            FaultyStore(FlippingStore(CountingStore(MemoryStore("memory://here/root")), "no such key", 0))
        )


def _silent(event: object) -> None:
    """A listener for tests that want no log."""
