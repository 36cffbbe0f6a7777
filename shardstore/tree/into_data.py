"""Into plain data: tensors in place, and slots, which are replaced by what was saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardstore.errors import InvalidArgument
from shardstore.tree.binding import Step
from shardstore.tree.destinations import spec_of
from shardstore.tree.fit import Fit
from shardstore.tree.into_objects import calling, into_module, into_stateful
from shardstore.tree.into_optimizers import into_optimizer
from shardstore.tree.objects import kind_of
from shardstore.tree.per_rank import PerRank
from shardstore.tree.restore import Restorer
from shardstore.tree.skeleton import ABSENT, ATOMS, Node, entries, items, tag, unwrap
from shardstore.tree.state import MAX_DEPTH, text_of
from shardstore.tree.tensors import PLAIN

_ATOMS = frozenset(ATOMS)
_INTO: dict[str, Callable[[Fit, Node, Any, str, str], None]] = {
    "module": into_module,
    "optimizer": into_optimizer,
    "stateful": into_stateful,
}


class Walk:
    """Goes through a target and the checkpoint side by side."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._holds: dict[int, bool] = {}

    def place(self, node: Node, target: Any, label: str, prefix: str) -> Step | None:
        """Plan one value of the target. Returns what makes its new value, or None if the old object stays."""
        if isinstance(target, torch.Tensor):
            return self._tensor(node, target, label)
        if isinstance(target, PerRank):
            return self._per_rank(node, target, label, prefix)
        kind = kind_of(target)
        if kind is not None:
            _INTO[kind](self._fit, node, target, label, prefix)
            return None
        if not self.holds(target):
            return self._slot(node, target, label, prefix)
        if isinstance(target, dict):
            return self._mapping(node, target, label, prefix)
        return self._sequence(node, target, label, prefix)

    def holds(self, target: Any, depth: int = 0) -> bool:
        """Whether there is a tensor or an object in a container: if not, it is a slot."""
        if isinstance(target, torch.Tensor | PerRank) or kind_of(target) is not None:
            return True
        if not isinstance(target, dict | list | tuple):
            return False
        if depth > MAX_DEPTH:
            raise InvalidArgument(f"into is nested more than {MAX_DEPTH} levels deep, or contains itself")
        known = self._holds.get(id(target))
        if known is None:
            inner = target.values() if isinstance(target, dict) else target
            plain = set(map(type, inner)) <= _ATOMS
            known = self._holds[id(target)] = not plain and any(self.holds(item, depth + 1) for item in inner)
        return known

    def _tensor(self, node: Node, target: torch.Tensor, label: str) -> Step | None:
        fit = self._fit
        if target.layout is torch.strided or target.is_meta:
            fit.tensor(node, target, label)
            return None
        node = fit.take(node, label)
        if node is ABSENT:
            fit.miss(label)
            return None
        if tag(node) != "sparse":
            fit.wrong_kind(node, label, f"a {str(target.layout)[6:]} tensor")
            return None
        spec = fit.table.specs[node["parts"]["values"]["$t"]]
        saved, now = (node["layout"], spec.dtype, tuple(node["shape"])), (str(target.layout)[6:], *spec_of(target))
        if saved != now:
            fit.differ(label, f"the checkpoint has {saved}, the target {now}")
            return None
        fit.need(node, target.device)
        return lambda made: made.node(node)

    # ------------------------------------------------------------------------------------- per rank

    def _per_rank(self, node: Node, target: PerRank, label: str, prefix: str) -> Step | None:
        fit = self._fit
        node = fit.take(node, label)
        if node is ABSENT:
            fit.miss(label)
            return None
        if tag(node) != "per_rank":
            fit.wrong_kind(node, label, "a PerRank")
            return None
        values = node["values"]
        if len(values) == fit.size:
            name = f"{prefix}rank{fit.rank}"
            step = self.place(values[fit.rank], target.value, name, f"{name}.")
            return None if step is None else partial(_put_own, target, step)
        if target.rule is None:
            fit.differ(
                label,
                f"{len(values)} ranks have each saved their own, and {fit.size} load it; say with PerRank(..., rule=) "
                "what a rank gets, or leave it out of into",
            )
            return None
        fit.need(values)
        return lambda made: _by_rule(target, [made.node(value) for value in values], fit, label)

    # ---------------------------------------------------------------------------------------- dicts

    def _mapping(self, node: Node, target: dict[Any, Any], label: str, prefix: str) -> Step | None:
        fit = self._fit
        inner = {} if node is ABSENT else entries(unwrap(node), fit.table.paths)
        if inner is None:
            fit.wrong_kind(node, label, "a dict with tensors or objects")
            return None
        if self._fast(node, target, prefix):
            return None
        steps = []
        for key, value in target.items():
            path = prefix + text_of(key)
            step = self.place(inner.pop(key, ABSENT), value, path, f"{path}.")
            if step is not None:
                steps.append((key, step))
        for key, item in inner.items():
            path = prefix + text_of(key)
            fit.surplus(item, path, f"{path}.")
        return _assign(target, steps) if steps else None

    def _fast(self, node: Node, target: dict[Any, Any], prefix: str) -> bool:
        fit = self._fit
        if node is ABSENT or tag(unwrap(node)) != "$tensors" or fit.moved or fit.chooser:
            return False
        if not set(map(type, target.values())) <= PLAIN or set(map(type, target)) != {str}:
            return False
        return fit.run(unwrap(node), list(target), list(target.values()), prefix)

    # ---------------------------------------------------------------------------------------- lists

    def _sequence(self, node: Node, target: list[Any] | tuple[Any, ...], label: str, prefix: str) -> Step | None:
        fit = self._fit
        inner = [ABSENT] * len(target) if node is ABSENT else items(node)
        if inner is None:
            fit.wrong_kind(node, label, "a list with tensors or objects")
            return None
        if len(inner) != len(target):
            fit.differ(label, f"the target has {len(target)} items, the checkpoint {len(inner)}")
            return None
        chooser, fit.chooser = fit.chooser, fit.chooser if node is ABSENT else None  # a list is selected as a whole
        steps = []
        for place, (item, value) in enumerate(zip(inner, target, strict=True)):
            path = f"{prefix}{place}"
            step = self.place(item, value, path, f"{path}.")
            if step is not None:
                steps.append((place, step))
        fit.chooser = chooser
        if not steps:
            return None
        return _assign(target, steps) if isinstance(target, list) else _remake(target, steps)

    # ---------------------------------------------------------------------------------------- slots

    def _slot(self, node: Node, target: Any, label: str, prefix: str) -> Step | None:
        fit = self._fit
        node = fit.take(node, label)
        room = isinstance(target, dict) and (node is ABSENT or entries(unwrap(node), fit.table.paths) is not None)
        below = [path for path in fit.moved if room and path.startswith(prefix)]
        added = {path[len(prefix) :]: fit.moved.pop(path) for path in below}
        if node is ABSENT and not added:
            fit.miss(label)
            return None
        node = {} if node is ABSENT else node
        fit.need([node, *added.values()])
        merge = fit.chooser is not None

        def step(made: Restorer) -> Any:
            value = made.node(node)
            for name, part in added.items():
                _add(value, name, made.node(part))
            return _replace(target, value, merge=merge)

        return step


