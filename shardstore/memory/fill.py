"""Tensors of the caller's that are to be filled: straight where their memory allows, else through host windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardstore.memory.fresh import raw
from shardstore.memory.stream import BITS
from shardstore.specs import Box, Shape

WAVE = 32 * 1024 * 1024
"""Bytes of windows that are in use at once."""


def fillable(tensor: torch.Tensor) -> bool:
    """Whether bytes can be read straight into the tensor's memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


@dataclass(slots=True)
class Window:
    """A part of a tensor, and host memory in which it arrives row-major."""

    number: int
    box: Box
    part: torch.Tensor
    memory: torch.Tensor

    def deliver(self) -> None:
        """Copy what arrived to where it belongs; bits, never values, so nothing is cast."""
        part, dtype = self.part, self.part.dtype
        if part.itemsize in BITS and not (part.is_conj() or part.is_neg()):
            dtype = BITS[part.itemsize]  # some dtypes can't even be copied
            part = part.view(dtype)
        with torch.no_grad():
            part.copy_(self.memory.view(dtype).view(part.shape))


def windows(number: int, tensor: torch.Tensor, box: Box | None = None) -> Iterator[Window]:
    """Windows that cover a tensor of any layout or device, of at most WAVE bytes where shapes allow.

    `box`: which part of the stored tensor it is; all of it by default.
    """
    for window in _windows(number, tensor.detach(), (), ()):
        if box is not None:
            at = tuple(map(int.__add__, window.box.origin, box.origin))
            window.box = Box(at, window.box.shape)
        yield window


def _windows(number: int, part: torch.Tensor, at: Shape, above: Shape) -> Iterator[Window]:
    """`at`: the origin of `part` in the leading dimensions that were taken off, `above` their sizes (all 1)."""
    if not part.nbytes:
        return
    if part.nbytes <= WAVE or not part.dim():
        origin = (*at, *(0,) * part.dim())
        yield Window(number, Box(origin, (*above, *part.shape)), part, raw(part.nbytes))
        return
    row = part.nbytes // part.shape[0]
    rows = WAVE // row
    if not rows:
        for index in range(part.shape[0]):
            yield from _windows(number, part[index], (*at, index), (*above, 1))
        return
    for begin in range(0, part.shape[0], rows):
        block = part[begin : begin + rows]
        origin = (*at, begin, *(0,) * (part.dim() - 1))
        yield Window(number, Box(origin, (*above, *block.shape)), block, raw(block.nbytes))
