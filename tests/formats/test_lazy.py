"""Lazy tensors as leaves of a state that is saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardstore
from shardstore.errors import Damaged, ShardstoreError, StoreError
from shardstore.formats.casting import Cast
from shardstore.formats.store import boxes
from shardstore.memory import load, slices
from shardstore.specs import Lazy, TensorSpec
from tests.kit.faults import Fault, FaultyStore
from tests.kit.inject import injected
from tests.kit.same import assert_same, ties


class Counted(Lazy):
    """Gives the bytes of a tensor, in pieces, and counts how often; `extra` bytes too many or too few."""

    def __init__(self, tensor: torch.Tensor, piece: int = 100, extra: int = 0) -> None:
        super().__init__(TensorSpec(str(tensor.dtype)[6:], tuple(tensor.shape)))
        self._data = bytearray(b"".join(slices(tensor)) + bytes(max(0, extra)))
        del self._data[len(self._data) + min(0, extra) :]
        self.passes, self._piece, self._lock = 0, piece, threading.Lock()

    def buffers(self) -> Iterator[memoryview]:
        with self._lock:
            self.passes += 1
        view = memoryview(self._data)
        for at in range(0, len(view), self._piece):
            yield view[at : at + self._piece]


@pytest.mark.parametrize("later", [False, True])
def test_lazy_leaves_are_saved_like_tensors(shm_path: Path, later: bool) -> None:
    """Among tensors, tied to themselves, empty, and in lists; each is streamed once; also by a background save."""
    one, two = torch.randn(7, 9), torch.arange(50_000)
    lazy, long = Counted(one), Counted(two, 4096)
    state = {
        "model": {"a": torch.ones(3), "b": lazy, "same": lazy, "e": Counted(torch.empty(0, 2)), "s": torch.ones(2)},
        "more": [long, (torch.tensor(1), 5)],
    }
    if later:
        pending = shardstore.save_async(state, str(shm_path / "c"))
        assert pending is not None
        pending.result()
    else:
        shardstore.save(state, str(shm_path / "c"))
    made = shardstore.load(str(shm_path / "c"))
    model = {"a": torch.ones(3), "b": one, "same": one, "e": torch.empty(0, 2), "s": torch.ones(2)}
    assert_same(made, {"model": model, "more": [two, (torch.tensor(1), 5)]})
    assert ties(made) == {frozenset({("model", "b"), ("model", "same")})}
    assert (lazy.passes, long.passes) == (1, 1)


def test_a_flat_state_of_lazy_tensors(shm_path: Path) -> None:
    """A dict of nothing but tensors, lazy or not, is the section model."""
    shardstore.save({"w": Counted(torch.ones(3)), "v": torch.ones(2)}, str(shm_path / "c"))
    with shardstore.open(str(shm_path / "c")) as ckpt:
        assert list(ckpt) == ["model/w", "model/v"]


def test_a_second_try_streams_anew(shm_path: Path) -> None:
    """Where a store fails in a way that may pass, the bytes come again from the start."""
    lazy = Counted(torch.randn(5000))
    fault = Fault(1, calls=frozenset({"put"}), key=".safetensors", when="after")
    with injected(lambda store: FaultyStore(store, fault)):
        shardstore.save({"model": {"w": lazy}, "x": 1}, str(shm_path / "c"))
    assert lazy.passes == 2
    assert torch.equal(shardstore.load(str(shm_path / "c"))["model"]["w"], load(lazy))


@pytest.mark.parametrize("extra", [-1, 1, -400, 400])
def test_bytes_too_many_or_too_few(shm_path: Path, extra: int) -> None:
    """A lazy tensor that gives other than its bytes ends a save and a load, and leaves no checkpoint."""
    lazy = Counted(torch.randn(100), extra=extra)
    with pytest.raises(Damaged):
        load(lazy)
    with pytest.raises((StoreError, ShardstoreError)):
        shardstore.save({"model": {"w": lazy}, "x": 1}, str(shm_path / "c"))
    with pytest.raises(ShardstoreError):
        shardstore.load(str(shm_path / "c"))


def test_casting_goes_slice_by_slice() -> None:
    """A cast lazy tensor has the values of a cast tensor, whatever the slices."""
    tensor = torch.randn(1000)
    made = Cast(Counted(tensor, 64), "bfloat16")
    assert made.spec == ("bfloat16", (1000,))
    assert torch.equal(load(made), tensor.bfloat16())


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (1, 1, 9), (2, 0, 3), (4, 3, 2), (1, 6, 2)])
@pytest.mark.parametrize("most", [1, 4, 9, 24, 10**6])
def test_boxes_cover_a_tensor_in_order(shape: tuple[int, ...], most: int) -> None:
    """The parts of a stored tensor come row-major, cover it exactly, and are as small as the shape allows."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    seen: list[float] = []
    for box in boxes(TensorSpec("float32", shape), most):
        part = tensor[tuple(slice(at, at + n) for at, n in zip(box.origin, box.shape, strict=True))]
        assert part.nbytes <= max(most, 4)
        seen += part.reshape(-1).tolist()
    assert seen == tensor.reshape(-1).tolist()
