"""What flattening gives, and the labels of things in a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardstore.specs import Box, Lazy, TensorSpec

MAX_DEPTH = 200
"""Levels of nesting that a state may have: containers and objects, the root included."""


MIN_RUN = 2
"""Tensors that a dict must have to be a `$tensors` node."""


class Part(NamedTuple):
    """The part of a tensor that this rank holds.

    `mesh`: the ranks over which the tensor is spread, row-major; `places`: where in it those are that hold this part.
    """

    box: Box
    mesh: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks of the mesh that hold this part."""
        return tuple(sorted(self.mesh[place] for place in self.places))


class Leaf(NamedTuple):
    """A tensor of the state. `tensor` is the caller's own, detached at most: strides and conj bit are as they are.

    `part`: of a DTensor, what of it `tensor` is; `spec` is that of the whole.
    """

    path: str
    spec: TensorSpec
    tensor: torch.Tensor
    part: Part | None = None


@dataclass
class Flat:
    """A flattened state. Tensors have the numbers of their places in `leaves`.

    `aliases`: number of a leaf -> number of the first leaf with the very same bytes.
    `state`: the skeleton. `flat`: whether it is that of the section `model` alone.
    `left`: paths of what can't be stored and was left out of an object's state (functions, weak references); at a load
    the object keeps its own.
    `lazy`: by number, the leaves that are not in memory, those of `own` behind the others; their `tensor` is empty.
    `own`: the tensors inside of PerRanks; `nodes`: the skeletons of these by path, which count from the first of `own`.
    In `state`, a PerRank is its path alone, until `joined` puts the values of all ranks there.
    `merged`: whether ranks with different states have been united.
    `buffers`: numbers of the leaves that are buffers of Modules.
    """

    leaves: list[Leaf] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)
    state: Any = None
    flat: bool = False
    left: list[str] = field(default_factory=list)
    lazy: dict[int, Lazy] = field(default_factory=dict)
    own: list[Leaf] = field(default_factory=list)
    nodes: dict[str, Any] = field(default_factory=dict)
    buffers: set[int] = field(default_factory=set)
    merged: bool = False


class Tensors(NamedTuple):
    """The tensors of a checkpoint, by number. `labels`: the paths after a rename, for patterns and messages."""

    paths: Sequence[str]
    specs: Sequence[TensorSpec]
    labels: Sequence[str]


FLAT_SECTION = "model/"
"""The path of the section that a flat state is."""


_DECIMAL_BITS = 14_000


def text_of(key: Any) -> str:
    """How a dict key stands in a path."""
    if type(key) is str:
        return key
    if type(key) is int and key.bit_length() > _DECIMAL_BITS:
        return hex(key)  # Python writes no integer of more than 4,300 digits in decimal
    return repr(key) if type(key) is bytes else str(key)


def section_label(key: Any) -> str:
    """The path of a section itself: its escaped name and a slash."""
    return text_of(key).replace("%", "%25").replace("/", "%2F") + "/"


def section_name(label: str) -> str:
    """The key of the section of a path: the inverse of `section_label`, for str keys."""
    return label.partition("/")[0].replace("%2F", "/").replace("%25", "%")


def clipped(text: str, limit: int = 200) -> str:
    """A text for a message, without its end if it is very long."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def shorten(names: Sequence[str], limit: int = 8) -> str:
    """A list for a message: some names, and how many more there are."""
    shown = ", ".join(repr(clipped(name)) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
