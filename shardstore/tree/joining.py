"""Skeletons of several ranks: numbers moved, and the values that each rank has of its own put in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardstore.errors import UnsupportedState
from shardstore.tree.skeleton import Node


def renumbered(node: Node, number: Callable[[int], int]) -> Node:
    """A skeleton with other numbers of tensors. Runs of tensors must stay runs."""
    cls = type(node)
    if cls is list:
        return [renumbered(item, number) for item in node]
    if cls is not dict:
        return node
    if "$t" in node:
        return {**node, "$t": number(node["$t"])}
    if "$tensors" in node:
        run = node["$tensors"]
        return {"$tensors": {**run, "first": number(run["first"])}}
    if node.get("$") == "ndarray":
        return {**node, "t": number(node["t"])}
    return {key: renumbered(item, number) for key, item in node.items()}


def per_rank_nodes(node: Node) -> Iterator[dict[str, Any]]:
    """The nodes of all PerRanks."""
    pending = [node]
    while pending:
        node = pending.pop()
        if type(node) is dict:
            if node.get("$") == "per_rank":
                yield node
            elif "$tensors" not in node:
                pending.extend(item for item in node.values() if type(item) in (dict, list))
        elif type(node) is list:
            pending.extend(item for item in node if type(item) in (dict, list))


def join(state: Node, given: Sequence[Mapping[str, Node]], offsets: Sequence[int]) -> None:
    """Put the values of every rank into the PerRanks of a skeleton.

    `given`: by rank, path -> node. `offsets`: by rank, the number of the first of its own tensors.
    Raises UnsupportedState where a rank lacks one, or has one that the others lack.
    """
    found = {node["values"]: node for node in per_rank_nodes(state)}
    for rank, nodes in enumerate(given):
        for path in found.keys() ^ nodes.keys():
            raise UnsupportedState(
                f"{path}: not every rank has a PerRank here (rank {rank} differs): give one to each", path=path
            )
    for path, node in found.items():
        node["values"] = [
            renumbered(nodes[path], lambda number, first=first: first + number)  # type: ignore[misc]
            for nodes, first in zip(given, offsets, strict=True)
        ]
