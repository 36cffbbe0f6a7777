"""Optimizers in plain data: torch numbers their parameters, a store names them.

Names come from the optimizer itself (`param_names`), from a layout with groups, or from the model beside it where it
has exactly the tensors that the numbers stand for. Where that is not certain, numbers stay numbers, with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardstore.formats.layout import Layout
from shardstore.formats.plain import Tensor, spec_of

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_DEPTH = 4


def with_names(state: Any, layout: Layout | None, notes: list[str]) -> Any:
    """Plain data with optimizer states by name, as a store has them. The dicts that change are new ones."""
    models = list(_models(state))

    def one(value: Any, path: str) -> dict[str, Any] | None:
        if not numbered(value):
            return None
        names = _own_names(value) or _of_layout(value, layout)
        if not names:
            names = _of_models(value, models)
            if names and value["state"]:
                notes.append(
                    f"the parameters of the optimizer in {path!r} are taken to be in the order of the model, which it "
                    "does not say; if it was given them in another one, a layout with its groups tells that"
                )
        if names is None:
            notes.append(
                f"the optimizer state in {path!r} keeps the numbers of its parameters, whose names can't be told for "
                "certain: a layout with the groups of the optimizer tells them"
            )
            return None
        return _named(value, names)

    return _replaced(state, "", one, _DEPTH)


def with_numbers(state: Any) -> Any:
    """Plain data with optimizer states as torch's `load_state_dict` takes them; `param_names` keeps the names."""
    return _replaced(state, "", lambda value, _: _by_number(value), _DEPTH)


def _replaced(value: Any, path: str, change: Any, depth: int) -> Any:
    if not isinstance(value, dict) or not depth:
        return value
    changed = change(value, path)
    if changed is not None:
        return changed
    inner = {
        key: _replaced(item, f"{path}.{key}" if path else f"{key}", change, depth - 1) for key, item in value.items()
    }
    return value if all(inner[key] is value[key] for key in value) else inner


def _numbers(value: Any) -> list[Any] | None:
    """What an optimizer's groups have as `params`, in order; None for what is no state of an optimizer."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return None
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        return None
    if not all(isinstance(group.get("params"), list) for group in groups):
        return None
    return [number for group in groups for number in group["params"]]


def numbered(value: Any) -> bool:
    """Whether a value is the state of an optimizer that numbers its parameters."""
    numbers = _numbers(value)
    return numbers is not None and numbers == list(range(len(numbers))) and all(type(n) is int for n in numbers)


def _named(value: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    state = {
        names[key] if type(key) is int and 0 <= key < len(names) else key: own for key, own in value["state"].items()
    }
    groups = []
    for group in value["param_groups"]:
        new = {**group, "params": [names[number] for number in group["params"]]}
        if type(group.get("param_names")) is tuple:  # put there by us, see below
            del new["param_names"]
        groups.append(new)
    return {**value, "state": state, "param_groups": groups}


def _by_number(value: Any) -> dict[str, Any] | None:
    names = _numbers(value)
    if names is None or not all(type(name) is str for name in names) or len(set(names)) != len(names):
        return None
    number = {name: at for at, name in enumerate(names)}
    groups = []
    for group in value["param_groups"]:
        own = {} if "param_names" in group else {"param_names": tuple(group["params"])}  # torch's own are a list
        groups.append({**group, **own, "params": [number[name] for name in group["params"]]})
    return {
        **value,
        "state": {number.get(key, key): own for key, own in value["state"].items()},
        "param_groups": groups,
    }


def _own_names(value: Mapping[str, Any]) -> list[str] | None:
    names: list[Any] = []
    for group in value["param_groups"]:
        own = group.get("param_names")
        if not isinstance(own, list | tuple) or len(own) != len(group["params"]):
            return None
        names += own
    return names if all(type(name) is str for name in names) and len(set(names)) == len(names) else None


def _of_layout(value: Mapping[str, Any], layout: Layout | None) -> list[str] | None:
    if layout is None:
        return None
    groups = [list(group) for group in layout.groups] or [list(layout.parameters)]
    if [len(group) for group in groups] != [len(group["params"]) for group in value["param_groups"]]:
        return None
    names = [name for group in groups for name in group]
    return names if _fit(value["state"], [layout.parameters[name] for name in names]) else None


def _of_models(value: Mapping[str, Any], models: list[dict[str, Tensor]]) -> list[str] | None:
    """The names in the one model whose parameters the numbers can be, in its order; only with one group."""
    if len(value["param_groups"]) != 1:
        return None  # parameters were sorted into groups by a rule that isn't known here
    count, found = len(value["param_groups"][0]["params"]), []
    for model in models:
        first = {id(tensor): name for name, tensor in reversed(model.items())}
        names = [n for n in model if first[id(model[n])] == n and n.rpartition(".")[2] not in _BUFFERS]
        if len(names) == count and _fit(value["state"], [spec_of(model[name]).shape for name in names]):
            found.append(names)
    return found[0] if len(found) == 1 else None


def _fit(state: Mapping[Any, Any], shapes: list[tuple[int, ...]]) -> bool:
    """Whether each state that has tensors has one of its parameter's shape, and at least one has."""
    known = False
    for key, own in state.items():
        if type(key) is not int or not 0 <= key < len(shapes) or not isinstance(own, dict):
            return False
        found = {spec_of(part).shape for part in own.values() if isinstance(part, Tensor)} - {()}
        if found and shapes[key] not in found:
            return False
        known = known or bool(found)
    return known or not state


def _models(value: Any, depth: int = _DEPTH) -> Iterator[dict[str, Tensor]]:
    """The dicts of nothing but tensors under names, which may be models."""
    if not isinstance(value, dict) or not depth:
        return
    plain = all(isinstance(key, str) for key in value) and all(
        isinstance(item, Tensor) and not (isinstance(item, torch.Tensor) and item.layout is not torch.strided)
        for item in value.values()
    )
    if value and plain:
        yield value
    elif _numbers(value) is None:
        for item in value.values():
            yield from _models(item, depth - 1)
