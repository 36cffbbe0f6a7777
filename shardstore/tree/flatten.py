"""From a state to numbered tensors and a skeleton. The caller's objects are only read."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardstore.errors import UnsupportedState
from shardstore.specs import Lazy
from shardstore.tree import arrays, scalars
from shardstore.tree.dtensors import Layouts, is_dtensor, local_of, part_held
from shardstore.tree.modules import module_state, own_buffers
from shardstore.tree.objects import functions_of, kind_of, no_state, stateful_state
from shardstore.tree.optimizers import Names, optimizer_state
from shardstore.tree.per_rank import PerRank
from shardstore.tree.registry import BY_CLASS, Codec
from shardstore.tree.state import FLAT_SECTION, MAX_DEPTH, MIN_RUN, Flat, clipped, section_label, text_of
from shardstore.tree.tensors import Leaves, class_name, refuse

Node = Any


def flatten(state: Any, rank: int = 0) -> Flat:
    """Take a state apart. Raises UnsupportedState, with the path and a remedy, for whatever can't be stored exactly.

    The leaves are the caller's own tensors; plain values are copied into the skeleton. A bare Module and a non-empty
    dict of nothing but tensors are flat: they are the section `model`. `rank`: whose the state is.
    """
    if not isinstance(state, nn.Module) and type(state) not in (dict, OrderedDict):
        raise UnsupportedState(
            f"a state is a dict or a Module, not a {class_name(state)}; wrap it, as in {{'model': ...}}", path=""
        )
    walk = _Walk(state, rank)
    flat = isinstance(state, nn.Module) or is_flat(state)
    try:
        node = walk.node(state, FLAT_SECTION, FLAT_SECTION) if flat else walk.root(state)
    except RecursionError:
        raise UnsupportedState("the state is nested too deeply for the stack that is left here", path="") from None
    shared = walk.leaves
    lazy = shared.lazy | {len(shared.items) + number: tensor for number, tensor in walk.own.lazy.items()}
    return Flat(
        shared.items, shared.aliases, node, flat, walk.left, lazy, walk.own.items, walk.per_rank_nodes,
        walk.buffers,
    )  # fmt: skip


def is_flat(state: Mapping[Any, Any]) -> bool:
    """Whether a dict is the section `model` itself: only tensors under str keys, or a Module's state_dict."""
    if not state or set(map(type, state)) != {str}:
        return False
    return hasattr(state, "_metadata") or all(isinstance(value, (torch.Tensor, Lazy)) for value in state.values())


