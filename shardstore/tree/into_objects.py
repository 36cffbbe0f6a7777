"""Into Modules, and into objects that load their own state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardstore.errors import Mismatch
from shardstore.tree.destinations import spec_of
from shardstore.tree.fit import Fit
from shardstore.tree.modules import EXTRA, Canonical, canonical_names, live_state, own_tensors, unusual
from shardstore.tree.restore import Restorer
from shardstore.tree.skeleton import ABSENT, Node, entries, items, numbers, object_kind, tag, unwrap
from shardstore.tree.state import text_of
from shardstore.tree.tensors import PLAIN, class_name


def into_module(fit: Fit, node: Node, module: nn.Module, label: str, prefix: str) -> None:
    """Plan to fill a Module: its own tensors in place, whatever else there is through its own methods."""
    saved = _entries(fit, node)
    if saved is None:
        fit.wrong_kind(node, label, f"a Module ({class_name(module)})")
        return
    try:
        raw = live_state(module)
        names = canonical_names(module, raw, label)
    except Exception as error:  # noqa: BLE001 - whatever a method of the user's raises
        fit.differ(label, f"{class_name(module)}.state_dict() failed: {error}")
        return
    if object_kind(node) is None and raw.keys() == saved.keys():
        names = {name: name for name in raw}  # a plain state_dict, of a wrapper like this one
    own = own_tensors(module)
    tensors = {name: value for name, value in raw.items() if name.rpartition(".")[2] != EXTRA}
    if unusual(module) or any(id(value) not in own for value in tensors.values()):
        _through_load(fit, saved, module, raw, names, prefix, _versions(node))
    elif not _fast(fit, node, raw, names, prefix):
        for name, value in raw.items():
            part = saved.pop(names[name], ABSENT)
            if name in tensors:
                fit.tensor(part, value, prefix + names[name])
            else:
                _extra(fit, part, module, name, prefix + names[name])
        _surplus(fit, saved, prefix)


def _entries(fit: Fit, node: Node) -> dict[Any, Node] | None:
    """The saved state of a Module by name; None if the node can't be one."""
    if node is ABSENT:
        return {}
    if object_kind(node) not in (None, "module"):
        return None
    return entries(unwrap(node), fit.table.paths)


def _surplus(fit: Fit, saved: dict[Any, Node], prefix: str) -> None:
    for key, part in saved.items():
        path = prefix + text_of(key)
        fit.surplus(part, path, f"{path}.")


def _fast(fit: Fit, node: Node, raw: dict[str, Any], names: dict[str, str], prefix: str) -> bool:
    if (
        node is ABSENT
        or fit.moved
        or fit.chooser
        or tag(unwrap(node)) != "$tensors"
        or not set(map(type, raw.values())) <= PLAIN
    ):
        return False
    return fit.run(unwrap(node), list(names.values()), list(raw.values()), prefix)


def _extra(fit: Fit, node: Node, module: nn.Module, name: str, label: str) -> None:
    """Plan `set_extra_state` of one part of a Module."""
    node = fit.take(node, label)
    if node is ABSENT:
        fit.miss(label)
        return
    owner = module.get_submodule(name.rpartition(".")[0])
    fit.need(node)

    def step(made: Restorer) -> None:
        value = made.node(node)
        calling(label, owner, "set_extra_state", lambda: owner.set_extra_state(value))

    fit.steps.modules.append(step)


def _through_load(
    fit: Fit,
    saved: dict[Any, Node],
    module: nn.Module,
    raw: dict[str, Any],
    names: dict[str, str],
    prefix: str,
    versions: Node,
) -> None:
    """Plan `load_state_dict` of a Module that does more at a load than fill tensors."""
    parts: dict[str, Node] = {}
    for name, value in raw.items():
        label = prefix + names[name]
        part = fit.take(saved.pop(names[name], ABSENT), label)
        if part is ABSENT:
            fit.miss(label)
        elif not isinstance(value, torch.Tensor) or _loadable(fit, part, value, label):
            parts[name] = part
            fit.need(part, value.device if isinstance(value, torch.Tensor) else None)
    _surplus(fit, saved, prefix)
    whole = len(parts) == len(raw)

    def step(made: Restorer) -> None:
        state: OrderedDict[str, Any] = OrderedDict((name, made.node(part)) for name, part in parts.items())
        state._metadata = _raw_versions(module, made.node(versions))  # type: ignore[attr-defined]  # noqa: SLF001
        calling(prefix, module, "load_state_dict", lambda: module.load_state_dict(state, strict=whole))

    fit.steps.modules.append(step)


