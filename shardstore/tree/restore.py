"""From a skeleton and loaded tensors to a state of fresh objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardstore.errors import Mismatch
from shardstore.tree import arrays, scalars
from shardstore.tree.meta import Meta
from shardstore.tree.per_rank import PerRank
from shardstore.tree.registry import codec_of
from shardstore.tree.select import Selection
from shardstore.tree.skeleton import ATOMS, MAPPINGS, SEQUENCES, Node, damaged, key_of, pairs, run_keys, tag


def restore(
    selection: Selection | Meta, paths: Sequence[str], tensors: Mapping[int, torch.Tensor], rank: int = 0, size: int = 1
) -> Any:
    """Build the state anew. `tensors` has every number of the selection; one object for tied tensors ties them again.

    `rank` of `size` loads: for what each rank has of its own.

    Modules, optimizers and other objects come back as their state_dicts. Raises Mismatch for a registered type that
    isn't registered here, and Damaged for a skeleton that contradicts the tensors.
    """
    try:
        return Restorer(paths, tensors.__getitem__, rank, size).node(selection.state)
    except scalars.BadNode as error:
        raise damaged(str(error)) from None


def outline(selection: Selection | Meta, paths: Sequence[str], leaves: Mapping[int, Any]) -> Any:
    """The state with `leaves` where tensors and arrays stand; of what is made from tensors, its parts."""
    try:
        return _Outliner(paths, leaves.__getitem__).node(selection.state)
    except scalars.BadNode as error:
        raise damaged(str(error)) from None


class Restorer:
    """Makes values of nodes; `lookup` gives the tensor of a number."""

    def __init__(
        self, paths: Sequence[str], lookup: Callable[[int], torch.Tensor], rank: int = 0, size: int = 1
    ) -> None:
        self._rank, self._size = rank, size
        self._paths = paths
        self._lookup = lookup
        self._made: dict[tuple[int, bool, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def node(self, node: Node) -> Any:
        cls = type(node)
        if cls is dict:
            kind = tag(node)
            if kind is None:
                return {key: self.node(item) for key, item in node.items()}
            make = _MAKERS.get(kind)
            return scalars.decode(node) if make is None else getattr(self, make)(node)
        if cls is list:
            return list(node) if all(type(item) in ATOMS for item in node) else [self.node(item) for item in node]
        return node

    def _tensor(self, node: Node) -> torch.Tensor:
        return self._flagged(self._lookup(node["$t"]), node)

    def _flagged(self, tensor: torch.Tensor, node: Node, /) -> torch.Tensor:
        """A Parameter or a tensor, with requires_grad as saved; the same object where tied leaves ask for the same."""
        parameter = "p" in node
        grad = node.get("g", parameter)
        if not parameter and not grad:
            return tensor
        if grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise damaged(f"a {tensor.dtype} tensor can't require gradients")
        key = id(tensor), parameter, grad
        if key not in self._made:
            made = nn.Parameter(tensor, requires_grad=grad) if parameter else tensor.detach().requires_grad_(grad)
            self._made[key] = tensor, made  # the first only so that its id stays taken
        return self._made[key][1]

    def _run(self, node: Node) -> dict[str, torch.Tensor]:
        inner = node["$tensors"]
        first, count = inner["first"], inner["count"]
        made = dict(zip(run_keys(inner, self._paths), map(self._lookup, range(first, first + count)), strict=True))
        if len(made) != count:
            raise damaged("two tensors have the same path")
        return self._versions(OrderedDict(made), inner) if "type" in inner else made

    def _dict(self, node: Node) -> dict[Any, Any]:
        cls = MAPPINGS[node["$"]]
        made = cls({key: self.node(item) for key, item in pairs(node)})
        return self._versions(made, node)

    def _versions(self, made: dict[Any, Any], node: Node) -> dict[Any, Any]:
        if "versions" in node:
            made._metadata = OrderedDict(self.node(node["versions"]))  # type: ignore[attr-defined]  # noqa: SLF001
        return made

    def _tuple(self, node: Node) -> tuple[Any, ...]:
        return tuple(self.node(node["items"]))

    def _set(self, node: Node) -> Any:
        members = [key_of(item) for item in node["items"]]
        made = SEQUENCES[node["$"]](members)
        if len(made) != len(members):
            raise damaged("a set has the same member twice")
        return made

    def _sparse(self, node: Node) -> torch.Tensor:
        parts = {name: self._tensor(part) for name, part in node["parts"].items()}
        return self._flagged(arrays.to_sparse(node, parts), node)

    def _ndarray(self, node: Node) -> Any:
        return arrays.to_numpy(self._lookup(node["t"]), node["dtype"])

    def _object(self, node: Node) -> Any:
        return self.node(node["value"])

    def _per_rank(self, node: Node) -> Any:
        return PerRank.loaded([self.node(value) for value in node["values"]], self._rank, self._size)

    def _custom(self, node: Node) -> Any:
        codec = codec_of(node["name"])
        value = self.node(node["value"])
        try:
            return codec.decode(value)
        except Exception as error:
            raise Mismatch(f"the decoder of the registered type {codec.name!r} failed: {error}") from error


class _Outliner(Restorer):
    """Leaves tensors as they are."""

    def _flagged(self, tensor: Any, _node: Node, /) -> Any:
        return tensor

    def _sparse(self, node: Node) -> Any:
        return {name: self._tensor(part) for name, part in node["parts"].items()}

    def _ndarray(self, node: Node) -> Any:
        return self._lookup(node["t"])

    def _custom(self, node: Node) -> Any:
        return self.node(node["value"])


_MAKERS: dict[str, str] = {
    "$t": "_tensor",
    "$tensors": "_run",
    **dict.fromkeys(MAPPINGS, "_dict"),
    "tuple": "_tuple",
    "set": "_set",
    "frozenset": "_set",
    "sparse": "_sparse",
    "ndarray": "_ndarray",
    "object": "_object",
    "per_rank": "_per_rank",
    "custom": "_custom",
}
