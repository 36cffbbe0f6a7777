"""Lazy tensors into memory, and tensors as what lazy ones give."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardstore.errors import Damaged
from shardstore.memory.fresh import single
from shardstore.memory.stream import Windows, owned, parts
from shardstore.specs import Lazy


def load(tensor: torch.Tensor | Lazy) -> torch.Tensor:
    """A tensor as it is, a lazy one in new memory of its own."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    made = single(tensor.spec)
    if not made.nbytes:
        return made
    room, at = owned(made), 0
    for buffer in tensor.buffers():
        if at + len(buffer) > len(room):
            raise Damaged(f"more bytes came than the {len(room)} of a tensor")
        room[at : at + len(buffer)] = buffer
        at += len(buffer)
    if at != len(room):
        raise Damaged(f"{at} bytes came of the {len(room)} of a tensor")
    return made


def slices(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of one tensor, row-major, in slices of a few MiB; a buffer keeps the tensor alive."""
    if tensor.nbytes:
        yield from map(Windows().buffer, parts(tensor))
