"""States as plain data, and what writers ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardstore import tree
from shardstore.errors import UnsupportedState
from shardstore.memory import slices
from shardstore.specs import Lazy, TensorSpec
from shardstore.tree.restore import Restorer
from shardstore.tree.tensors import NAMES

Tensor = torch.Tensor | Lazy


def plain(state: Any) -> Any:
    """Anything that `save` takes as plain data, an optimizer's state by the names of its parameters.

    Tied tensors are one object. Raises UnsupportedState as `save` does, and for values per rank.
    """
    flat = tree.flatten(state)
    for path in flat.nodes:
        why = "it is a value per rank, which only a store holds; choose other sections with --only"
        raise UnsupportedState(f"{path.rstrip('/')}: {why}", path=path)
    first = {number: flat.aliases.get(number, number) for number in range(len(flat.leaves))}

    def lookup(number: int) -> Any:
        number = first[number]
        return flat.lazy.get(number, flat.leaves[number].tensor)

    return Plain([leaf.path for leaf in flat.leaves], lookup).node(flat.state)


class Plain(Restorer):
    """Makes plain data with tensors, or lazy ones, just as they are."""

    def _flagged(self, tensor: Any, _node: Any, /) -> Any:
        return tensor


def spec_of(tensor: Tensor) -> TensorSpec:
    """What a tensor is."""
    return tensor.spec if isinstance(tensor, Lazy) else TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape))


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, row-major, in slices of a few MiB."""
    yield from tensor.buffers() if isinstance(tensor, Lazy) else slices(tensor)


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and tensor of every tensor in plain data."""
    if isinstance(value, (torch.Tensor, Lazy)):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_in(item, f"{path}.{key}" if path else f"{key}")


def refuse(format: str, path: str, why: str) -> UnsupportedState:  # noqa: A002 - its name
    """The error for what a format can't hold."""
    return UnsupportedState(f"{path}: {format} can't hold this: {why}", path=path)