def _put_own(target: PerRank, step: Step, made: Restorer) -> PerRank:
    target.value = step(made)
    return target


def _by_rule(target: PerRank, values: list[Any], fit: Fit, label: str) -> PerRank:
    """Give a rank what the target's rule makes of the values of another number of ranks."""
    rule, inner = target.rule, target.value
    if rule is None:
        return target
    value = rule(values, fit.rank, fit.size)
    if kind_of(inner) is None:
        target.value = value
    else:
        calling(label, inner, "load_state_dict", lambda: inner.load_state_dict(value))
    return target


def _add(value: dict[Any, Any], name: str, part: Any) -> None:
    """Put what was renamed to a place in a slot there: as an entry of the innermost dict that its name leads to."""
    for key, inner in value.items():
        if isinstance(inner, dict) and type(key) is str and name.startswith(f"{key}."):
            _add(inner, name[len(key) + 1 :], part)
            return
    value[name] = part


def _assign(target: Any, steps: list[tuple[Any, Step]]) -> Step:
    def step(made: Restorer) -> Any:
        for key, part in steps:
            target[key] = part(made)
        return target

    return step


def _remake(target: tuple[Any, ...], steps: list[tuple[int, Step]]) -> Step:
    def step(made: Restorer) -> Any:
        values = list(target)
        for place, part in steps:
            values[place] = part(made)
        return type(target)(*values) if hasattr(target, "_fields") else tuple(values)

    return step


def _replace(target: Any, value: Any, *, merge: bool) -> Any:
    """The new value of a slot; a dict or list of the same type stays itself. `merge` keeps what wasn't selected."""
    if type(target) is not type(value):
        return value
    if isinstance(target, dict):
        if merge:
            value = {key: _replace(target.get(key), item, merge=True) for key, item in value.items()}
        else:
            target.clear()
        for key, item in value.items():  # update() would add up in a Counter
            target[key] = item
        return target
    if isinstance(target, list):
        target[:] = value
        return target
    return value
