"""What the ranks tell the coordinator, and how it makes one state of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardstore import strictjson, tree
from shardstore.dcp.naming import label_of, nested, path_of
from shardstore.dcp.taking import Taken
from shardstore.errors import StoreError, UnsupportedState
from shardstore.index import Contribution, dump_contribution, parse_contribution
from shardstore.specs import Box, TensorSpec, covers
from shardstore.tree.joining import renumbered
from shardstore.tree.tensors import NAMES

_LIMIT = 1 << 30


@dataclass
class Said:
    """What one rank has written. `taken.leaves` are only those that stand in values, without their tensors."""

    contribution: Contribution
    taken: Taken
    flat: bool


def tell(taken: Taken, flat: bool, contribution: Contribution) -> tuple[bytes, bytes]:  # noqa: FBT001
    """What this rank has written, as bytes for the coordinator."""
    own = [[leaf.path, leaf.spec.dtype, list(leaf.spec.shape)] for leaf in taken.leaves[len(taken.names) :]]
    about = {
        "names": taken.names,
        "own": own,
        "nodes": taken.nodes,
        "prints": taken.prints,
        "ties": taken.ties,
        "flat": flat,
    }
    return dump_contribution(contribution), strictjson.dumps(about)


def hear(told: tuple[bytes, bytes], algorithm: str, rank: int) -> Said:
    """Understand what a rank has told."""
    about = strictjson.loads(told[1], limit=_LIMIT)
    nothing = torch.empty(0, device="cpu")
    own = [tree.Leaf(path, TensorSpec(dtype, tuple(shape)), nothing) for path, dtype, shape in about["own"]]
    taken = Taken(own, about["names"], about["nodes"], about["prints"], about["ties"])
    return Said(parse_contribution(told[0], algorithm, rank), taken, about["flat"])


def gather(metadata: Metadata, said: Sequence[Said], first: Iterable[str], *, flat: bool) -> tree.Flat:
    """The state of all ranks. The pieces in their contributions get the numbers that tensors have in it.

    `first`: names in the order that the state shall have, as far as the coordinator knows it.
    Raises UnsupportedState where ranks contradict each other, or have not written all.
    """
    return _Gathering(metadata, said, first, flat=flat).gather()


class _Gathering:
    def __init__(self, metadata: Metadata, said: Sequence[Said], first: Iterable[str], *, flat: bool) -> None:
        self._entries = metadata.state_dict_metadata
        order = dict.fromkeys([*first, *self._entries])
        self._order = [name for name in order if name in self._entries]
        self._paths = {name: path_of(name, metadata.planner_data) for name in self._order}
        self._said = said
        self._flat = tree.Flat(flat=flat)
        self._numbers: dict[str, int] = {}
        self._nodes: dict[str, Any] = {}

    def gather(self) -> tree.Flat:
        self._require_form()
        for name in self._order:
            entry = self._entries[name]
            if isinstance(entry, TensorStorageMetadata):
                self._numbers[name] = len(self._flat.leaves)
                self._flat.leaves.append(_leaf(self._label(name), entry))
        self._compare_values()
        for one in self._said:
            self._renumber(one)
        self._tie()
        if len(self._said) == 1:  # with several ranks the index itself is checked
            self._require_whole()
        nodes = {self._paths[name]: self._node(name) for name in self._order}
        self._flat.state = nested(nodes)
        return self._flat

    def _require_form(self) -> None:
        tensors = all(isinstance(entry, TensorStorageMetadata) for entry in self._entries.values())
        flat = bool(self._entries) and tensors and all(len(path) == 1 for path in self._paths.values())
        if any(one.flat != flat for one in self._said):
            raise UnsupportedState("the state has changed its form since its plan was cached; save without that cache")

    def _label(self, name: str) -> str:
        return label_of(self._paths[name], flat=self._flat.flat)

    def _node(self, name: str) -> Any:
        if name in self._numbers:
            return {"$t": self._numbers[name]}
        if name not in self._nodes:
            raise _unwritten(self._label(name))
        return self._nodes[name]

    def _compare_values(self) -> None:
        """DCP would keep one of them, and never say that there were others."""
        seen: dict[str, tuple[int, str]] = {}
        for rank, one in enumerate(self._said):
            for name, found in one.taken.prints.items():
                before, known = seen.setdefault(name, (rank, found))
                if known != found:
                    raise tree.refuse(
                        self._label(name), f"rank {before} and rank {rank} have different values here, of which DCP "
                        "would keep one; make them equal, or give each rank a key of its own",
                    )  # fmt: skip

    def _renumber(self, one: Said) -> None:
        first = len(self._flat.leaves)
        table = [self._number(name) for name in one.taken.names]
        table += range(first, first + len(one.taken.leaves))
        self._flat.leaves += one.taken.leaves
        for file in one.contribution.files:
            file.pieces = [table[number] for number in file.pieces]
        self._nodes.update({name: renumbered(node, table.__getitem__) for name, node in one.taken.nodes.items()})

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            raise StoreError(f"a rank has written {name!r}, which is no tensor in DCP's metadata")
        return self._numbers[name]

    def _tie(self) -> None:
        aliases = self._flat.aliases
        for one in self._said:
            for name, target in one.taken.ties.items():
                if aliases.setdefault(self._number(name), self._number(target)) != self._number(target):
                    raise tree.refuse(self._label(name), "ranks have tied this tensor to different ones; clone() it")
        paths = [leaf.path for leaf in self._flat.leaves]
        if len(set(paths)) != len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise tree.refuse(twice, "two tensors have this path; rename one of them")

    def _require_whole(self) -> None:
        boxes: dict[int, list[Box]] = {}
        for one in self._said:
            for at, file in enumerate(one.contribution.files):
                parts = one.contribution.parts.get(at, {})
                for place, number in enumerate(file.pieces):
                    whole = Box.whole(self._flat.leaves[number].spec.shape)
                    boxes.setdefault(number, []).append(parts.get(place, whole))
        for number, leaf in enumerate(self._flat.leaves):
            stored = number not in self._flat.aliases
            if stored and not (number in boxes and covers(leaf.spec.shape, boxes[number])):
                raise _unwritten(leaf.path)


def _leaf(label: str, entry: TensorStorageMetadata) -> tree.Leaf:
    spec = TensorSpec(NAMES[entry.properties.dtype], tuple(entry.size))
    return tree.Leaf(label, spec, torch.empty(0, device="cpu"))


def _unwritten(label: str) -> UnsupportedState:
    return tree.refuse(
        label, "the ranks that save don't hold all of it; let every rank save that has a part, with its process group"
    )
