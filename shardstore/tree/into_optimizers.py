"""Into optimizers: state goes to the parameter of the same name, whatever the order of parameters and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardstore.tree.destinations import fits
from shardstore.tree.dtensors import is_dtensor, like, local_of
from shardstore.tree.fit import CPU, Fit
from shardstore.tree.into_objects import calling, into_stateful
from shardstore.tree.optimizers import REMEDY, parameters
from shardstore.tree.restore import Restorer
from shardstore.tree.skeleton import ABSENT, Node, entries, object_kind, tag, unwrap
from shardstore.tree.state import shorten

_SKIPPED = frozenset({"params", "param_names"})
"""Members of a group that are the target's own: they follow its order of parameters."""


@dataclass
class Saved:
    """An optimizer as the checkpoint has it. `names`: of each group; `values`: the other members of each group."""

    names: list[list[str]]
    values: list[dict[str, Node]]
    state: dict[Any, Node]
    extras: dict[str, Node]


def into_optimizer(fit: Fit, node: Node, optimizer: torch.optim.Optimizer, label: str, prefix: str) -> None:
    """Plan to load an optimizer."""
    node = fit.take(node, label)
    if node is ABSENT:
        fit.miss(label)
        return
    if object_kind(node) == "stateful":
        into_stateful(fit, node, optimizer, label, prefix)
        fit.steps.loaded.append(optimizer)
        return
    saved = _read(fit, node)
    if saved is None:
        fit.wrong_kind(node, label, f"an optimizer ({type(optimizer).__name__})")
        fit.different[-1] += (
            ". Save the optimizer itself, not its state_dict(), so that its state is stored by parameter name; "
            "or load this section without into and hand it to optimizer.load_state_dict()"
        )
        return
    match = _match(fit, saved, optimizer, label)
    if match is not None:
        _Load(fit, saved, optimizer, match, label).plan()
        fit.steps.loaded.append(optimizer)


def _read(fit: Fit, node: Node) -> Saved | None:
    """The parts of an optimizer's node, or of plain data that has its state by name; None if it is neither."""
    paths = fit.table.paths
    top = entries(unwrap(node), paths) if object_kind(node) in (None, "optimizer") else None
    if top is None or type(top.get("param_groups")) is not list:
        return None
    state, groups = entries(top.pop("state", None), paths), [entries(group, paths) for group in top.pop("param_groups")]
    names = [group.get("params") for group in groups if group is not None]
    if state is None or len(names) != len(groups) or not all(map(_texts, names)):
        return None
    renamed = [[fit.renamed.get(name, name) for name in group or ()] for group in names]
    state = {fit.renamed.get(key, key) if type(key) is str else key: part for key, part in state.items()}
    values = [{key: part for key, part in (group or {}).items() if key not in _SKIPPED} for group in groups]
    return Saved(renamed, values, state, top)


def _texts(names: Any) -> bool:
    return type(names) is list and all(type(name) is str for name in names)


# ---------------------------------------------------------------------------------------------- matching


@dataclass
class Match:
    """`place`: saved name -> number of the target's parameter. `group`: which saved group each of the target's is."""

    place: dict[str, int]
    group: list[int]


def _match(fit: Fit, saved: Saved, optimizer: torch.optim.Optimizer, label: str) -> Match | None:
    """Match parameters and groups by name; None if they don't match, which is noted."""
    names = fit.names.of(optimizer)
    if not all(names):
        fit.differ(
            label, f"{names.count([])} of the optimizer's {len(names)} parameters have no name in into; {REMEDY}"
        )
        return None
    place = {name: number for number, found in enumerate(names) for name in found}
    if fit.lenient:
        _narrow(saved, place)
    wanted, start = [], 0
    for group in optimizer.param_groups:
        wanted.append(frozenset(range(start, start + len(group["params"]))))
        start += len(group["params"])
    having = [frozenset(place.get(name, name) for name in group) for group in saved.names]
    if sorted(map(_key, wanted)) != sorted(map(_key, having)):
        fit.differ(
            label, _group_report(saved, [[names[number][0] for number in sorted(group)] for group in wanted], place)
        )
        return None
    order = _order(wanted, having)
    if order != sorted(order):
        fit.reordered.append((label, optimizer))
    return Match(place, order)


def _narrow(saved: Saved, place: Mapping[str, int]) -> None:
    """Leave out the parameters that are other ranks'."""
    others = {name for group in saved.names for name in group if name not in place}
    saved.state = {key: node for key, node in saved.state.items() if key not in others}
    kept = [number for number, group in enumerate(saved.names) if not group or not others.issuperset(group)]
    saved.names = [[name for name in saved.names[number] if name not in others] for number in kept]
    saved.values = [saved.values[number] for number in kept]


