"""Optimizer state by parameter name: order, groups and rank layout then don't matter.

Names come from the Modules of the same state, else from its plain tensors (a `model.state_dict()`), else from the
groups' own `param_names`. torch's `get_state_dict` is never used: on an optimizer without state it would run a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from shardstore.tree.dtensors import is_dtensor, local_of
from shardstore.tree.modules import named_tensors
from shardstore.tree.objects import kind_of
from shardstore.tree.state import MAX_DEPTH, section_label, text_of
from shardstore.tree.tensors import class_name, refuse

REMEDY = (
    'put the Module that owns it into the same state, as in {"model": model, "optimizer": optimizer} '
    "(its state_dict() does as well)"
)
Key: TypeAlias = Any


@dataclass
class Source:
    """Something in the state that names tensors: a Module, or the plain tensors of a section."""

    label: str
    key: Callable[[torch.Tensor], Key]
    names: dict[Key, list[str]]

    def of(self, tensor: torch.Tensor) -> list[str]:
        return self.names.get(self.key(tensor), [])


class Names:
    """The names of parameters, found in a state."""

    def __init__(self, state: Any) -> None:
        modules: list[Source] = []
        sections: dict[str, Source] = {}
        for label, name, value in _named(state):
            if isinstance(value, nn.Module):
                modules.append(_source(label, id, named_tensors(value)))
            elif value.layout is torch.strided and not value.is_nested:
                source = sections.setdefault(label, Source(label, _memory, {}))
                source.names.setdefault(_memory(value), []).append(name)
        self._sources = [*modules, *sections.values()]

    def of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """For every parameter in the order of the groups: its names (none, perhaps), the one to store first."""
        params = parameters(optimizer)
        for source in self._sources:
            names = [source.of(param) for param in params]
            if all(names):
                return names
        mixed = [self._mixed(param) for param in params]
        return mixed if all(mixed) else _own_names(optimizer) or mixed

    def _mixed(self, param: torch.Tensor) -> list[str]:
        for source in self._sources:
            names = source.of(param)
            if names:
                where = source.label.rstrip("/").replace("/", ".")
                return [f"{where}.{name}" for name in names]
        return []


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order in which torch numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _own_names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names with which the optimizer was built (`named_parameters()`), if it was."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    good = len(names) == len(parameters(optimizer)) == len(set(names)) and all(type(name) is str for name in names)
    return [[name] for name in names] if good else []


def _source(label: str, key: Callable[[torch.Tensor], Key], pairs: Sequence[tuple[str, torch.Tensor]]) -> Source:
    names: dict[Key, list[str]] = {}
    for name, tensor in pairs:
        names.setdefault(key(tensor), []).append(name)
    return Source(label, key, names)


def _memory(tensor: torch.Tensor) -> Key:
    """What a tensor shows: equal for a parameter and its detached twin in a state_dict."""
    if is_dtensor(tensor):
        tensor = local_of(tensor)
        if not tensor.numel():  # an empty part has no address, but a storage of its own
            return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape  # noqa: SLF001
    try:
        address = tensor.data_ptr()
    except (RuntimeError, ValueError):
        return id(tensor)
    return (tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype) if address else id(tensor)


def _named(state: Any) -> Iterator[tuple[str, str, Any]]:
    """(label of the source, name in it, value) of all Modules and tensors in the plain containers of a state."""
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        section = section_label(key)
        yield from _below(section, section, "", value, 1)


def _below(section: str, label: str, name: str, value: Any, depth: int) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, nn.Module):
        yield label, "", value
    elif isinstance(value, torch.Tensor):
        yield section, name, value
    elif isinstance(value, dict | list | tuple) and depth < MAX_DEPTH and not kind_of(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            inner = f"{name}.{text_of(key)}" if label != section else text_of(key)
            yield from _below(section, section + inner, inner, item, depth + 1)


def optimizer_state(optimizer: torch.optim.Optimizer, names: Names, path: str) -> dict[str, Any] | None:
    """The state_dict of an optimizer with parameter names instead of numbers; None if it has a shape of its own.

    Raises UnsupportedState for a parameter that nothing in the state names.
    """
    try:
        saved = optimizer.state_dict()
    except Exception as error:
        raise refuse(path, f"{class_name(optimizer)}.state_dict() failed: {error}") from error
    if not _usual(saved):
        return None
    known = _checked(optimizer, names.of(optimizer), path)
    state: dict[Any, Any] = {}
    for key, value in saved["state"].items():
        name = known[key] if type(key) is int and 0 <= key < len(known) else key
        if name in state or (name is key and name in known):
            raise refuse(path, f"{name!r} is a parameter's name and a key of the optimizer's own; rename one")
        state[name] = value
    groups = [{**group, "params": [known[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {**saved, "state": state, "param_groups": groups}


def _checked(optimizer: torch.optim.Optimizer, names: list[list[str]], path: str) -> list[str]:
    nameless = [number for number, found in enumerate(names) if not found]
    if nameless:
        shapes = ", ".join(str(tuple(parameters(optimizer)[number].shape)) for number in nameless[:5])
        raise refuse(
            path,
            f"{len(nameless)} of {len(names)} parameters of the {type(optimizer).__name__} (shapes {shapes}) have no "
            f"name; {REMEDY}",
        )
    known = [found[0] for found in names]
    if len(set(known)) != len(known):
        twice = next(name for name in known if known.count(name) > 1)
        raise refuse(path, f"two parameters are named {twice!r}; put one Module with all of them into the state")
    return known


def _usual(saved: Any) -> bool:
    """Whether a state_dict is as torch's own optimizers make it."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return False
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    numbers = [number for group in groups for number in group.get("params", [None])]
    return numbers == list(range(len(numbers)))
