"""Uploads that a dead save never completed: invisible, paid for, and found by `prune` alone."""

from __future__ import annotations

import pytest

from shardstore.check import plan_leftovers, remove
from shardstore.storage import Bytes
from tests.kit.s3 import Place

pytestmark = pytest.mark.s3

ATTEMPT = "0123456789abcdef"
SHARD = f"model-00001-of-00001-{ATTEMPT}.safetensors"
MARK = f"attempt-{ATTEMPT}.json"


def begin(place: Place, key: str) -> None:
    """Begin an upload, as a process does that dies then."""
    store = place.store
    store._client.call("create_multipart_upload", Key=store._name(key))


def test_O15_uploads_of_dead_saves_are_aborted(place: Place):
    """An old upload of a save goes, a young one and one of another tool stay, and so does all that is visible."""
    store = place.store
    begin(place, SHARD)
    begin(place, "somebody-else.bin")
    store.put("note.txt", Bytes(b"mine"))
    assert {entry.key for entry in store.unfinished()} == {SHARD, "somebody-else.bin"}
    assert [entry.key for entry in store.list()] == ["note.txt"]
    assert [left for left in plan_leftovers(store) if left.removable] == []  # it is a moment old
    (old,) = [left for left in plan_leftovers(store, old=-5.0) if left.removable]
    assert old.keys == (SHARD,)
    assert remove(old, store, old=-5.0) == []
    assert {entry.key for entry in store.unfinished()} == {"somebody-else.bin"}
    assert [entry.key for entry in store.list()] == ["note.txt"]


def test_an_upload_of_a_living_save_stays(place: Place):
    """While its mark is fresh, nothing of a save is touched."""
    store = place.store
    begin(place, SHARD)
    mark = f'{{"schema":"shardstore-mark/1","attempt":"{ATTEMPT}","state":"writing","stripe":[0,1]}}'
    store.put(MARK, Bytes(mark.encode()))
    for left in plan_leftovers(store, old=3600.0):
        assert not left.removable
    assert {entry.key for entry in store.unfinished()} == {SHARD}
