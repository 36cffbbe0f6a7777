"""What a flat file does not say itself: which parameters its numbers belong to."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardstore import strictjson
from shardstore.errors import InvalidArgument, brief, from_os_error
from shardstore.specs import Shape
from shardstore.tree.modules import Canonical

_LIMIT = 64 * 1024 * 1024
_MEMBERS = {"parameters", "ties", "groups", "left_out"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters of a model in the order of its parameter iterator, tied ones once, with their shapes.

    `ties`: further name -> name of the parameter that it is. `groups`: the names in each group of the optimizer, all in
    one by default. `left_out`: names of tensors of the model that are no parameters, and not in the file. `buffers`:
    those, where the model is at hand: an import takes them from it.
    """

    parameters: Mapping[str, Shape]
    ties: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Sequence[str]] = ()
    left_out: Sequence[str] = ()
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Numbers in all parameters together."""
        return sum(map(math.prod, self.parameters.values()))

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Layout:
        """The layout of a model, with the groups of its optimizer."""
        short = Canonical(model)
        parameters = {short(name): tensor for name, tensor in model.named_parameters()}
        names = {id(tensor): name for name, tensor in parameters.items()}
        state = {short(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
        ties = {n: names[id(t)] for n, t in state.items() if id(t) in names and names[id(t)] != n}
        buffers = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and id(t) not in names}
        groups = [[names.get(id(p), "?") for p in g["params"]] for g in optimizer.param_groups] if optimizer else []
        return cls({n: tuple(t.shape) for n, t in parameters.items()}, ties, groups, tuple(buffers), buffers)

    def as_json(self) -> dict[str, Any]:
        """The layout as `--layout` takes it."""
        return {
            "parameters": [[name, list(shape)] for name, shape in self.parameters.items()],
            "ties": dict(self.ties),
            "groups": [list(group) for group in self.groups],
            "left_out": list(self.left_out),
        }

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Layout:
        """A layout from a JSON file. Raises InvalidArgument for one that makes no sense, StoreError."""
        try:
            with open(path, "rb") as file:
                data = file.read(_LIMIT + 1)
        except OSError as error:
            raise from_os_error(error, "reading the layout", os.fspath(path)) from error
        try:
            return cls.parse(strictjson.loads(data, limit=_LIMIT))
        except strictjson.BadJson as error:
            raise InvalidArgument(f"the layout {os.fspath(path)!r} is no JSON: {error}") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"the layout {os.fspath(path)!r}: {error}") from None

    @classmethod
    def parse(cls, value: Any) -> Layout:
        """A layout from JSON: a list of `[name, shape]`, or an object with `parameters` and what else there is.

        Raises InvalidArgument.
        """
        given = {"parameters": value} if isinstance(value, list) else value
        if not isinstance(given, dict) or not given.keys() <= _MEMBERS or "parameters" not in given:
            raise InvalidArgument(f"a layout is a list of [name, shape], or an object of {sorted(_MEMBERS)}")
        parameters = _parameters(given["parameters"])
        ties, groups, left_out = given.get("ties", {}), given.get("groups", []), given.get("left_out", [])
        if not isinstance(ties, dict) or any(t not in parameters or n in parameters for n, t in ties.items()):
            raise InvalidArgument("'ties' maps further names to names of parameters")
        if not _names(left_out) or not isinstance(groups, list) or not all(map(_names, groups)):
            raise InvalidArgument("'groups' is a list of lists of names, 'left_out' a list of names")
        if groups and sorted(name for group in groups for name in group) != sorted(parameters):
            raise InvalidArgument("'groups' must have each parameter exactly once")
        return cls(parameters, ties, groups, left_out)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _parameters(value: Any) -> dict[str, Shape]:
    if not isinstance(value, list):
        raise InvalidArgument("'parameters' is a list of [name, shape], in the order of the model's parameters")
    found: dict[str, Shape] = {}
    for one in value:
        if not (isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and _shape(one[1])):  # noqa: PLR2004
            raise InvalidArgument(f"{brief(one)} is not [name, shape]")
        if one[0] in found:
            raise InvalidArgument(f"the parameter {one[0]!r} stands there twice; a tied one stands in 'ties'")
        found[one[0]] = tuple(one[1])
    return found


def _shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def check_fits(layout: Layout, count: int, file: str) -> None:
    """Raise InvalidArgument unless a file has as many numbers as the layout."""
    if layout.count != count:
        raise InvalidArgument(
            f"{file} has {count:,} parameters, the layout {layout.count:,}: it belongs to another model"
        )
