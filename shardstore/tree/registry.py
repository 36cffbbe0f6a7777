"""Types that the user adds: the only way by which a value of another class can be stored."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardstore.errors import InvalidArgument, Mismatch


@dataclass(frozen=True)
class Codec:
    """How values of one class are stored, under a name of the user's choice."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


BY_CLASS: dict[type, Codec] = {}
BY_NAME: dict[str, Codec] = {}
_BUILT_IN: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, bytearray, dict, OrderedDict, Counter, list, tuple, set,
    frozenset, torch.Tensor, torch.nn.Parameter,
)  # fmt: skip


def register_type(cls: type, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Let values of exactly the class `cls` be stored under `name`.

    `encode` turns a value into something that can be stored (a dict, a list, tensors, numbers ...), `decode` is its
    inverse. The name goes into the checkpoint, the class doesn't: whoever loads registers the same name first.
    Registering a class again replaces what was there. Raises InvalidArgument for a type that is stored anyway, and for
    a name in use by another class.
    """
    if not isinstance(cls, type) or not isinstance(name, str) or not name:  # type: ignore[redundant-expr]
        raise InvalidArgument("register_type takes a class and a non-empty name")
    if cls in _BUILT_IN:
        raise InvalidArgument(f"{cls.__name__} is stored anyway; only other types can be registered")
    other = BY_NAME.get(name)
    if other is not None and (other.cls.__module__, other.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvalidArgument(f"the name {name!r} is taken by {other.cls.__qualname__}; choose another")
    former = BY_CLASS.get(cls)
    if former is not None:
        BY_NAME.pop(former.name, None)
    BY_CLASS[cls] = BY_NAME[name] = Codec(name, cls, encode, decode)


def codec_of(name: str) -> Codec:
    """The codec that is registered under a name; Mismatch if there is none."""
    codec = BY_NAME.get(name)
    if codec is None:
        raise Mismatch(
            f"the checkpoint has a value of the registered type {name!r}, which isn't registered here; "
            "call shardstore.register_type for it before loading (nothing is imported on a checkpoint's word)",
            different=(name,),
        )
    return codec