class _Walk:
    """One walk over a state. `label`: the path of a value if it is a leaf; `prefix`: how its children's paths begin."""

    def __init__(self, state: Any, rank: int) -> None:
        self.leaves = Leaves()
        self.own = Leaves()
        self.per_rank_nodes: dict[str, Node] = {}
        self._layouts: Layouts = {}
        self.buffers: set[int] = set()
        self._rank = rank
        self.left: list[str] = []
        self._state = state
        self._names: Names | None = None
        self._above: dict[int, None] = {}  # ids of the containers around the value
        self._lenient = 0  # inside an object's state, where functions are left out

    def root(self, state: Mapping[Any, Any]) -> Node:
        self._enter(state, "")
        pairs = []
        for key, value in state.items():
            label = section_label(key)
            pairs.append((key, self.node(value, label, label)))
        return self._pairs(state, pairs, "")

    def node(self, value: Any, label: str, prefix: str) -> Node:
        """The skeleton of one value."""
        cls = type(value)
        codec = BY_CLASS.get(cls)
        if codec is not None:
            return self._custom(codec, value, label, prefix)
        encode = scalars.ENCODERS.get(cls)
        try:
            if encode is not None:
                return encode(value)
            handle = _HANDLERS.get(cls) or _handler(value)
            if handle is None:
                raise refuse(label, _advice(value))
            self._enter(value, label)
            node = handle(self, value, label, prefix)
            del self._above[id(value)]
        except scalars.Unsupported as error:
            raise refuse(label, str(error)) from None
        return node

    def _enter(self, value: Any, label: str) -> None:
        if id(value) in self._above:
            raise refuse(label, "this contains itself; break the cycle")
        if len(self._above) >= MAX_DEPTH:
            raise refuse(clipped(label), f"this is nested more than {MAX_DEPTH} levels deep; flatten it")
        self._above[id(value)] = None

    # -------------------------------------------------------------------------------------- containers

    def mapping(self, value: dict[Any, Any], label: str, prefix: str) -> Node:
        lean = self._lean(value, prefix, label)
        if lean is not None:
            return lean
        pairs = []
        for key, item in value.items():
            path = prefix + text_of(key)
            if self._lenient and no_state(item):
                self.left.append(path)
            else:
                pairs.append((key, self.node(item, path, f"{path}.")))
        return self._pairs(value, pairs, label)

    def _pairs(self, value: Mapping[Any, Any], pairs: list[tuple[Any, Node]], label: str) -> Node:
        """The node of a dict whose values are nodes already."""
        cls = type(value)
        if cls is dict and all(type(key) is str and key[:1] != "$" for key, _ in pairs):
            return dict(pairs)
        node = {"$": cls.__name__, "items": [[self._key(key, label), item] for key, item in pairs]}
        return self._versions(value, node, label)

    def _versions(self, value: Mapping[Any, Any], node: Node, label: str) -> Node:
        versions = getattr(value, "_metadata", None)
        if versions is None:
            return node
        plain = {name: dict(about) if isinstance(about, dict) else about for name, about in versions.items()}
        return {**node, "versions": self.mapping(plain, f"{label} (versions)", f"{label} (versions) ")}

    def _lean(self, value: dict[Any, Any], prefix: str, label: str) -> Node | None:
        """One node for a whole dict of plain tensors, which costs nothing for each; None where that doesn't do."""
        count = len(value)
        if count < MIN_RUN or type(value) is Counter or set(map(type, value.values())) != {torch.Tensor}:
            return None
        keys, tensors = list(value), list(value.values())
        if set(map(type, keys)) != {str} or any(map(_needs_grad, tensors)):
            return None
        first = self.leaves.add_run(prefix, keys, tensors)
        if first is None:
            return None
        inner: dict[str, Any] = {"prefix": prefix, "first": first, "count": count}
        if type(value) is OrderedDict:
            inner = self._versions(value, {**inner, "type": "OrderedDict"}, label)
        return {"$tensors": inner}

    def _key(self, key: Any, label: str) -> Node:
        """The node of a dict key or a member of a set."""
        cls = type(key)
        if cls in scalars.HASHABLE:
            return scalars.ENCODERS[cls](key)
        if isinstance(key, np.generic):
            return scalars.encode_numpy(key)
        if cls is tuple or cls is frozenset:
            return {"$": cls.__name__, "items": [self._key(item, label) for item in key]}
        raise refuse(
            label, f"a {class_name(key)} can't be a dict key or stand in a set here; use a str, an int or a tuple"
        )

    def sequence(self, value: list[Any] | tuple[Any, ...], _label: str, prefix: str) -> Node:
        items = _numbers(value)
        if items is None:
            items = [self._item(item, f"{prefix}{place}") for place, item in enumerate(value)]
        return items if type(value) is list else {"$": "tuple", "items": items}

    def _item(self, item: Any, path: str) -> Node:
        if self._lenient and no_state(item):
            self.left.append(path)
            return None
        return self.node(item, path, f"{path}.")

    def members(self, value: set[Any] | frozenset[Any], label: str, _prefix: str) -> Node:
        items = [self._key(item, label) for item in value]
        return {
            "$": type(value).__name__,
            "items": sorted(items, key=repr),
        }  # the order of a set differs in every process

    # ----------------------------------------------------------------------------------------- leaves

    def tensor(self, value: torch.Tensor, label: str, prefix: str) -> Node:
        split = is_dtensor(value)
        parameter = type(value) is nn.Parameter or (split and isinstance(value, nn.Parameter))
        flags: dict[str, Any] = {"p": True} if parameter else {}
        if value.requires_grad != bool(flags):
            flags["g"] = value.requires_grad
        if split:
            if self.leaves is self.own:
                raise refuse(label, "a DTensor is no value of one rank; take it out of the PerRank, or give to_local()")
            part = part_held(value, label, self._layouts)
            return {"$t": self.leaves.add_part(label, local_of(value).detach(), value.shape, part), **flags}
        parts = arrays.sparse_parts(value)
        if parts is None:
            return {"$t": self.leaves.add(label, value), **flags}
        node = arrays.sparse_node(value)
        node["parts"] = {name: {"$t": self.leaves.add(f"{prefix}{name}", part)} for name, part in parts.items()}
        return {**node, **flags}

    def lazy(self, value: Lazy, label: str, _prefix: str) -> Node:
        return {"$t": self.leaves.add_lazy(label, value)}

    def array(self, value: np.ndarray[Any, Any], label: str, _prefix: str) -> Node:
        tensor, text = arrays.from_numpy(value)
        return {"$": "ndarray", "t": self.leaves.add(label, tensor), "dtype": text}

    def scalar(self, value: np.generic, _label: str, _prefix: str) -> Node:
        return scalars.encode_numpy(value)

    def _custom(self, codec: Codec, value: Any, label: str, prefix: str) -> Node:
        self._enter(value, label)
        try:
            inner = codec.encode(value)
        except Exception as error:
            raise refuse(label, f"the encoder of {codec.name!r} failed: {error}") from error
        node = {"$": "custom", "name": codec.name, "value": self.node(inner, label, prefix)}
        del self._above[id(value)]
        return node

    # ---------------------------------------------------------------------------------------- objects

    def module(self, value: nn.Module, label: str, prefix: str) -> Node:
        first = len(self.leaves.items)
        node = self.node(module_state(value, label), label, prefix)
        names = own_buffers(value)
        if names:
            added = enumerate(self.leaves.items[first:], first)
            self.buffers.update(number for number, leaf in added if leaf.path.removeprefix(prefix) in names)
        return _object("module", value, node)

    def per_rank(self, value: PerRank, label: str, prefix: str) -> Node:
        if self.leaves is self.own:
            raise refuse(label, "a PerRank stands inside of another one; take the inner one away")
        shared, self.leaves = self.leaves, self.own
        if label in self.per_rank_nodes:
            raise refuse(label, "two PerRanks have this path; rename one of them")
        own = f"{prefix}rank{self._rank}"
        try:
            self.per_rank_nodes[label] = self.node(value.value, own, f"{own}.")
        finally:
            self.leaves = shared
        return {"$": "per_rank", "values": label}

    def optimizer(self, value: torch.optim.Optimizer, label: str, prefix: str) -> Node:
        self._names = self._names or Names(self._state)
        state = optimizer_state(value, self._names, label)
        if state is None:
            return self.stateful(value, label, prefix)
        self._lenient += 1
        node = self.node(state, label, prefix)
        self._lenient -= 1
        return _object("optimizer", value, node)

    def stateful(self, value: Any, label: str, prefix: str) -> Node:
        state = stateful_state(value, label)
        self._lenient += 1
        node = self.node(state, label, prefix)
        self._lenient -= 1
        self.left.extend(path for path in functions_of(value, prefix) if path not in self.left)
        return _object("stateful", value, node)


