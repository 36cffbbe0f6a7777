"""Which tensors can be stored, and the table in which leaves get their numbers, unique paths and ties."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count, repeat
from typing import Any, cast

import torch
from torch import nn

from shardstore.errors import UnsupportedState
from shardstore.specs import DTYPES, Lazy, TensorSpec
from shardstore.tree.state import Leaf, Part

NAMES: dict[torch.dtype, str] = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""The tensor classes that are stored without being registered, by exact type."""

_make_leaf = cast("Any", partial(tuple.__new__, Leaf))  # as Leaf(...), without a Python frame for each of 100,000


def class_name(value: Any) -> str:
    """The qualified name of a value's class, for messages and as advice in the skeleton."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def refuse(path: str, what: str) -> UnsupportedState:
    """The error for something at `path` that can't be stored."""
    return UnsupportedState(f"{path}: {what}", path=path)


def why_not(tensor: torch.Tensor) -> str:  # noqa: PLR0911 - a list of reasons
    """Why a strided tensor can't be stored, and the remedy; empty if it can."""
    cls = class_name(tensor)
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return f"a {cls} has no values yet; run one forward pass first"
    if cls.startswith("torch.distributed._shard."):
        return f"a {cls} is of the time before DTensor; make DTensors (fully_shard does, or distribute_tensor)"
    if type(tensor) not in PLAIN:
        return f"a {cls} is a tensor subclass; convert it to a torch.Tensor, or use shardstore.register_type"
    if tensor.is_nested:
        return "a nested tensor can't be stored; store the list tensor.unbind() instead"
    if tensor.is_meta:
        return "a meta tensor has no values; materialise it first (module.to_empty(device=...)), or leave it out"
    if tensor.is_quantized:
        return "a quantized tensor can't be stored; store tensor.int_repr(), its scale and its zero point"
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]  # noqa: SLF001
        return "an mkldnn tensor can't be stored; store tensor.to_dense()"
    if tensor.dtype not in NAMES:
        return f"dtype {tensor.dtype} can't be stored; view or convert it first"
    if tensor.numel() and not tensor.data_ptr():
        return "the memory of this tensor has been freed; gather or materialise it first"
    return ""


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


class Leaves:
    """Leaves under construction: `items`, and `aliases` from a number to that of the first leaf with the same bytes."""

    def __init__(self) -> None:
        self.items: list[Leaf] = []
        self.aliases: dict[int, int] = {}
        self.lazy: dict[int, Lazy] = {}
        self._paths: set[str] = set()
        self._suffix: dict[str, int] = {}
        self._lazy_at: dict[int, int] = {}
        self._at: dict[int, int] = {}  # address -> the first leaf there
        self._others: dict[int, list[int]] = {}  # address -> further leaves there that show something else
        self._specs: dict[tuple[torch.dtype, torch.Size], TensorSpec] = {}

    def add(self, path: str, tensor: torch.Tensor) -> int:
        """Number one strided tensor; returns the number. Raises UnsupportedState."""
        try:
            why = why_not(tensor)
        except RuntimeError as error:  # wrapped by a transform, or something else that has no memory
            why = f"this tensor can't be stored: {error}"
        if why:
            raise refuse(path, why)
        if tensor.requires_grad:
            tensor = tensor.detach()
        first = self.add_run("", [self._unique(path)], [tensor])
        if first is None:  # can't be: what makes a run fail has been asked before
            raise refuse(path, "this tensor can't be stored")
        return first

    def add_part(self, path: str, tensor: torch.Tensor, whole: Sequence[int], part: Part) -> int:
        """Number a rank's part of a tensor of the shape `whole`. Raises UnsupportedState."""
        number = self.add(path, tensor)
        spec = self.items[number].spec._replace(shape=tuple(whole))
        self.items[number] = self.items[number]._replace(spec=spec, part=part)
        first = self.aliases.get(number)
        if first is not None and self.items[first][3] != part:
            del self.aliases[number]  # the same memory as two different parts
        return number

    def add_lazy(self, path: str, tensor: Lazy) -> int:
        """Number a tensor that is not in memory; one that is there already is a tie."""
        number = len(self.items)
        path = self._unique(path)
        self._paths.add(path)
        self.items.append(Leaf(path, tensor.spec, torch.empty(0, device="cpu")))
        first = self._lazy_at.setdefault(id(tensor), number)
        if first == number:
            self.lazy[number] = tensor
        else:
            self.aliases[number] = first
        return number

    def add_run(self, prefix: str, keys: list[str], tensors: list[torch.Tensor]) -> int | None:
        """Number plain tensors in a row; returns the first number, or None (and nothing done) if one is unusual."""
        paths = [prefix + key for key in keys] if prefix else keys
        if not self._paths.isdisjoint(paths) or not _encodable(keys) or not _encodable([prefix]):
            return None
        first = len(self.items)
        run = self._examine(first, tensors)
        if run is None:
            self._at = {address: n for address, n in self._at.items() if n < first}
            return None
        specs, shared = run
        self._paths.update(paths)
        self.items.extend(map(_make_leaf, zip(paths, specs, tensors, repeat(None))))
        for number, address in shared:
            self._tie(number, address)
        return first

    def _examine(
        self, first: int, tensors: list[torch.Tensor]
    ) -> tuple[list[TensorSpec], list[tuple[int, int]]] | None:
        """The specs, and (number, address) of those that begin where another leaf begins."""
        known, seen = self._specs, self._at
        specs: list[TensorSpec] = []
        shared: list[tuple[int, int]] = []
        try:
            for number, tensor in zip(count(first), tensors):
                dtype, shape = tensor.dtype, tensor.shape
                spec = known.get((dtype, shape))
                if spec is None:
                    spec = known[dtype, shape] = TensorSpec(NAMES[dtype], tuple(shape))
                specs.append(spec)
                address = tensor.data_ptr()
                if address == 0:
                    if why_not(tensor):
                        return None
                elif seen.setdefault(address, number) != number:
                    shared.append((number, address))
        except (KeyError, RuntimeError, ValueError):  # no such dtype, no memory, no sizes: the caller finds out what
            return None
        return specs, shared

    def _tie(self, number: int, address: int) -> None:
        """Make a leaf the alias of an earlier one that shows the very same bytes, if there is one."""
        view = _view(self.items[number].tensor)
        others = self._others.setdefault(address, [])
        for other in (self._at[address], *others):
            if _view(self.items[other].tensor) == view:
                self.aliases[number] = other
                return
        others.append(number)

    def _unique(self, path: str) -> str:
        if not _encodable([path]):
            raise refuse(path.encode("utf-8", "backslashreplace").decode(), "this name is no valid Unicode; rename it")
        if path not in self._paths:
            return path
        free = next(k for k in count(self._suffix.get(path, 2)) if f"{path}~{k}" not in self._paths)
        self._suffix[path] = free + 1
        return f"{path}~{free}"


def _encodable(texts: Sequence[str]) -> bool:
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
