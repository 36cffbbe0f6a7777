"""A copy of a state's tensors in memory that is used again and again: what a background save writes from.

Page faults cost more than copying, so the arena is allocated once, on huge pages, and kept. It is left out of forked
children (DataLoader workers), which would otherwise pay for it at each fork.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
from collections.abc import Sequence

import torch

from shardstore import address
from shardstore.memory.stream import BITS, direct

_ALIGN = 64
_CHUNK = 8 * 1024 * 1024
_ADVICE = [getattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if hasattr(mmap, name)]
_HUGE = 2 * 1024 * 1024


class Arena:
    """Host memory for one staged state at a time. Grows when a larger one comes; never shrinks."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """Bytes that the arena holds."""
        return self._memory.nbytes if self._memory is not None else 0

    def stage(self, tensors: Sequence[torch.Tensor], threads: int) -> list[torch.Tensor]:
        """Copies of the tensors, row-major, of what they show (conjugation and negation resolved).

        They are valid until the next call. Copies from a GPU go into pinned memory, and have arrived on return.
        """
        self.reserve(needed(tensors), pinned=any(tensor.is_cuda for tensor in tensors))
        staged: list[torch.Tensor] = []
        moves: list[tuple[int, int, int]] = []
        offset = 0
        for tensor in tensors:
            room = self._room(tensor, offset)
            staged.append(room)
            if direct(tensor):
                moves.append((room.data_ptr(), tensor.data_ptr(), tensor.nbytes))
            elif tensor.nbytes:
                _copy_bits(room, tensor)
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        _move_all(moves, threads)
        if self._pinned:
            torch.cuda.synchronize()
        return staged

    def reserve(self, nbytes: int, *, pinned: bool = False) -> None:
        """Have room for `nbytes`, with its pages touched, so that the next `stage` only copies."""
        if nbytes <= self.nbytes and (self._pinned or not pinned):
            return
        self._memory = None  # before the new one is made: never two at once
        size = -(-max(nbytes, 1) // _HUGE) * _HUGE
        self._memory = (
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) if pinned else _unforked(size)
        )
        self._pinned = pinned

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None

    def _room(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        if self._memory is None or not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def needed(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of an arena that holds copies of the tensors."""
    return sum(-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors)


def _unforked(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in _ADVICE:
        with contextlib.suppress(OSError):  # without it, it is only slower
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _copy_bits(room: torch.Tensor, tensor: torch.Tensor) -> None:
    source = tensor.detach()
    if not (source.is_conj() or source.is_neg()):  # some dtypes can't be copied as what they are
        source, room = source.view(BITS[source.itemsize]), room.view(BITS[room.itemsize])
    room.copy_(source, non_blocking=True)


def _move_all(moves: Sequence[tuple[int, int, int]], threads: int) -> None:
    """Carry out moves (to, from, bytes) on threads of our own: torch's wait for each other after every tensor."""
    waiting = collections.deque(
        (to + at, source + at, min(_CHUNK, nbytes - at))
        for to, source, nbytes in moves
        for at in range(0, nbytes, _CHUNK)
    )

    def drain() -> None:
        with contextlib.suppress(IndexError):
            while True:
                address.move(*waiting.popleft())

    helpers = [threading.Thread(target=drain, name="shardstore-stage") for _ in range(min(threads, len(waiting)) - 1)]
    for helper in helpers:
        helper.start()
    drain()
    for helper in helpers:
        helper.join()
