"""Reading a validated skeleton: what its nodes are, the entries of dicts, the paths and numbers of leaves."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from shardstore.errors import Damaged
from shardstore.tree import scalars
from shardstore.tree.state import text_of

Node = Any


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
"""Stands where the checkpoint has nothing, or nothing that is selected."""

MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
ATOMS = (str, int, float, bool, type(None))


def damaged(why: str) -> Damaged:
    """The error for a skeleton that is valid JSON but contradicts itself or the index."""
    return Damaged(f"the skeleton of this checkpoint is not valid: {why}", file="meta")


def tag(node: Node) -> str | None:
    """The tag of a node: `$t`, `$tensors`, or what stands under `$`; None for plain JSON."""
    if type(node) is not dict or not node:
        return None
    first = next(iter(node))
    if first == "$":
        return str(node["$"])
    return first if first in ("$t", "$tensors") else None


def unwrap(node: Node) -> Node:
    """The value of an object's node; any other node as it is."""
    return node["value"] if tag(node) == "object" else node


def object_kind(node: Node) -> str | None:
    """The kind of an object; None for any other node."""
    return str(node["kind"]) if tag(node) == "object" else None


def run_keys(inner: dict[str, Any], paths: Sequence[str]) -> list[str]:
    """The keys of a `$tensors` dict, which are the paths without the prefix."""
    prefix, first = inner["prefix"], inner["first"]
    own = paths[first : first + inner["count"]]
    cut = len(prefix)
    if len(own) != inner["count"] or not (min(own).startswith(prefix) and max(own).startswith(prefix)):
        raise damaged(f"paths of tensors from number {first} on don't begin with {prefix[:80]!r}")
    return [path[cut:] for path in own]


def entries(node: Node, paths: Sequence[str]) -> dict[Any, Node] | None:
    """Key -> node of a dict of whatever type; None if the node is no dict."""
    kind = tag(node)
    if kind is None:
        return node.copy() if type(node) is dict else None
    if kind == "$tensors":
        inner = node["$tensors"]
        return {key: {"$t": number} for number, key in enumerate(run_keys(inner, paths), inner["first"])}
    return dict(pairs(node)) if kind in MAPPINGS else None


def apart(node: Node, inner: dict[Any, Node]) -> Node:
    """The node of a `$tensors` dict as that of any other dict with the same entries."""
    run = node["$tensors"]
    versions = {"versions": run["versions"]} if "versions" in run else {}
    return {"$": run.get("type", "dict"), "items": [list(pair) for pair in inner.items()], **versions}


def pairs(node: Node) -> list[tuple[Any, Node]]:
    """Key and node of every entry of a tagged dict."""
    try:
        made = [(key_of(key), item) for key, item in node["items"]]
        count = len(dict(made))
    except TypeError:
        raise damaged("a dict has a key that can't be one") from None
    if count != len(made):
        raise damaged("a dict has the same key twice")
    return made


def items(node: Node) -> list[Node] | None:
    """The nodes of a list or tuple; None if it is neither."""
    if type(node) is list:
        return node
    return list(node["items"]) if tag(node) == "tuple" else None


def key_of(node: Node) -> Any:
    """The dict key, or member of a set, that a node stands for."""
    if type(node) is not dict:
        return node
    kind = node["$"]
    if kind in SEQUENCES:
        return SEQUENCES[kind](key_of(item) for item in node["items"])
    return scalars.decode(node)


def leaves(
    node: Node, label: str, prefix: str, labels: Sequence[str], paths: Sequence[str]
) -> Iterator[tuple[str, int | None]]:
    """Path and tensor number (None for plain values) of every leaf. A list of plain values counts as one leaf."""
    kind = tag(node)
    if kind == "$t":
        yield labels[node["$t"]], node["$t"]
    elif kind == "$tensors":
        first = node["$tensors"]["first"]
        yield from zip(
            labels[first : first + node["$tensors"]["count"]],
            range(first, first + node["$tensors"]["count"]),
            strict=True,
        )
    elif kind == "ndarray":
        yield labels[node["t"]], node["t"]
    elif kind == "sparse":
        for part in node["parts"].values():
            yield labels[part["$t"]], part["$t"]
    elif kind in ("object", "custom"):
        yield from leaves(node["value"], label, prefix, labels, paths)
    else:
        inner = _inner(node, paths)
        if not inner:
            yield label, None
        for key, item in inner.items():
            path = prefix + text_of(key)
            yield from leaves(item, path, f"{path}.", labels, paths)


def _inner(node: Node, paths: Sequence[str]) -> dict[Any, Node]:
    """What stands in a container that is no object; nothing for lists of plain values."""
    if tag(node) == "per_rank":
        return {f"rank{rank}": value for rank, value in enumerate(node["values"])}
    inner = entries(node, paths)
    if inner is not None:
        return inner
    sequence = items(node)
    return {} if sequence is None or all(type(item) in ATOMS for item in sequence) else dict(enumerate(sequence))


def numbers(node: Node, paths: Sequence[str]) -> Iterator[int]:
    """The numbers of all tensors in a node."""
    return (number for _, number in leaves(node, "", "", range_labels, paths) if number is not None)


class _NoLabels(Sequence[str]):
    """Labels for those who don't want any."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        return [""] * (index.stop - index.start) if isinstance(index, slice) else ""


range_labels: Sequence[str] = _NoLabels()


def describe(node: Node, specs: Sequence[Any]) -> str:
    """What a node is, for messages."""
    kind = tag(node)
    if kind == "$t":
        spec = specs[node["$t"]]
        return f"a {spec.dtype} tensor of shape {tuple(spec.shape)}"
    if kind == "object":
        return f"the state of a {node['class']} ({node['kind']})"
    names = {
        None: f"a {type(node).__name__}",
        "$tensors": "a dict of tensors",
        "per_rank": "a PerRank",
        "custom": f"a {node['name']}" if kind == "custom" else "",
    }
    return names.get(kind, f"a {kind}")
