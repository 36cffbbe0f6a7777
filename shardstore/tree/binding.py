"""What `bind` returns: where each tensor goes, and what is left to do once they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from shardstore.tree.destinations import Fill
from shardstore.tree.restore import Restorer
from shardstore.tree.scalars import BadNode
from shardstore.tree.skeleton import damaged

Step: TypeAlias = Callable[[Restorer], Any]
"""Something to be done once the tensors are loaded. As part of a container, it returns the new value."""


class Report(NamedTuple):
    """What was allowed to differ. `missing`: paths whose targets stay as they are; `unexpected`: paths not loaded."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass
class Steps:
    """What `finish` does, in this order."""

    plain: list[Step] = field(default_factory=list)
    modules: list[Step] = field(default_factory=list)
    optimizers: list[Step] = field(default_factory=list)
    others: list[Step] = field(default_factory=list)
    loaded: list[torch.optim.Optimizer] = field(default_factory=list)


@dataclass
class Binding:
    """A checked plan; nothing has been touched yet. All numbers are those of first leaves: aliases are resolved.

    `fills` are filled in place; their tensors need no gradients, and have any strides and device; a number may come
    several times. `fresh`: numbers to be loaded into new memory on that device. A number
    may be in both. `report`: what was allowed to differ.
    """

    fills: list[Fill]
    fresh: dict[int, torch.device]
    report: Report
    into: Any
    steps: Steps
    restorer: Callable[[Mapping[int, torch.Tensor]], Restorer]

    def finish(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        """When all of `fills` is filled: put plain values and the state of objects in place. Returns `into`.

        `tensors` has every number of `fresh`. Order: plain values, modules, optimizers, other objects; then the
        optimizers' groups get their saved values once more, in case loading a scheduler changed them. Raises Mismatch
        if an object refuses its state; the tensors are filled by then.
        """
        made = self.restorer(tensors)
        try:
            with torch.no_grad():
                for step in (*self.steps.plain, *self.steps.modules, *self.steps.optimizers):
                    step(made)
                groups = [_Group(group) for optimizer in self.steps.loaded for group in optimizer.param_groups]
                for step in self.steps.others:
                    step(made)
                for group in groups:
                    group.put_back()
        except BadNode as error:
            raise damaged(str(error)) from None
        return self.into


class _Group:
    """The values of one parameter group at one moment."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._values = {key: value for key, value in group.items() if key != "params"}
        self._copies = {key: value.clone() for key, value in self._values.items() if isinstance(value, torch.Tensor)}

    def put_back(self) -> None:
        self._group.update(self._values)
        for key, copy in self._copies.items():
            self._values[key].copy_(copy)
