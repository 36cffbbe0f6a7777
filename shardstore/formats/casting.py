"""Another dtype, only where that was asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from shardstore.errors import InvalidArgument, brief
from shardstore.formats.plain import Tensor, bytes_of, spec_of
from shardstore.memory import owned, torch_dtype
from shardstore.specs import DTYPES as STORED
from shardstore.specs import Lazy, TensorSpec

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


class Cast(Lazy):
    """A tensor in another dtype, converted slice by slice."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        spec = spec_of(tensor)
        super().__init__(TensorSpec(dtype, spec.shape))
        self._tensor, self._from = tensor, spec.dtype

    def buffers(self) -> Iterator[memoryview]:
        before, after = torch_dtype(self._from), torch_dtype(self.spec.dtype)
        for buffer in bytes_of(self._tensor):
            yield owned(torch.frombuffer(buffer, dtype=before).to(after))


def check_dtype(dtype: Any) -> str | None:
    """A dtype by name or as torch's. Raises InvalidArgument for what is none to convert to."""
    name = str(dtype).removeprefix("torch.") if dtype is not None else None
    if name is not None and name not in DTYPES:
        raise InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}, not {brief(dtype)}")
    return name


def cast(state: Any, dtype: str) -> Any:
    """Plain data with its floating-point tensors in another dtype, but for single numbers, such as Adam's steps.

    Packed ones, of which torch converts none, stay as they are.
    """
    made: dict[int, Tensor] = {}

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor | Lazy):
            if not _floating(value, dtype):
                return value
            if id(value) not in made:
                made[id(value)] = Cast(value, dtype)
            return made[id(value)]
        if isinstance(value, dict):
            new = copy.copy(value)  # of its own class, with the versions of a state_dict
            for key, item in value.items():
                new[key] = one(item)
            return new
        if type(value) in (list, tuple):
            return type(value)(map(one, value))
        return value

    return one(state)


def _floating(tensor: Tensor, dtype: str) -> bool:
    if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
        return False
    spec = spec_of(tensor)
    floating = spec.dtype.startswith(("float", "bfloat")) and not STORED[spec.dtype].packed
    return bool(spec.shape) and floating and spec.dtype != dtype
