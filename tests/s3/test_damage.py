"""Objects that are not what was saved: every file of a checkpoint, changed in every way, is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import shardstore
from shardstore.errors import CheckpointNotFound, Damaged
from shardstore.events import to_log
from shardstore.index import HF_NAME, NAME
from shardstore.storage import Bytes
from shardstore.storage.s3 import S3Store
from tests.crash.states import BIG, state
from tests.kit.s3 import Place

NUMBER = BIG + 2


@pytest.fixture
def saved(place: Place) -> Place:
    """A place with a checkpoint of several blocks and files."""
    shardstore.save(state(NUMBER), place.url, step=NUMBER, hash="sha256", storage_options=place.options)
    return place


def _key(place: Place, kind: str) -> str:
    (found,) = [key for key in place.names() if kind in key]
    return found


def _flip(byte: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[min(int(byte * len(data)), len(data) - 1)] ^= 1
        return bytes(changed)

    return flip


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "first bit": _flip(0), "a bit": _flip(0.3), "a bit in the middle": _flip(0.5), "last bit": _flip(1),
    "cut": lambda data: data[:-1], "half": lambda data: data[: len(data) // 2], "empty": lambda data: b"",
    "longer": lambda data: data + b"\0", "turned": lambda data: data[::-1], "zeros": lambda data: bytes(len(data)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", ["model-", "state/0", "state/meta", NAME])
def test_a_changed_object(saved: Place, kind: str, change: Callable[[bytes], bytes]):
    """`load`, `load(into=)` and `verify` all find it, and name the file; no other state comes out."""
    key = _key(saved, kind)
    saved.store.put(key, Bytes(change(saved.read(key))))
    for into in (None, state(NUMBER)):
        with pytest.raises(Damaged) as caught:
            shardstore.load(saved.url, into=into, storage_options=saved.options)
        assert caught.value.file == key
    report = shardstore.verify(saved.url, storage_options=saved.options)
    assert key in {problem.file for found in report.checkpoints for problem in found.problems}
    assert not report.ok


@pytest.mark.parametrize("kind", ["model-", "state/0", "state/meta"])
def test_a_missing_object(saved: Place, kind: str):
    """Named; never taken for a checkpoint without it."""
    key = _key(saved, kind)
    saved.store.delete(key)
    with pytest.raises(Damaged, match="missing") as caught:
        shardstore.load(saved.url, storage_options=saved.options)
    assert caught.value.file == key
    assert not shardstore.verify(saved.url, storage_options=saved.options).ok


def test_a_missing_index(saved: Place):
    """Without its index there is no checkpoint, and all that is left are files without an owner."""
    saved.store.delete(NAME)
    with pytest.raises(CheckpointNotFound):
        shardstore.load(saved.url, storage_options=saved.options)
    assert not shardstore.verify(saved.url, storage_options=saved.options).ok


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_derived_index(saved: Place, change: Callable[[bytes], bytes]):
    """What other tools read is no part of the checkpoint, which loads."""
    saved.store.put(HF_NAME, Bytes(change(saved.read(HF_NAME))))
    assert shardstore.load(saved.url, storage_options=saved.options)["step"] == NUMBER


def test_shards_of_two_checkpoints_mixed_up(saved: Place):
    """A shard of the same name and size from another save is not taken for this one's."""
    url = f"{saved.url}-other"
    shardstore.save(state(NUMBER + 3), url, hash="sha256", storage_options=saved.options)
    other = Place(url, S3Store(url, saved.options, to_log), saved.options)
    key, data = _key(saved, "model-"), other.read(_key(other, "model-"))
    assert len(data) == len(saved.read(key))
    saved.store.put(key, Bytes(data))
    with pytest.raises(Damaged) as caught:
        shardstore.load(saved.url, storage_options=saved.options)
    assert caught.value.file == key
