"""The comparison of a checkpoint with a target: what it has found so far, and what is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from shardstore.errors import Mismatch, UnsupportedState
from shardstore.tree.binding import Steps
from shardstore.tree.destinations import Fill, spec_of, unfit
from shardstore.tree.dtensors import Layouts, is_dtensor, local_of, part_held
from shardstore.tree.optimizers import Names
from shardstore.tree.registry import codec_of
from shardstore.tree.restore import Restorer
from shardstore.tree.select import Chooser, special_nodes
from shardstore.tree.skeleton import ABSENT, Node, describe, leaves, numbers, run_keys, tag
from shardstore.tree.state import Tensors
from shardstore.tree.tensors import NAMES

CPU = torch.device("cpu")
_make_fill = cast("Any", partial(tuple.__new__, Fill))  # as Fill(...), without a Python frame for each of 100,000


class Fit:
    """What all parts of `bind` share. Differences are collected, never raised on the spot.

    `lenient`: this is one rank of several, and the checkpoint was united from ranks with different states (or the call
    is not strict): what the target doesn't have is most likely another rank's.
    """

    def __init__(
        self, table: Tensors, aliases: Mapping[int, int], into: Any, device: torch.device, rank: int, size: int
    ) -> None:
        self.table = table
        self.device = device
        self.rank, self.size = rank, size
        self.lenient = False
        self.into = into
        self.left: Sequence[str] = ()
        self.chooser: Chooser | None = None
        self.moved: dict[str, Node] = {}  # renamed leaves that no target has taken yet, by their new paths
        self.renamed: dict[str, str] = {}  # parameter names, from old to new
        self.fills: list[Fill] = []
        self.fresh: dict[int, torch.device] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []
        self.steps = Steps()
        self.objects: list[tuple[str, Any]] = []  # path and object of everything that is no Module and no optimizer
        self.reordered: list[tuple[str, torch.optim.Optimizer]] = []
        self._aliases = aliases
        self._devices: dict[int, torch.device] = {}
        self._names: Names | None = None
        self._layouts: Layouts = {}

    @property
    def names(self) -> Names:
        """The names of parameters, found in the target."""
        self._names = self._names or Names(self.into)
        return self._names

    def first(self, number: int) -> int:
        """The number of the first leaf with the same bytes."""
        return self._aliases.get(number, number)

    # ------------------------------------------------------------------------------------ differences

    def miss(self, label: str) -> None:
        if self.chooser is None or self.chooser.test(label):
            self.missing.append(label)

    def surplus(self, node: Node, label: str, prefix: str) -> None:
        """Note what the checkpoint has here and the target doesn't want."""
        if node is not ABSENT:
            found = leaves(node, label, prefix, self.table.labels, self.table.paths)
            self.unexpected.extend(path for path, _ in found)

    def differ(self, label: str, what: str) -> None:
        self.different.append(f"{label}: {what}")

    def wrong_kind(self, node: Node, label: str, wanted: str) -> None:
        self.differ(label, f"the target is {wanted}, the checkpoint has {describe(node, self.table.specs)}")

    def take(self, node: Node, label: str) -> Node:
        """The node for the target at `label`: a renamed leaf, if there is one."""
        return self.moved.pop(label, node) if self.moved else node

    # ------------------------------------------------------------------------------------------ plans

    def need(self, node: Node, device: torch.device | None = None) -> None:
        """Plan to load all tensors of a node anew, and see to it that its types are known."""
        for inner in special_nodes(node):
            if inner["$"] == "ndarray":
                self._need(inner["t"], CPU)
            else:
                self._require(inner["name"])
        for number in numbers(node, self.table.paths):
            self._need(number, device or self.device)

    def _need(self, number: int, device: torch.device) -> None:
        self._devices.setdefault(number, device)
        self.fresh.setdefault(self.first(number), device)

    def _require(self, name: str) -> None:
        try:
            codec_of(name)
        except Mismatch as error:
            self.different.append(error.message)

    def restorer(self, tensors: Mapping[int, torch.Tensor]) -> Restorer:
        """What makes values of nodes once the tensors are there."""

        def lookup(number: int) -> torch.Tensor:
            return tensors[self.first(number)].to(self._devices.get(number, self.device))

        return Restorer(self.table.paths, lookup, self.rank, self.size)

    def tensor(self, node: Node, target: torch.Tensor, label: str) -> None:
        """Plan to fill one strided tensor of the target."""
        node = self.take(node, label)
        if node is ABSENT:
            self.miss(label)
            return
        if tag(node) != "$t":
            self.wrong_kind(node, label, f"a tensor of shape {tuple(target.shape)}")
            return
        why = unfit(target)
        if why:
            self.differ(label, f"the target can't be filled: {why}")
            return
        spec = self.table.specs[node["$t"]]
        if spec_of(target) != (spec.dtype, tuple(spec.shape)):
            dtype, shape = spec_of(target)
            self.differ(label, f"the checkpoint has {spec.dtype} {tuple(spec.shape)}, the target {dtype} {shape}")
            return
        try:
            self.fill(node["$t"], target)
        except UnsupportedState as error:
            self.differ(label, f"the target can't be filled: {error}")

    def fill(self, number: int, target: torch.Tensor) -> None:
        """Plan to fill a tensor that fits. Raises UnsupportedState for a DTensor with a layout that is in doubt."""
        number = self.first(number)
        if is_dtensor(target):
            part, local = part_held(target, self.table.labels[number], self._layouts), local_of(target).detach()
            if local.numel() or not target.numel():
                self.fills.append(Fill(number, local, part.box))
            return
        self.fills.append(Fill(number, target.detach() if target.requires_grad else target))

    def run(self, node: Node, names: Sequence[str], targets: Sequence[torch.Tensor], prefix: str) -> bool:
        """Plan to fill many plain tensors from a `$tensors` dict, fast; False (and nothing done) if one is odd."""
        inner = node["$tensors"]
        saved = run_keys(inner, self.table.paths)
        first = inner["first"]
        own: Sequence[int | None] = range(first, first + inner["count"])
        rest: dict[str, int] = {}
        if saved != names:
            rest = dict(zip(saved, range(first, first + inner["count"]), strict=True))
            own = [rest.pop(name, None) for name in names]
        checked = self._match(own, targets)
        if checked is None:
            return False
        fills, odd = checked
        self.fills.extend(fills)
        for place in odd:
            number = own[place]
            self.tensor(ABSENT if number is None else {"$t": number}, targets[place], prefix + names[place])
        self.unexpected.extend(self.table.labels[number] for number in rest.values())
        return True

    def _match(self, own: Sequence[int | None], targets: Sequence[torch.Tensor]) -> tuple[list[Fill], list[int]] | None:
        """What surely fits, and the places of what wants a closer look; None for tensors that can't even be asked."""
        specs, alias = self.table.specs, self._aliases
        fills: list[Fill] = []
        odd: list[int] = []
        try:
            for place, (number, target) in enumerate(zip(own, targets, strict=True)):
                if number is None or not target.is_contiguous() or not target.data_ptr():
                    odd.append(place)
                    continue
                dtype, shape = specs[number]
                if target.shape != shape or NAMES.get(target.dtype) != dtype:
                    odd.append(place)
                    continue
                if target.requires_grad:
                    target = target.detach()  # noqa: PLW2901
                fills.append(_make_fill((alias.get(number, number) if alias else number, target, None)))
        except (RuntimeError, ValueError):
            return None
        return fills, odd