def _versions(node: Node) -> Node:
    """The node of the versions of a Module's parts, as they were when it was saved."""
    value = unwrap(node)
    inner = value["$tensors"] if tag(value) == "$tensors" else value if tag(value) == "OrderedDict" else {}
    return inner.get("versions", {})


def _raw_versions(module: nn.Module, saved: dict[str, Any]) -> OrderedDict[str, Any]:
    """The saved versions under the names that the parts have in this Module."""
    short = Canonical(module)
    raw = ((name, short.module(name)) for name, _ in module.named_modules(remove_duplicate=False))
    return OrderedDict((name, dict(saved[own])) for name, own in raw if isinstance(saved.get(own), dict))


def _loadable(fit: Fit, node: Node, target: torch.Tensor, label: str) -> bool:
    """Whether load_state_dict will take a tensor as it is; torch would cast, or copy into meta tensors in silence."""
    if target.is_meta:
        fit.differ(label, "the target lies on the meta device; call module.to_empty(device=...) first")
        return False
    if tag(node) != "$t":
        return True
    spec, lazy = fit.table.specs[node["$t"]], nn.parameter.is_lazy(target)
    dtype, shape = spec_of(target) if not lazy else (str(target.dtype)[len("torch.") :], tuple(spec.shape))
    if (dtype, shape) == (spec.dtype, tuple(spec.shape)):
        return True
    fit.differ(label, f"the checkpoint has {spec.dtype} {tuple(spec.shape)}, the target {dtype} {shape}")
    return False


def calling(label: str, value: Any, method: str, call: Callable[[], Any]) -> None:
    """Call a method of the user's object; what it raises becomes a Mismatch that names it."""
    try:
        call()
    except Exception as error:
        raise Mismatch(
            f"{label}: {class_name(value)}.{method}() refused the saved state: {error}. "
            "The tensors of the target had been filled by then",
            different=(label,),
        ) from error


def into_stateful(fit: Fit, node: Node, target: Any, label: str, prefix: str) -> None:
    """Plan `load_state_dict` of an object; what was left out at the save it keeps."""
    node = fit.take(node, label)
    if node is ABSENT:
        fit.miss(label)
        return
    if object_kind(node) in ("module", "optimizer"):
        fit.wrong_kind(node, label, f"a {class_name(target)}")
        return
    value = unwrap(node)
    left = {path for path in fit.left if path.startswith(prefix)}
    if any(True for _ in numbers(value, fit.table.paths)):
        _need_like(fit, value, _current(target))
    fit.need(value)
    fit.objects.append((label, target))

    def step(made: Restorer) -> None:
        state = made.node(value)
        if left:
            graft(state, _current(target), prefix, left)
        calling(label, target, "load_state_dict", lambda: target.load_state_dict(state))

    fit.steps.others.append(step)


def _current(target: Any) -> Any:
    """What an object's state is now, as far as it can say; only for hints."""
    try:
        return target.state_dict()
    except Exception:  # noqa: BLE001 - an object that was never used may not be able to
        return None


def _need_like(fit: Fit, node: Node, current: Any) -> None:
    """Plan to load the tensors of an object's state to the devices on which it has them now."""
    if tag(node) == "$t":
        fit.need(node, current.device if isinstance(current, torch.Tensor) else None)
        return
    inner = entries(unwrap(node), fit.table.paths)
    if inner is not None and isinstance(current, dict):
        for key, item in inner.items():
            _need_like(fit, item, current.get(key))
    elif isinstance(current, list | tuple):
        for item, now in zip(items(node) or (), current, strict=False):
            _need_like(fit, item, now)


def graft(state: Any, current: Any, prefix: str, left: set[str]) -> None:
    """Put an object's own functions and references back where the saved state has none."""
    if isinstance(state, dict) and isinstance(current, dict):
        for key, now in current.items():
            path = prefix + text_of(key)
            if path in left:
                state.setdefault(key, now)
            elif key in state:
                graft(state[key], now, f"{path}.", left)
    elif isinstance(state, list) and isinstance(current, list) and len(state) == len(current):
        for place, now in enumerate(current):
            path = f"{prefix}{place}"
            if path in left:
                state[place] = now
            else:
                graft(state[place], now, f"{path}.", left)
