"""Modules: the names of their state without the wrappers around them, and whose tensors those are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardstore.tree.tensors import class_name, refuse

EXTRA = "_extra_state"
"""The last component under which torch puts what `get_extra_state` returns."""

# Child names that only torch's own wrappers use, and classes whose child `module` is what they wrap. By name, since
# their modules take seconds to import, and apex and DeepSpeed have classes of the same names and habits.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "DeepSpeedEngine"})


def _wraps(module: nn.Module, name: str) -> bool:
    """Whether the child `name` is what `module` is only a wrapper around."""
    if name != "module":
        return name in _WRAPPED
    return any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__)


class Canonical:
    """The names of a Module's state with the wrappers' components taken off, wherever in the tree they stand."""

    def __init__(self, module: nn.Module) -> None:
        self._prefixes: dict[str, str] = {}
        pending = [(module, "", "")]
        while pending:
            parent, raw, short = pending.pop()
            for name, child in parent._modules.items():  # noqa: SLF001 - named_children shows a shared module only once
                inner = short if _wraps(parent, name) else f"{short}{name}."
                if child is not None:
                    pending.append((child, f"{raw}{name}.", inner))
            self._prefixes[raw] = short
        self._same = all(raw == short for raw, short in self._prefixes.items())

    def __call__(self, name: str) -> str:
        if self._same:
            return name
        head = name
        while True:  # a name may go deeper than the modules do; "" is always there
            head = head.rpartition(".")[0]
            raw = f"{head}." if head else ""
            if raw in self._prefixes:
                return self._prefixes[raw] + name[len(raw) :]

    def module(self, name: str) -> str:
        """The canonical name of a submodule, as `state_dict()._metadata` has it."""
        return self(f"{name}.")[:-1] if name else name


def canonical_names(module: nn.Module, names: Iterable[str], path: str) -> dict[str, str]:
    """Raw name -> canonical name; two that become one are refused with UnsupportedState."""
    short = Canonical(module)
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        found[name] = canonical = short(name)
        if taken.setdefault(canonical, name) != name:
            raise refuse(
                path,
                f"{taken[canonical]!r} and {name!r} are both {canonical!r} without their wrappers; "
                "store the inner modules under keys of their own",
            )
    return found


def module_state(module: nn.Module, path: str) -> OrderedDict[str, Any]:
    """The state_dict of a Module under canonical names, with torch's `_metadata` (the versions of its parts)."""
    raw: Any
    if any(cls.__name__ == "FullyShardedDataParallel" for part in module.modules() for cls in type(part).__mro__):
        raise refuse(
            path, "FSDP1 (FullyShardedDataParallel) keeps parameters in flat pieces, and its state_dict() gathers them "
            "on every rank; use fully_shard (FSDP2), or torch.distributed.checkpoint.state_dict.get_model_state_dict, "
            "whose result can be saved as data",
        )  # fmt: skip
    try:
        raw = module.state_dict()
    except Exception as error:
        raise refuse(path, f"{class_name(module)}.state_dict() failed: {error}") from error
    if not isinstance(raw, dict) or any(type(name) is not str for name in raw):
        raise refuse(path, f"{class_name(module)}.state_dict() is no dict of names; store what it returns as data")
    names = canonical_names(module, raw, path)
    state: OrderedDict[str, Any] = OrderedDict((names[name], value) for name, value in raw.items())
    versions = getattr(raw, "_metadata", None)
    if versions is not None:
        short = Canonical(module)
        known = OrderedDict((short.module(name), value) for name, value in versions.items())
        state._metadata = known  # type: ignore[attr-defined]  # noqa: SLF001
    return state


def own_tensors(module: nn.Module) -> set[int]:
    """The ids of a Module's parameters and buffers: what may be filled in place."""
    return set(map(id, chain(module.parameters(), module.buffers())))


def own_buffers(module: nn.Module) -> set[str]:
    """The canonical names of a Module's buffers, as far as they are saved."""
    short = Canonical(module)
    return {short(name) for name, _ in module.named_buffers(remove_duplicate=False)}


def unusual(module: nn.Module) -> bool:
    """Whether loading means more than filling tensors: hooks, own load methods, parts that are not initialised yet."""
    for part in module.modules():
        hooks = chain(part._load_state_dict_pre_hooks.values(), part._load_state_dict_post_hooks.values())  # noqa: SLF001
        if not all(map(_only_shards, hooks)):
            return True
        for method in ("load_state_dict", "_load_from_state_dict"):
            where = getattr(getattr(type(part), method), "__module__", "")
            if not (where == "torch.nn" or where.startswith("torch.nn.modules.")):
                return True
    return any(nn.parameter.is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers()))


def _only_shards(hook: Any) -> bool:
    """Whether a hook is FSDP2's: those see to it that parameters are sharded, which they are when we fill them."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under every canonical name that it has."""
    short = Canonical(module)
    pairs = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [(short(name), tensor) for name, tensor in pairs]


def live_state(module: nn.Module) -> dict[str, Any]:
    """The state_dict of a Module with its very own tensors, where it can give those."""
    state: dict[str, Any]
    try:
        state = module.state_dict(keep_vars=True)
    except TypeError:  # a state_dict() of its own that takes no arguments
        state = module.state_dict()
    return state