def _object(kind: str, value: Any, node: Node) -> Node:
    return {"$": "object", "kind": kind, "class": class_name(value), "value": node}


def _numbers(value: list[Any] | tuple[Any, ...]) -> list[Node] | None:
    """The nodes of nothing but plain numbers and strings, in a hurry, since these may be millions; None where not."""
    kinds = set(map(type, value))
    if not kinds <= _NUMBERS:
        return None
    small = kinds == {int} and -scalars.EXACT <= min(value) and max(value) <= scalars.EXACT
    if small or kinds <= _AS_THEY_ARE:
        return list(value)
    try:
        return [scalars.ENCODERS[type(item)](item) for item in value]
    except scalars.Unsupported:
        return None  # to be refused with its place


_needs_grad = operator.attrgetter("requires_grad")
_AS_THEY_ARE = frozenset({str, bool, type(None)})
_NUMBERS = _AS_THEY_ARE | {int, float}

_HANDLERS: dict[type, Callable[[_Walk, Any, str, str], Node]] = {
    dict: _Walk.mapping,
    OrderedDict: _Walk.mapping,
    Counter: _Walk.mapping,
    list: _Walk.sequence,
    tuple: _Walk.sequence,
    set: _Walk.members,
    frozenset: _Walk.members,
    torch.Tensor: _Walk.tensor,
    nn.Parameter: _Walk.tensor,
    np.ndarray: _Walk.array,
    PerRank: _Walk.per_rank,
}


def _handler(value: Any) -> Callable[[_Walk, Any, str, str], Node] | None:
    """How a value of another class is stored, if it is."""
    if isinstance(value, np.generic):
        return _Walk.scalar
    if isinstance(value, torch.Tensor):
        return _Walk.tensor  # which refuses it by name
    if isinstance(value, Lazy):
        return _Walk.lazy
    kind = kind_of(value)
    return None if kind is None else getattr(_Walk, kind)


_REMEDIES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda v: isinstance(v, enum.Enum), "store its .name or .value"),
    (lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type), "store dataclasses.asdict(it)"),
    (lambda v: isinstance(v, tuple) and hasattr(v, "_asdict"), "store it._asdict() or tuple(it)"),
    (lambda v: isinstance(v, torch.Generator), "store its get_state()"),
    (lambda v: hasattr(v, "getstate"), "store its getstate()"),
    (lambda v: isinstance(v, np.random.Generator), "store its bit_generator.state"),
    (lambda v: isinstance(v, np.ndarray), "store numpy.asarray(it)"),
    (lambda v: isinstance(v, dict), "store dict(it)"),
    (lambda v: isinstance(v, list | tuple) or hasattr(v, "maxlen"), "store list(it)"),
    (lambda v: isinstance(v, str | int | float), "convert it to the plain built-in type"),
    (
        lambda v: hasattr(v, "state_dict") or hasattr(v, "load_state_dict"),
        "give it both state_dict and load_state_dict",
    ),
    (callable, "code is not stored: leave it out, and build it anew after the load"),
)


def _advice(value: Any) -> str:
    remedy = next((text for test, text in _REMEDIES if test(value)), "convert it to plain values")
    return f"a {class_name(value)} can't be stored; {remedy}, or use shardstore.register_type"
