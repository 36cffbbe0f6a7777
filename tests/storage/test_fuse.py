"""The local store on FUSE: on one mount the whole contract, on two mounts of one store the exclusive puts."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardstore.errors import KeyMissing, StoreError
from shardstore.storage import Bytes, LocalStore
from tests.kit.contract import MakeStore, SharedStoreContract, race
from tests.kit.fuse import PATIENCE_S, two_mounts

pytestmark = [pytest.mark.mounts, pytest.mark.slow]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two mount points of one store."""
    with two_mounts(tmp_path_factory.mktemp("fuse")) as points:
        yield points


class TestFuse(SharedStoreContract):
    lists_what_is_being_replaced = False

    @pytest.fixture
    def make_store(self, mounts: tuple[Path, Path]) -> MakeStore:
        root = mounts[0] / f"root{next(_numbers)}"
        return lambda: LocalStore(root, claim_age=0.0, claim_wait=0.1)  # or names would be free again only after 10 s


def test_what_fuse_can_not_promise(mounts: tuple[Path, Path]):
    """Durability is not promised, maps are refused, both with the reason."""
    store = LocalStore(mounts[0] / "promises")
    store.put("k", Bytes(b"x"))
    assert (store.capabilities.exclusive, store.capabilities.durable, store.capabilities.mappable) == (
        True,
        False,
        False,
    )
    with pytest.raises(StoreError, match="fuse"):
        store.map("k")


def test_L11_two_mounts_of_one_store(mounts: tuple[Path, Path]):
    """Creators, and then replacers, on two mounts: at most one wins, and both mounts show its content in the end."""
    won = 0
    for turn in range(10):
        match = ""
        for step in ("create", "replace"):
            roots = [str(point / f"race{turn}") for point in mounts for _ in range(2)]
            marks = [f"{step}{n}" for n in range(len(roots))]
            outcomes = race(roots, ["index.json"] * 4, marks, match)
            winners = [mark for mark, outcome in outcomes.items() if outcome == "won"]
            assert len(winners) <= 1, outcomes
            if not winners:
                break
            won += 1
            match = settled(roots, winners[0].encode() * 50_000)
    assert won >= 15


def settled(roots: list[str], content: bytes) -> str:
    """Wait until the content shows in all places; its version."""
    end = time.monotonic() + PATIENCE_S
    version = ""
    for root in roots:
        while True:
            with contextlib.suppress(KeyMissing):
                blob = LocalStore(root).get("index.json", limit=len(content) + 100)
                version = blob.version
                if blob.data == content:
                    break
            assert time.monotonic() < end, f"{root} never showed the winner's content"
            time.sleep(0.05)
    return version
