"""Renaming: the paths of a checkpoint as the target calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shardstore.errors import InvalidArgument, Mismatch
from shardstore.tree.select import near_names, rebuilt
from shardstore.tree.skeleton import ABSENT, Node, entries, leaves, tag
from shardstore.tree.state import Tensors, section_label, section_name, shorten, text_of

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


class Renamed:
    """The sections of a checkpoint after a rename.

    `sections`: what kept its place, or moved as a whole section. `moved`: leaves that moved alone, by their new paths.
    `labels`: the new paths of all tensors. `names`: parameter names, from old to new, for optimizers.
    """

    def __init__(self, sections: Mapping[Any, Node], table: Tensors, rename: Rename) -> None:
        self.sections: dict[Any, Node] = {}
        self.moved: dict[str, Node] = {}
        self.names: dict[str, str] = {}
        self._table = table
        self._rename = _function(sections, table, rename)
        self._labels = list(table.labels)
        whole: dict[Any, Node] = {}
        for key, node in sections.items():
            label = section_label(key)
            target = self._whole(node, label)
            if target is None:
                self.sections[key] = self._move(node, label, label)
            elif target == label:
                self.sections[key] = node
            else:
                _add(whole, section_name(target), node)
        self.sections.update(whole)  # what was renamed on purpose takes the place of what merely stood there
        self.table = Tensors(table.paths, table.specs, self._labels)

    def _whole(self, node: Node, label: str) -> str | None:
        """The new label of a section whose leaves all keep their names and their company; None if they don't."""
        found = list(leaves(node, label, label, self._table.labels, self._table.paths))
        new = [self._rename(path) for path, _ in found]
        heads = {path.partition("/")[0] + "/" for path in new}
        if len(heads) != 1 or any(
            path.partition("/")[2] != to.partition("/")[2] for (path, _), to in zip(found, new, strict=True)
        ):
            return None
        head = heads.pop()
        if head != label:
            for (path, number), to in zip(found, new, strict=True):
                self._follow(path, to, number)
        return head

    def _follow(self, path: str, to: str, number: int | None) -> None:
        """Note the new path of a tensor, and what that makes of the name of a parameter."""
        if number is None:
            return
        self._labels[number] = to
        old, new = path.partition("/")[2], to.partition("/")[2]
        self.names.setdefault(old, new)
        self.names.setdefault(path.replace("/", ".", 1), to.replace("/", ".", 1))

    def _move(self, node: Node, label: str, prefix: str) -> Node:
        """Take the leaves that are renamed out of a node; returns what stays."""
        kind = tag(node)
        if kind == "object":
            if node["kind"] != "module":
                return node  # opaque: an optimizer follows the names of its parameters
            kept = self._move(node["value"], label, prefix)
            return ABSENT if kept is ABSENT else {**node, "value": kept}
        inner = entries(node, self._table.paths)
        if not inner:
            return self._leaf(node, label, prefix)
        parts = {}
        for key, item in inner.items():
            path = prefix + text_of(key)
            parts[key] = self._move(item, path, f"{path}.")
        if all(parts[key] is item for key, item in inner.items()):
            return node
        return rebuilt(node, parts, inner)

    def _leaf(self, node: Node, label: str, prefix: str) -> Node:
        if tag(node) in ("$t", "ndarray"):
            label = self._table.labels[node["$t" if "$t" in node else "t"]]
        to = self._rename(label)
        if to == label:
            return node
        _add(self.moved, to, node)
        for path, number in leaves(node, label, prefix, self._table.labels, self._table.paths):
            self._follow(path, to + path[len(label) :], number)
        return ABSENT


def _add(places: dict[Any, Node], key: Any, node: Node) -> None:
    if key in places:
        raise InvalidArgument(f"rename gives two things the same path {key!r}; nothing was loaded")
    places[key] = node


def _function(sections: Mapping[Any, Node], table: Tensors, rename: Rename) -> Callable[[str], str]:
    """A rename as a function from path to path. In a mapping, a key without a slash renames a whole section."""
    if not isinstance(rename, Mapping):
        return _checked(rename)
    known: list[str] = []
    for key, node in sections.items():
        label = section_label(key)
        known += [label[:-1], *(path for path, _ in leaves(node, label, label, table.labels, table.paths))]
    unknown = tuple(name for name in rename if name not in set(known))
    if unknown:
        raise Mismatch(_unknown(unknown, known), missing=unknown)
    return lambda path: _mapped(rename, path)


def _mapped(rename: Mapping[str, str], path: str) -> str:
    section, _, name = path.partition("/")
    return rename.get(path) or (f"{rename[section]}/{name}" if section in rename else path)


def _checked(rename: Callable[[str], str]) -> Callable[[str], str]:
    def checked(path: str) -> str:
        to = rename(path)
        if type(to) is not str or "/" not in to:
            raise InvalidArgument(f"rename made {to!r} of {path!r}; it must return a path, section/name")
        return to

    return checked


def _unknown(unknown: Sequence[str], known: Sequence[str]) -> str:
    near = [name for wrong in unknown[:5] for name in near_names(wrong, known)]
    hint = f"; did you mean {shorten(near)}?" if near else ""
    return f"rename speaks of {shorten(unknown)}, which the checkpoint doesn't have{hint}"
