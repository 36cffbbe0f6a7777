"""Objects as leaves: which kind a value is, and the state of those that are neither Module nor Optimizer."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from shardstore.tree.tensors import class_name, refuse

Kind: TypeAlias = Literal["module", "optimizer", "stateful"]
KINDS = frozenset({"module", "optimizer", "stateful"})

_NOT_STATE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    functools.partial,
    weakref.ref,
    type,
    torch.optim.Optimizer,
)


def kind_of(value: Any) -> Kind | None:
    """Whether a value is an object that is stored by its state_dict, and how."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, type | torch.Tensor) or type(value) is dict:
        return None
    try:
        both = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    except Exception:  # noqa: BLE001 - attributes of the user's own making
        return None
    return "stateful" if all(map(callable, both)) else None


def no_state(value: Any) -> bool:
    """Whether a value in an object's state is code or a reference, which the object has anew wherever it is built."""
    return isinstance(value, _NOT_STATE)


def stateful_state(value: Any, path: str) -> Any:
    """What `state_dict()` of an object returns; UnsupportedState if it fails."""
    try:
        return value.state_dict()
    except Exception as error:
        raise refuse(path, f"{class_name(value)}.state_dict() failed: {error}") from error


def functions_of(scheduler: Any, prefix: str) -> Iterator[str]:
    """Paths of the functions in a learning-rate scheduler: its own state_dict leaves them out without a word."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    for name, value in vars(scheduler).items():
        if isinstance(value, types.FunctionType | types.MethodType):
            yield f"{prefix}{name}"
        elif isinstance(value, list):
            for place, item in enumerate(value):
                if isinstance(item, types.FunctionType | types.MethodType):
                    yield f"{prefix}{name}.{place}"
                elif name == "_schedulers":
                    yield from functions_of(item, f"{prefix}{name}.{place}.")
