"""States that differ from rank to rank, as those of pipeline stages do, united into one.

Dicts are united by key, tensors by path; whatever stands on several ranks must be equal. The groups of optimizers are
united by the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from shardstore.errors import UnsupportedState
from shardstore.specs import TensorSpec
from shardstore.tree.joining import renumbered
from shardstore.tree.skeleton import MAPPINGS, Node, apart, describe, entries, items, key_of, object_kind, tag
from shardstore.tree.state import FLAT_SECTION, section_label, text_of
from shardstore.tree.tensors import refuse

REMEDY = (
    "make it equal on all ranks, or wrap it in shardstore.PerRank if each rank has its own; of sharded tensors make "
    "DTensors; save optimizers themselves, not their state_dict(), so that their state has names"
)


@dataclass
class Member:
    """The state of the ranks that have the very same one. `ranks`: which, for messages."""

    state: Node
    paths: Sequence[str]
    specs: Sequence[TensorSpec]
    aliases: Mapping[int, int]
    left: Sequence[str]
    flat: bool
    ranks: Sequence[int]


@dataclass
class Union:
    """The united state. `numbers`: for each member, the numbers that its tensors have here."""

    state: Node = None
    paths: list[str] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    flat: bool = False
    numbers: list[list[int]] = field(default_factory=list)


def unite(members: Sequence[Member]) -> Union:
    """One state of several. Raises UnsupportedState, with a path and a remedy, for what contradicts."""
    first = members[0]
    union = Union(flat=first.flat)
    places: dict[str, tuple[int, int]] = {}
    for member in members:
        if member.flat != first.flat:
            raise UnsupportedState(f"rank {member.ranks[0]} gives a flat state_dict, rank {first.ranks[0]} sections")
        union.numbers.append([_place(union, places, member, number) for number in range(len(member.paths))])
        union.left += [path for path in member.left if path not in union.left]
    _unite_aliases(union, members)
    nodes = [_spread(member, numbers) for member, numbers in zip(members, union.numbers, strict=True)]
    label = FLAT_SECTION if first.flat else ""
    merge = _Merge(union, [member.ranks[0] for member in members])
    union.state = nodes[0]
    for at, node in enumerate(nodes[1:], 1):
        union.state = merge.node(union.state, node, label, label, at)
    return union


def _place(union: Union, places: dict[str, tuple[int, int]], member: Member, number: int) -> int:
    """The number of a tensor in the union. Raises where two ranks mean different tensors by one path."""
    path, spec = member.paths[number], member.specs[number]
    place, rank = places.setdefault(path, (len(union.paths), member.ranks[0]))
    if place == len(union.paths):
        union.paths.append(path)
        union.specs.append(spec)
    elif union.specs[place] != spec:
        old = union.specs[place]
        raise refuse(
            path,
            f"rank {rank} has {old.dtype} {old.shape}, rank {member.ranks[0]} {spec.dtype} {spec.shape}; {REMEDY}",
        )
    return place


def _unite_aliases(union: Union, members: Sequence[Member]) -> None:
    """Ties on which all members agree that have the tensor."""
    stored: set[int] = set()
    for member, numbers in zip(members, union.numbers, strict=True):
        for number, place in enumerate(numbers):
            target = member.aliases.get(number)
            if target is None or union.aliases.setdefault(place, numbers[target]) != numbers[target]:
                stored.add(place)
    for place in stored & union.aliases.keys():
        del union.aliases[place]
    for place, target in list(union.aliases.items()):
        if target in union.aliases:
            union.aliases[place] = union.aliases[target]


def _spread(member: Member, numbers: Sequence[int]) -> Node:
    """A skeleton in which every tensor stands by itself, with its number in the union."""
    return renumbered(_apart(member.state, member.paths), numbers.__getitem__)


def _apart(node: Node, paths: Sequence[str]) -> Node:
    """A skeleton without runs."""
    if type(node) is list:
        return [_apart(item, paths) for item in node]
    if type(node) is not dict:
        return node
    if tag(node) == "$tensors":
        inner = entries(node, paths) or {}
        return apart(node, inner)
    return {key: _apart(item, paths) for key, item in node.items()}


class _Merge:
    """Merges skeletons, two at a time."""

    def __init__(self, union: Union, ranks: Sequence[int]) -> None:
        self._union, self._ranks = union, ranks

    def node(self, one: Node, other: Node, label: str, prefix: str, at: int) -> Node:
        if one == other and repr(one) == repr(other):  # 1 and True, and the two zeros, are not the same
            return one
        kind = tag(one)
        if kind != tag(other) or type(one) is not type(other):
            self._differ(one, other, label, at)
        if kind == "object" and object_kind(one) == object_kind(other):
            merge = self._optimizer if object_kind(one) == "optimizer" else self.node
            return {**one, "value": merge(one["value"], other["value"], label, prefix, at)}
        if kind is None and type(one) is dict:
            return self._mapping(one, other, prefix, at)
        if kind in MAPPINGS:
            return self._tagged(one, other, label, prefix, at)
        mine, theirs = items(one), items(other)
        if mine is None or theirs is None or len(mine) != len(theirs):
            self._differ(one, other, label, at)
        merged = [
            self.node(a, b, f"{prefix}{place}", f"{prefix}{place}.", at)
            for place, (a, b) in enumerate(zip(mine, theirs, strict=True))
        ]
        return merged if type(one) is list else {**one, "items": merged}

    def _mapping(self, one: dict[str, Node], other: dict[str, Node], prefix: str, at: int) -> Node:
        merged = dict(one)
        for key, item in other.items():
            path = prefix + key if prefix else section_label(key)
            merged[key] = self.node(one[key], item, path, f"{path}." if prefix else path, at) if key in one else item
        return merged

    def _tagged(self, one: Node, other: Node, label: str, prefix: str, at: int) -> Node:
        """An OrderedDict, a Counter, or a dict with odd keys."""
        keys = [key for key, _ in one["items"]]
        merged = dict(zip(map(repr, keys), one["items"], strict=True))
        for key, item in other["items"]:
            shown = text_of(key_of(key))
            path = prefix + shown if prefix else section_label(key_of(key))
            name = repr(key)
            if name in merged:
                item = self.node(merged[name][1], item, path, f"{path}." if prefix else path, at)  # noqa: PLW2901
            merged[name] = [key, item]
        node = {**one, "items": list(merged.values())}
        if "versions" in one or "versions" in other:
            versions = one.get("versions", {}), other.get("versions", {})
            node["versions"] = self.node(*versions, f"{label} (versions)", f"{label} (versions) ", at)
        return node

    def _optimizer(self, one: Node, other: Node, label: str, prefix: str, at: int) -> Node:
        """An optimizer: state by name, and groups that are the same but for their parameters."""
        groups = one.get("param_groups"), other.get("param_groups")
        if not all(type(found) is list for found in groups) or len(groups[0]) != len(groups[1]):
            self._differ(one, other, f"{prefix}param_groups", at)
        united = []
        for place, (mine, theirs) in enumerate(zip(*groups, strict=True)):
            lists = {
                name: [*mine[name], *(item for item in theirs[name] if item not in set(mine[name]))]
                for name in ("params", "param_names")
                if name in mine and name in theirs
            }
            path = f"{prefix}param_groups.{place}"
            united.append(self.node({**mine, **lists}, {**theirs, **lists}, path, f"{path}.", at))
        mine, theirs = ({**side, "param_groups": united} for side in (one, other))
        return self.node(mine, theirs, label, prefix, at)

    def _differ(self, one: Node, other: Node, label: str, at: int) -> NoReturn:
        shown = [self._shown(node) for node in (one, other)]
        raise refuse(label, f"rank {self._ranks[0]} has {shown[0]}, rank {self._ranks[at]} {shown[1]}; {REMEDY}")

    def _shown(self, node: Node) -> str:
        sequence = items(node)
        if sequence is not None:
            return f"{describe(node, self._union.specs)} of {len(sequence)} items"
        return describe(node, self._union.specs) if type(node) in (dict, list) else repr(node)[:80]
