"""What one rank writes of a state that DCP has planned: tensors as leaves, values as skeletons.

Values are encoded on every rank that has them, not only on the one that DCP lets write: so all refuse the same, before
a byte is written, and what differs between ranks under one name is found.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from shardstore import strictjson, tree
from shardstore.dcp.naming import Path, label_of, path_of
from shardstore.hashing import DEFAULT, digest
from shardstore.saving.meshes import digest_of
from shardstore.specs import Box
from shardstore.tree.dtensors import is_dtensor, part_held
from shardstore.tree.joining import renumbered
from shardstore.tree.skeleton import Node, entries, tag
from shardstore.tree.tensors import Leaves

_PRINT = 16


@dataclass
class Taken:
    """What one rank writes.

    `leaves`: tensors; the first are those of the state, by DCP's `names`, others stand in values. `nodes`: the values
    that it writes, by name, with places in `leaves` as numbers. `prints`: of all values that it has. `ties`: name -> an
    earlier name of the very same memory, under which alone it is written.
    """

    leaves: list[tree.Leaf] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    prints: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def take(planner: SavePlanner, plan: SavePlan, local: SavePlan, *, flat: bool) -> Taken:
    """What this rank writes by the final plan. `local`: all that it has.

    Raises UnsupportedState, with the path and a remedy, for what can't be stored.
    """
    lookup = _lookup(planner)
    items = local.items if lookup is not None else plan.items
    wanted = {item.index for item in plan.items}
    taken = Taken()
    where = _Where(local.planner_data, flat=flat)
    _take_tensors(taken, [item for item in items if not _is_value(item)], wanted, planner, where)
    for item in filter(_is_value, items):
        name = item.index.fqn
        node, leaves = _encoded(_value(planner, item, where(name)), where.path(name), where(name))
        taken.prints[name] = digest(DEFAULT, strictjson.dumps(node), digest_of(leaves).encode()).hex()[:_PRINT]
        if item.index in wanted:
            first = len(taken.leaves)
            taken.nodes[name] = renumbered(node, lambda number, first=first: first + number)  # type: ignore[misc]
            taken.leaves += leaves
    return taken


def local_plan(planner: SavePlanner, plan: SavePlan) -> SavePlan:
    """All that this rank has, planned again where the planner has cached it. `plan`: the final one."""
    state = getattr(planner, "state_dict", None)
    if _lookup(planner) is None or not isinstance(state, dict):
        return plan
    return replace(plan, items=create_default_local_save_plan(state, is_coordinator=False).items)


def _is_value(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


class _Where:
    """Where names stand in the state, and our paths for them."""

    def __init__(self, planner_data: Any, *, flat: bool) -> None:
        self._said, self._flat = planner_data, flat

    def path(self, name: str) -> Path:
        return path_of(name, self._said)

    def __call__(self, name: str) -> str:
        return label_of(self.path(name), flat=self._flat)


def _lookup(planner: SavePlanner) -> Callable[[Any], Any] | None:
    """How to get at the objects themselves; None for a planner that changes them on their way to the storage."""
    cls: Any = type(planner)
    changes = any(
        getattr(cls, name, None) is not getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object")
    )
    return None if changes else planner.lookup_object  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- values


def _value(planner: SavePlanner, item: WriteItem, label: str) -> Any:
    """The object of an item. Of a planner that makes bytes in its own way, these must hold nothing but plain values."""
    lookup = _lookup(planner)
    if lookup is not None:
        return lookup(item.index)
    data = planner.resolve_data(item)
    try:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{type(planner).__name__} gives a {type(data).__name__}")
        return torch.load(io.BytesIO(data.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise tree.refuse(
            label, f"the planner makes bytes of this value that are no plain one: {str(error)[:200]}; convert it first"
        ) from error


def _encoded(value: Any, path: Path, label: str) -> tuple[Node, list[tree.Leaf]]:
    """The skeleton of a value, and the tensors in it."""
    state = value
    for key in reversed(path):
        state = {key: state}
    flat = tree.flatten(state)
    node = flat.state
    for key in path:
        node = (entries(node, [leaf.path for leaf in flat.leaves]) or {})[key]
    if flat.nodes:
        raise tree.refuse(label, "DCP knows no values per rank: give each rank's a key of its own, or save without DCP")
    for leaf in flat.leaves:
        if leaf.part is not None:
            raise tree.refuse(leaf.path, "DCP doesn't see a DTensor here; put it into a dict or a list")
    _refuse_objects(node, label)
    return node, flat.leaves


def _refuse_objects(node: Node, label: str) -> None:
    """Objects would come back as their state; DCP itself calls `state_dict` at the top only, and pickles others."""
    pending = [node]
    while pending:
        node = pending.pop()
        if tag(node) == "object":
            raise tree.refuse(
                label, f"a {node['class']} stands here, which DCP would pickle; put its state_dict() here"
            )
        if type(node) in (dict, list):
            inner = node.values() if type(node) is dict else node
            pending += [item for item in inner if type(item) in (dict, list)]


# -------------------------------------------------------------------------------------------------------- tensors


def _take_tensors(
    taken: Taken, items: list[WriteItem], wanted: set[Any], planner: SavePlanner, where: Callable[[str], str]
) -> None:
    lookup = _lookup(planner)
    state = getattr(planner, "state_dict", None) if lookup is not None else None
    table, known = Leaves(), []
    for item in items:
        label = where(item.index.fqn)
        box = _box(item)
        if box.volume or box == Box.whole(_shape(item)):
            whole = state.get(item.index.fqn) if isinstance(state, dict) else None
            _check_layout(whole, box, label)
            _add(table, item, box, lookup(item.index) if lookup else planner.resolve_data(item), label)
            known.append(item)
    for number, item in enumerate(known):
        if item.index not in wanted:
            continue
        leaf, first = table.items[number], table.aliases.get(number)
        target = None if first is None else table.items[first]
        tied = lookup is not None and target is not None and (target.spec, target.part) == (leaf.spec, leaf.part)
        if tied and first is not None and known[first].index.fqn != item.index.fqn:
            taken.ties[item.index.fqn] = known[first].index.fqn
        else:
            taken.names.append(item.index.fqn)
            taken.leaves.append(leaf._replace(path=where(item.index.fqn)))


def _box(item: WriteItem) -> Box:
    chunk = item.tensor_data.chunk  # type: ignore[union-attr]
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _shape(item: WriteItem) -> tuple[int, ...]:
    return tuple(item.tensor_data.size)  # type: ignore[union-attr]


def _check_layout(value: Any, box: Box, label: str) -> None:
    """That DCP's claim where a part lies is right: torch's is known to be wrong for some uneven layouts."""
    if is_dtensor(value) and not hasattr(value.to_local(), "local_shards"):
        part = part_held(value, label)
        if part.box != box:
            raise tree.refuse(
                label, f"DCP claims {box.shape} at {box.origin} for this rank, which is {part.box.shape} at "
                f"{part.box.origin}; redistribute() it, or let its dimension divide evenly",
            )  # fmt: skip


def _add(table: Leaves, item: WriteItem, box: Box, tensor: Any, label: str) -> None:
    if hasattr(tensor, "wait"):
        tensor = tensor.wait()
    if not isinstance(tensor, torch.Tensor):
        raise tree.refuse(label, f"the planner gives a {type(tensor).__name__} for this tensor")
    dtype = item.tensor_data.properties.dtype  # type: ignore[union-attr]
    if tuple(tensor.shape) != box.shape or tensor.dtype != dtype:
        raise tree.refuse(
            label, f"DCP has planned {dtype} {box.shape}, the planner gives {tensor.dtype} {tuple(tensor.shape)}: the "
            "layout of this tensor is in doubt; redistribute() it, or let its dimension divide evenly",
        )  # fmt: skip
    if box == Box.whole(_shape(item)):
        table.add(label, tensor)
    else:
        table.add_part(label, tensor, _shape(item), tree.Part(box, (), ()))
