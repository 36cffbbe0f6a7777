"""The meta file: the skeleton as strict JSON. Its bytes may come from anywhere; `parse_meta` trusts nothing in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from shardstore import strictjson
from shardstore.errors import Damaged, UnsupportedState
from shardstore.schemas import META
from shardstore.tree import scalars
from shardstore.tree.arrays import PARTS
from shardstore.tree.objects import KINDS
from shardstore.tree.skeleton import MAPPINGS, SEQUENCES, tag
from shardstore.tree.state import MAX_DEPTH, MIN_RUN, Flat

MAX_BYTES = 1 << 28
"""Largest meta file that is written or read."""

_MEMBERS = ["schema", "attempt", "flat", "left", "state"]


@dataclass
class Meta:
    """A parsed and validated meta file. `state` is the skeleton (of the section `model` alone if `flat`).

    `merged`: whether it was united from ranks that had different states.
    """

    attempt: str
    flat: bool
    left: list[str]
    state: Any
    merged: bool = False


def dump_meta(flat: Flat, attempt: str) -> bytes:
    """The bytes of the meta file of one save. Raises UnsupportedState if it gets too large."""
    merged = {"merged": True} if flat.merged else {}
    try:
        data = strictjson.dumps(
            {
                "schema": META.current, "attempt": attempt, "flat": flat.flat, **merged, "left": flat.left,
                "state": flat.state,
            }
        )  # fmt: skip
    except RecursionError:
        raise UnsupportedState("the state is nested too deeply for the stack that is left here", path="") from None
    if len(data) > MAX_BYTES:
        raise UnsupportedState(
            f"the plain values of the state take {len(data)} bytes as JSON, more than the {MAX_BYTES} allowed; "
            "store large data as tensors or numpy arrays",
            path="",
        )
    return data


def parse_meta(data: bytes | memoryview, *, count: int, file: str = "meta") -> Meta:
    """Read and validate a meta file of a checkpoint with `count` tensors.

    Raises Damaged (naming `file`) for anything that the format doesn't allow, UnsupportedVersion for another schema.
    """
    try:
        top = strictjson.loads(data, limit=MAX_BYTES)
        if not isinstance(top, dict):
            raise scalars.BadNode("it is no JSON object")
        top = META.upgrade(top, file)
        _check_top(top)
        _Check(count).node(top["state"], 0)
        _check_root(top["state"], flat=top["flat"])
    except RecursionError:
        raise Damaged(f"{file} is not valid: it is nested too deeply", file=file) from None
    except (strictjson.BadJson, scalars.BadNode) as error:
        raise Damaged(f"{file} is not valid: {error}", file=file) from None
    return Meta(top["attempt"], top["flat"], top["left"], top["state"], "merged" in top)


def _check_top(top: dict[str, Any]) -> None:
    left = top.get("left")
    if [name for name in top if name != "merged"] != _MEMBERS or top.get("merged", True) is not True:
        _bad("its members are not the right ones")
    if type(top["attempt"]) is not str or type(top["flat"]) is not bool:
        _bad("attempt or flat has the wrong type")
    if type(left) is not list or any(type(path) is not str for path in left):
        _bad("left is no list of paths")


def _check_root(state: Any, *, flat: bool) -> None:
    """The state itself is a dict, or where it is flat, an object."""
    kind = tag(state)
    if type(state) is not dict or not (
        kind is None or kind in MAPPINGS or (flat and kind in ("$tensors", "object", "custom"))
    ):
        _bad("the state is no dict")


def _bad(why: str) -> NoReturn:
    raise scalars.BadNode(why)


class _Check:
    """Validates a skeleton: known tags with exactly their members, tensor numbers below `count`, each at most once."""

    def __init__(self, count: int) -> None:
        self._used = bytearray(count)

    def node(self, node: Any, depth: int) -> None:
        if depth > 2 * MAX_DEPTH + 8:
            _bad("it is nested too deeply")
        cls = type(node)
        if cls is dict:
            self._object(node, depth)
        elif cls is list:
            for item in node:
                self.node(item, depth + 1)
        elif cls is int:
            if not -scalars.EXACT <= node <= scalars.EXACT:
                _bad("a large int is not written as text")
        elif cls is float and not math.isfinite(node):
            _bad("a number is out of range")

    def _object(self, node: dict[str, Any], depth: int) -> None:
        first = next(iter(node), "")
        if first[:1] != "$":
            for key, item in node.items():
                if key[:1] == "$":
                    _bad(f"the key {key[:80]!r} must be written in another way")
                self.node(item, depth + 1)
        elif first == "$t":
            self._tensor(node)
        elif first == "$tensors":
            self._run(node, depth)
        else:
            self._tagged(node, node.get("$"), depth)

    def _tagged(self, node: dict[str, Any], kind: Any, depth: int) -> None:
        if type(kind) is not str:
            _bad("a tag is no text")
        if kind in scalars.DECODERS:
            scalars.decode(node)
        elif kind in MAPPINGS:
            self._dict(node, kind, depth)
        elif kind in SEQUENCES:
            self._sequence(node, kind, depth)
        elif kind in _SPECIAL:
            _SPECIAL[kind](self, node, depth)
        else:
            _bad(f"the tag {kind[:80]!r} is unknown")

    def _dict(self, node: dict[str, Any], kind: str, depth: int) -> None:
        _members(node, {"$", "items"}, {"versions"} if kind == "OrderedDict" else set())
        for pair in _list(node["items"]):
            if len(_list(pair)) != len(("key", "value")):
                _bad("an entry of a dict is no pair")
            self._key(pair[0], depth + 1)
            self.node(pair[1], depth + 1)
        self._versions(node, depth)

    def _versions(self, node: dict[str, Any], depth: int) -> None:
        if "versions" in node:
            versions = node["versions"]
            if type(versions) is not dict or next(iter(versions), "") in ("$t", "$tensors"):
                _bad("versions is no dict")
            self.node(versions, depth + 1)

    def _sequence(self, node: dict[str, Any], kind: str, depth: int) -> None:
        _members(node, {"$", "items"})
        check = self.node if kind == "tuple" else self._key
        for item in _list(node["items"]):
            check(item, depth + 1)

    def _key(self, node: Any, depth: int) -> None:
        """Something hashable: a scalar, or a tuple or frozenset of such."""
        if type(node) is list or depth > 2 * MAX_DEPTH + 8:
            _bad("a dict key can't be a list")
        if type(node) is dict and node.get("$") in ("tuple", "frozenset"):
            _members(node, {"$", "items"})
            for item in _list(node["items"]):
                self._key(item, depth + 1)
        elif type(node) is dict and (node.get("$") not in scalars.DECODERS or node["$"] == "bytearray"):
            _bad("a dict key is of a type that can't be one")
        else:
            self.node(node, depth)

    def _tensor(self, node: Any) -> None:
        if type(node) is not dict:
            _bad("a tensor is missing")
        _members(node, {"$t"}, {"p", "g"})
        self._flags(node)
        self._use(node["$t"], 1)

    def _flags(self, node: dict[str, Any]) -> None:
        if node.get("p", True) is not True or type(node.get("g", True)) is not bool:
            _bad("p or g of a tensor has the wrong value")

    def _run(self, node: dict[str, Any], depth: int) -> None:
        inner = node["$tensors"]
        if len(node) != 1 or type(inner) is not dict:
            _bad("$tensors stands wrongly")
        _members(inner, {"prefix", "first", "count"}, {"type", "versions"})
        ordered = inner.get("type", "OrderedDict") == "OrderedDict" and ("type" in inner or "versions" not in inner)
        if type(inner["prefix"]) is not str or not ordered:
            _bad("prefix or type of $tensors has the wrong value")
        if type(inner["count"]) is not int or inner["count"] < MIN_RUN:
            _bad("$tensors has fewer than two")
        self._use(inner["first"], inner["count"])
        self._versions(inner, depth)

    def _use(self, first: Any, count: int) -> None:
        if type(first) is not int or not 0 <= first <= len(self._used) - count:
            _bad("the number of a tensor is out of range")
        if any(self._used[first : first + count]):
            _bad(f"tensor {first} stands twice")
        self._used[first : first + count] = b"\1" * count

    def _sparse(self, node: dict[str, Any], _depth: int) -> None:
        layout, coo = node.get("layout"), node.get("layout") == "sparse_coo"
        if type(layout) is not str or layout not in PARTS:
            _bad("the layout of a sparse tensor is unknown")
        _members(node, {"$", "layout", "shape", "parts"} | ({"coalesced"} if coo else set()), {"p", "g"})
        self._flags(node)
        if coo and type(node["coalesced"]) is not bool:
            _bad("coalesced is no bool")
        if any(type(size) is not int or not 0 <= size < 2**63 for size in _list(node["shape"])):
            _bad("the shape of a sparse tensor is wrong")
        if type(node["parts"]) is not dict or list(node["parts"]) != list(PARTS[layout]):
            _bad("the parts of a sparse tensor are not the right ones")
        for part in node["parts"].values():
            self._tensor(part)

    def _ndarray(self, node: dict[str, Any], _depth: int) -> None:
        _members(node, {"$", "t", "dtype"})
        scalars.numpy_dtype(node["dtype"], array=True)
        self._use(node["t"], 1)

    def _kept(self, node: dict[str, Any], depth: int) -> None:
        _members(node, {"$", "kind", "class", "value"})
        if type(node["kind"]) is not str or node["kind"] not in KINDS or type(node["class"]) is not str:
            _bad("kind or class of an object has the wrong value")
        self.node(node["value"], depth + 1)

    def _custom(self, node: dict[str, Any], depth: int) -> None:
        _members(node, {"$", "name", "value"})
        if type(node["name"]) is not str or not node["name"]:
            _bad("the name of a registered type is missing")
        self.node(node["value"], depth + 1)

    def _per_rank(self, node: dict[str, Any], depth: int) -> None:
        _members(node, {"$", "values"})
        values = _list(node["values"])
        if not values:
            _bad("a value per rank has no values")
        for value in values:
            self.node(value, depth + 1)


_SPECIAL = {
    "sparse": _Check._sparse,  # noqa: SLF001
    "ndarray": _Check._ndarray,  # noqa: SLF001
    "object": _Check._kept,  # noqa: SLF001
    "custom": _Check._custom,  # noqa: SLF001
    "per_rank": _Check._per_rank,  # noqa: SLF001
}


def _members(node: dict[str, Any], must: set[str], may: set[str] | None = None) -> None:
    if node.keys() - (may or set()) != must:
        _bad("the members of a node are not the right ones")


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        _bad("a list is missing")
    return value
