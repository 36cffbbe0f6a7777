"""Tensors as a stream of buffers: what a shard's data section is made of.

A contiguous CPU tensor is given as its own memory, without a copy. Small tensors are gathered into buffers of 1 MiB.
All others (strided, conjugated, on a device) are copied in windows of a few MiB, through pinned memory from a GPU.
A lazy tensor gives its own buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shardstore import address
from shardstore.memory.fresh import raw
from shardstore.specs import Lazy

SMALL = 64 * 1024
GATHER = 1024 * 1024
WINDOW = 4 * 1024 * 1024

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes of an element: a dtype in which any tensor of that width can be moved bit by bit."""


def stream(tensors: Iterable[torch.Tensor | Lazy]) -> Iterator[memoryview]:
    """The bytes of the tensors, row-major, one tensor after the other.

    The caller keeps the tensors alive and unchanged while it uses the buffers.
    """
    gathered, windows = _Gathered(), Windows()
    for tensor in tensors:
        nbytes = tensor.nbytes
        if isinstance(tensor, Lazy):
            if gathered.used:
                yield gathered.take()
            yield from tensor.buffers()
            continue
        if nbytes < SMALL:
            if nbytes:
                if gathered.room < nbytes:
                    yield gathered.take()
                gathered.add(tensor if direct(tensor) else plain(tensor), nbytes)
            continue
        if gathered.used:
            yield gathered.take()
        if direct(tensor):
            yield address.view(tensor.data_ptr(), nbytes)
        else:
            yield from map(windows.buffer, parts(tensor))
    if gathered.used:
        yield gathered.take()


class _Gathered:
    """A buffer that fills up with small tensors. A taken one is never written again."""

    def __init__(self) -> None:
        self.used = 0
        self.room = 0

    def add(self, tensor: torch.Tensor, nbytes: int) -> None:
        if not self.room:
            self._buffer = np.empty(GATHER, np.uint8).data
            self._base = address.of(self._buffer)
            self.used, self.room = 0, GATHER
        address.move(self._base + self.used, tensor.data_ptr(), nbytes)
        self.used += nbytes
        self.room -= nbytes

    def take(self) -> memoryview:
        taken = self._buffer[: self.used] if self.used else memoryview(b"")
        self.used = self.room = 0
        return taken


def direct(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its value, row-major, on the host."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a contiguous tensor on the host; a copy where it was not one."""
    if direct(tensor):
        return tensor.detach()
    tensor = _bits(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a dtype that can be copied: some dtypes can't, but then nothing is conjugated either."""
    tensor = tensor.detach()
    return tensor if tensor.is_conj() or tensor.is_neg() else tensor.view(BITS[tensor.itemsize])


def parts(tensor: torch.Tensor, most: int = WINDOW) -> Iterator[torch.Tensor]:
    """Views of a tensor's parts, in row-major order, of at most `most` bytes."""
    if tensor.nbytes <= most or not tensor.dim():
        yield tensor
    elif tensor.shape[0] == 1:
        yield from parts(tensor[0], most)
    else:
        row = tensor.nbytes // tensor.shape[0]
        for part in tensor.split(max(1, most // row)):
            yield from parts(part, most)


class Windows:
    """Host memory through which parts of tensors pass; a window is used again once nobody holds a buffer over it.

    New memory for each would cost page faults, and memory from malloc leaves holes that add up.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, weakref.ref[Any]]] = []

    def buffer(self, part: torch.Tensor) -> memoryview:
        """The bytes of a part, row-major."""
        if direct(part):
            return owned(part)
        part = _bits(part.detach())
        room, buffer = self._lend(part.nbytes, pinned=part.is_cuda)
        room.view(part.dtype).view(part.shape).copy_(part)
        return buffer

    def empty(self, nbytes: int) -> memoryview:
        """A writable buffer of at most WINDOW bytes, whatever is in it."""
        return self._lend(nbytes, pinned=False)[1]

    def _lend(self, nbytes: int, *, pinned: bool) -> tuple[torch.Tensor, memoryview]:
        window = self._free(pinned=pinned)
        room = window[:nbytes]
        array = room.numpy()  # what every buffer over it keeps alive
        self._lent.append((window, weakref.ref(array)))
        return room, array.data

    def _free(self, *, pinned: bool) -> torch.Tensor:
        for at, (window, holder) in enumerate(self._lent):
            if holder() is None and window.is_pinned() == pinned:
                del self._lent[at]
                return window
        return torch.empty(WINDOW, dtype=torch.uint8, device="cpu", pin_memory=True) if pinned else raw(WINDOW)


def owned(tensor: torch.Tensor) -> memoryview:
    """A buffer over a contiguous host tensor that keeps it alive."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