def _key(group: frozenset[Any]) -> list[str]:
    return sorted(map(repr, group))


def _order(wanted: Sequence[frozenset[int]], having: Sequence[frozenset[Any]]) -> list[int]:
    free = list(range(len(having)))
    order = []
    for group in wanted:
        number = next(number for number in free if having[number] == group)
        free.remove(number)
        order.append(number)
    return order


def _group_report(saved: Saved, target: list[list[str]], place: Mapping[str, int]) -> str:
    """How the groups of checkpoint and target differ, with names."""
    old = {name for group in saved.names for name in group}
    new = {name for group in target for name in group}
    gone = sorted(name for name in old if name not in place)
    more = sorted(
        new - {name for name in new if any(place.get(other) == place[name] for other in old if other in place)}
    )
    text = f"the parameter groups differ: the checkpoint has {_shown(saved.names)}, the target {_shown(target)}"
    if gone:
        text += f"; only in the checkpoint: {shorten(gone)}"
    if more:
        text += f"; only in the target: {shorten(more)}"
    return text


def _shown(groups: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"[{len(group)}: {shorten(sorted(group), 4)}]" for group in groups) or "none"


# ----------------------------------------------------------------------------------------------- loading


@dataclass
class _Load:
    """The plan for one optimizer whose groups match."""

    fit: Fit
    saved: Saved
    optimizer: torch.optim.Optimizer
    match: Match
    label: str
    used: set[int] = field(default_factory=set)  # addresses that are filled in place

    def plan(self) -> None:
        self.params = parameters(self.optimizer)
        self.values = [self.saved.values[number] for number in self.match.group]
        self.group_of = [
            number for number, group in enumerate(self.optimizer.param_groups) for _ in range(len(group["params"]))
        ]
        if self._own_way():
            if any(map(is_dtensor, self.params)):
                self.fit.differ(
                    self.label,
                    f"{type(self.optimizer).__name__} loads its state in a way of its own, which does not go with "
                    "sharded parameters; load its section without into, and give it the parts yourself",
                )
                return
            self._plan_own_way()
            return
        states = {key: self._plan_state(key, node) for key, node in self.saved.state.items()}
        groups = [self._plan_group(number) for number in range(len(self.values))]

        def step(made: Restorer) -> None:
            self._put_state(made, states)
            for group, values, filled in zip(self.optimizer.param_groups, self.values, groups, strict=True):
                group.update({key: filled[key] if key in filled else made.node(node) for key, node in values.items()})
            state = {"state": self.optimizer.state, "param_groups": self.optimizer.param_groups}
            self._call("__setstate__", state)  # as at the end of torch's own load: adds what older versions didn't have

        self.fit.steps.optimizers.append(step)

    def _own_way(self) -> bool:
        """Whether the optimizer does something of its own at a load."""
        optimizer = self.optimizer
        hooks = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks  # noqa: SLF001
        return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or any(hooks)

    def _flag(self, number: int) -> bool:
        """Whether a group keeps its scalars on the parameters' device; after the load, that is as saved."""
        return any(self.values[number].get(flag) is True for flag in ("capturable", "fused"))

    def _device(self, place: int, key: Any) -> torch.device:
        """Where torch keeps a state tensor: with its parameter, but `step` on the CPU."""
        if key == "step" and not self._flag(self.group_of[place]):
            return CPU
        return self.params[place].device

    def _fill(self, node: Node, target: Any) -> bool:
        """Plan to fill a tensor that is there already, if it fits exactly and isn't shared."""
        if tag(node) != "$t" or len(node) != 1 or not fits(target, self.fit.table.specs[node["$t"]]):
            return False
        address = (local_of(target) if is_dtensor(target) else target).data_ptr()
        if address and address in self.used:
            return False
        self.used.add(address)
        self.fit.fill(node["$t"], target)
        return True

    def _plan_state(self, key: Any, node: Node) -> dict[Any, torch.Tensor] | None:
        """Plan the state of one parameter: what is filled in place, by key; None if it is no dict."""
        place = self.match.place.get(key) if type(key) is str else None
        inner = entries(node, self.fit.table.paths) if place is not None else None
        if place is None or inner is None:
            self.fit.need(node, None if place is None else self.params[place].device)
            return None
        now = self.optimizer.state.get(self.params[place], {})
        filled = {}
        for name, part in inner.items():
            if isinstance(now, dict) and self._fill(part, now.get(name)):
                filled[name] = now[name]
                continue
            made = self._made(part, self.params[place])
            if made is not None and self._fill(part, made):
                filled[name] = made
            else:
                self.fit.need(part, self._device(place, name))
        return filled

    def _made(self, node: Node, param: torch.Tensor) -> torch.Tensor | None:
        """A new state tensor with the layout of a sharded parameter, for a state of the parameter's shape."""
        if tag(node) != "$t" or not is_dtensor(param):
            return None
        spec = self.fit.table.specs[node["$t"]]
        return like(param, getattr(torch, spec.dtype)) if tuple(spec.shape) == tuple(param.shape) else None

    def _plan_group(self, number: int) -> dict[str, torch.Tensor]:
        """Plan the values of one group: tensors (a learning rate, say) that are filled in place, by key."""
        group, filled = self.optimizer.param_groups[number], {}
        for key, node in self.values[number].items():
            if self._fill(node, group.get(key)):
                filled[key] = group[key]
            else:
                at_home = self._flag(number) and len(group["params"]) > 0
                self.fit.need(node, group["params"][0].device if at_home else CPU)
        return filled

    def _put_state(self, made: Restorer, states: Mapping[Any, dict[Any, torch.Tensor] | None]) -> None:
        known = set()
        for key, filled in states.items():
            node = self.saved.state[key]
            place = self.match.place.get(key) if type(key) is str else None
            owner = key if place is None else self.params[place]
            known.add(id(owner))
            if filled is None:
                self.optimizer.state[owner] = made.node(node)
                continue
            inner = entries(node, self.fit.table.paths) or {}
            new = {name: filled[name] if name in filled else made.node(part) for name, part in inner.items()}
            slot = self.optimizer.state.setdefault(owner, {})
            slot.clear()
            slot.update(new)
        for param in self.params:
            if id(param) not in known:
                self.optimizer.state.pop(param, None)

    # ------------------------------------------------------------------------------- through its own method

    def _plan_own_way(self) -> None:
        numbered = {self._number(key): (key, node) for key, node in self.saved.state.items()}
        for number, (_, node) in numbered.items():
            inner = entries(node, self.fit.table.paths) if type(number) is int else None
            for name, part in (inner or {}).items():
                self.fit.need(part, self._device(number, name))
            self.fit.need(node)
        self.fit.need([*(part for group in self.values for part in group.values()), *self.saved.extras.values()], CPU)

        def step(made: Restorer) -> None:
            state = {number: made.node(node) for number, (_, node) in numbered.items()}
            extras = {key: made.node(node) for key, node in self.saved.extras.items()}
            groups, members = self.optimizer.param_groups, [dict(group) for group in self.optimizer.param_groups]
            self._call("load_state_dict", {**extras, "state": state, "param_groups": self._groups(made)})
            self._keep_lists(groups, members)
            self._exact(state)

        self.fit.steps.optimizers.append(step)

    def _number(self, key: Any) -> Any:
        return self.match.place.get(key, key) if type(key) is str else key

    def _groups(self, made: Restorer) -> list[dict[str, Any]]:
        groups, start = [], 0
        for group, values in zip(self.optimizer.param_groups, self.values, strict=True):
            own = {"param_names": group["param_names"]} if "param_names" in group else {}
            numbers = list(range(start, start + len(group["params"])))
            groups.append({**{key: made.node(node) for key, node in values.items()}, **own, "params": numbers})
            start += len(numbers)
        return groups

    def _keep_lists(self, groups: list[dict[str, Any]], members: list[dict[str, Any]]) -> None:
        """Torch makes a new list of new groups, which schedulers would know nothing of: keep the old ones, renewed."""
        new = self.optimizer.param_groups
        if new is groups or len(new) != len(members):
            return
        for group, values in zip(groups, new, strict=True):
            if group is not values:
                group.clear()
                group.update(values)
        self.optimizer.param_groups = groups

    def _exact(self, state: Mapping[Any, Any]) -> None:
        """Put back the dtypes that torch's load casts to those of the parameters."""
        for number, saved in state.items():
            now = self.optimizer.state.get(self.params[number]) if type(number) is int else None
            if not isinstance(now, dict) or not isinstance(saved, dict):
                continue
            for key, value in saved.items():
                cast = now.get(key)
                if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and _only_cast(cast, value):
                    now[key] = value.to(cast.device)

    def _call(self, method: str, state: dict[str, Any]) -> None:
        calling(self.label, self.optimizer, method, lambda: getattr(self.optimizer, method)(state))


def _only_cast(now: torch.Tensor, saved: torch.Tensor) -> bool:
    return now.dtype != saved.dtype and now.shape == saved.shape and type(now) is torch.Tensor
