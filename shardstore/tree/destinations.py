"""Which tensors can be filled in place, and whether two of them get in each other's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardstore.specs import Box, TensorSpec
from shardstore.tree.dtensors import is_dtensor, local_of
from shardstore.tree.tensors import NAMES, PLAIN, class_name


class Fill(NamedTuple):
    """A tensor of the target, and the number of the stored one that it is filled with, or the part `box` of that."""

    number: int
    tensor: torch.Tensor
    box: Box | None = None


def unfit(tensor: torch.Tensor) -> str:  # noqa: PLR0911 - a list of reasons
    """Why a tensor can't be filled in place, and the remedy; empty if it can."""
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return "it isn't initialised yet; run one forward pass first"
    if tensor.is_meta:
        return "it lies on the meta device and has no memory; call module.to_empty(device=...) first"
    if is_dtensor(tensor):
        return unfit(local_of(tensor))
    if type(tensor) not in PLAIN and type(tensor.detach()) is not torch.Tensor:
        return f"it is a {class_name(tensor)}; load it without into, and convert it"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "it is no plain strided tensor; load it without into"
    if not tensor.is_contiguous() and _laps(tensor):
        return "it is expanded or overlaps itself, so several of its elements are one; clone() it first"
    if tensor.numel() and not tensor.data_ptr():
        return "its memory has been freed; materialise it first"
    return ""


def _laps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: each stride must step over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def spec_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a strided or sparse tensor, as in a TensorSpec."""
    return NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)


def fits(tensor: object, spec: TensorSpec) -> bool:
    """Whether a tensor can be filled with what `spec` says, without a word about why not."""
    return (
        isinstance(tensor, torch.Tensor)
        and not nn.parameter.is_lazy(tensor)
        and not unfit(tensor)
        and spec_of(tensor) == (spec.dtype, tuple(spec.shape))
    )


def clashes(fills: Sequence[Fill]) -> Iterator[tuple[int, int]]:
    """Pairs of numbers, of different tensors, that would be written to the same memory."""
    tensors = [fill.tensor for fill in fills]
    starts = [tensor.data_ptr() for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    last, end = -1, 0
    for place in sorted(range(len(fills)), key=starts.__getitem__):
        start = starts[place]
        if start < end and fills[place][0] != fills[last][0] and _overlap(tensors[last], tensors[place]):
            yield fills[last][0], fills[place][0]
        if start + sizes[place] >= end:
            last, end = place, start + sizes[place]


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors with meeting addresses share an element. Of strided ones, only a common start is told."""
    if first.device != second.device or not first.numel() or not second.numel():
        return False
    return (first.is_contiguous() and second.is_contiguous()) or first.data_ptr() == second.data_ptr()
