"""Partial loads: what `only` keeps of a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardstore.errors import Mismatch
from shardstore.patterns import compiled
from shardstore.tree.meta import Meta
from shardstore.tree.registry import codec_of
from shardstore.tree.skeleton import ABSENT, ATOMS, Node, apart, entries, items, leaves, numbers, tag
from shardstore.tree.state import FLAT_SECTION, Tensors, section_label, shorten, text_of


@dataclass
class Selection:
    """What is loaded. `numbers`: the tensors needed. `host`: those that are needed on the CPU (numpy arrays)."""

    state: Any
    flat: bool
    numbers: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)


def select(meta: Meta, paths: Sequence[str], patterns: str | Sequence[str] | None = None) -> Selection:
    """Keep what matches any of the patterns, all without patterns.

    Entries of dicts are kept one by one; a list, a tuple and an object that is neither Module nor optimizer whole, if
    anything in them is selected. Raises Mismatch for a pattern that matches nothing, and for a registered type that
    isn't registered here.
    """
    node = meta.state
    if patterns is not None:
        chooser = Chooser(patterns)
        table = Tensors(paths, (), paths)
        node = _prune_root(node, chooser, table, flat=meta.flat)
        chooser.require_hits(root_labels(root_sections(meta.state, paths, flat=meta.flat), table))
    found = Selection(node, meta.flat, set(numbers(node, paths)))
    _inspect(node, found)
    return found


def _inspect(node: Node, found: Selection) -> None:
    """Find arrays, and types that are registered nowhere, before anything is loaded."""
    for inner in special_nodes(node):
        if inner["$"] == "ndarray":
            found.host.add(inner["t"])
        else:
            codec_of(inner["name"])


def special_nodes(node: Node) -> Iterable[Node]:
    """All nodes of numpy arrays and registered types."""
    pending = [node]
    while pending:
        node = pending.pop()
        if type(node) is list:
            pending.extend(item for item in node if type(item) in (dict, list))
        elif type(node) is dict and "$tensors" not in node:
            if node.get("$") in ("ndarray", "custom"):
                yield node
            pending.extend(item for item in node.values() if type(item) in (dict, list))


class Chooser:
    """Whether a path matches any of some patterns, and which of them have matched something."""

    def __init__(self, patterns: str | Sequence[str], whole: frozenset[str] = frozenset({"stateful"})) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        self.whole = whole
        self._tests = [compiled(pattern) for pattern in self.patterns]
        self._idle = set(range(len(self._tests)))

    def test(self, label: str) -> bool:
        """Whether a path matches, without keeping count."""
        return any(test(label) for test in self._tests)

    def __call__(self, label: str) -> bool:
        if not self._idle:
            return self.test(label)
        hits = {number for number, test in enumerate(self._tests) if test(label)}
        self._idle -= hits
        return bool(hits)

    def any_of(self, labels: Iterable[str]) -> bool:
        """Whether one of the paths matches; looks at all of them as long as a pattern hasn't matched anything."""
        found = False
        for label in labels:
            found = self(label) or found
            if found and not self._idle:
                break
        return found

    def require_hits(self, labels: Iterable[str]) -> None:
        """Raise Mismatch for patterns that matched nothing; `labels` are all the paths that there are."""
        if not self._idle:
            return
        idle = tuple(self.patterns[number] for number in sorted(self._idle))
        known = list(labels)
        near = [name for pattern in idle for name in near_names(pattern, known)]
        hint = f"; did you mean {shorten(near)}?" if near else f"; there are {shorten(known)}"
        raise Mismatch(
            f"nothing in the checkpoint matches {shorten(idle)}{hint} (patterns are matched against section/name)",
            missing=idle,
        )


_LONG = 500  # characters of a path beyond which nobody looks for a near one


def near_names(name: str, known: Sequence[str], limit: int = 3) -> list[str]:
    """Names that look like `name`; only the first thousands are compared."""
    return difflib.get_close_matches(name[:_LONG], [other for other in known[:4000] if len(other) <= _LONG], limit, 0.6)


def root_sections(node: Node, paths: Sequence[str], *, flat: bool) -> dict[Any, Node]:
    """Section -> node."""
    if flat:
        return {FLAT_SECTION[:-1]: node}
    return entries(node, paths) or {}


def root_labels(sections: Mapping[Any, Node], table: Tensors) -> Iterator[str]:
    """The paths of all leaves of some sections."""
    for key, node in sections.items():
        label = section_label(key)
        yield from (path for path, _ in leaves(node, label, label, table.labels, table.paths))


def _prune_root(node: Node, chooser: Chooser, table: Tensors, *, flat: bool) -> Node:
    if flat:
        kept = prune(node, FLAT_SECTION, FLAT_SECTION, chooser, table)
    else:
        sections = entries(node, table.paths) or {}
        kept = rebuilt(node, prune_sections(sections, chooser, table), sections)
    return {} if kept is ABSENT else kept


def prune_sections(sections: Mapping[Any, Node], chooser: Chooser, table: Tensors) -> dict[Any, Node]:
    """What the chooser keeps of each section; ABSENT if nothing."""
    kept = {}
    for key, node in sections.items():
        label = section_label(key)
        kept[key] = prune(node, label, label, chooser, table)
    return kept


def prune(node: Node, label: str, prefix: str, chooser: Chooser, table: Tensors) -> Node:
    """What the chooser keeps of a node; ABSENT if nothing."""
    kind = tag(node)
    if kind == "$tensors":
        return _prune_run(node, chooser, table)
    if kind == "object" and node["kind"] not in chooser.whole:
        kept = prune(node["value"], label, prefix, chooser, table)
        return ABSENT if kept is ABSENT else {**node, "value": kept}
    inner = entries(node, table.paths)
    if inner:
        parts = {}
        for key, item in inner.items():
            path = prefix + text_of(key)
            parts[key] = prune(item, path, f"{path}.", chooser, table)
        return rebuilt(node, parts, inner)
    return node if chooser.any_of(_names(node, label, prefix, table)) else ABSENT


def _names(node: Node, label: str, prefix: str, table: Tensors) -> Iterator[str]:
    """Every path by which a node that is kept whole may be selected."""
    if tag(node) not in ("$t", "ndarray"):
        yield label
    for path, number in leaves(node, label, prefix, table.labels, table.paths):
        if number is not None or path != label:
            yield path
    for place, item in enumerate(items(node) or ()):
        if type(item) in ATOMS:
            yield f"{prefix}{place}"


def rebuilt(node: Node, parts: Mapping[Any, Node], inner: Mapping[Any, Node]) -> Node:
    """A dict's node with those of its `inner` entries whose `parts` are not ABSENT; ABSENT if that leaves none."""
    kept = {key: part for key, part in parts.items() if part is not ABSENT}
    if not kept and inner:
        return ABSENT
    kind = tag(node)
    if kind is None:
        return kept
    if kind == "$tensors":
        return apart(node, kept)
    chosen = [
        [key, parts[name]] for (key, _), name in zip(node["items"], inner, strict=True) if parts[name] is not ABSENT
    ]
    return {**node, "items": chosen}


def _prune_run(node: Node, chooser: Chooser, table: Tensors) -> Node:
    inner = node["$tensors"]
    first = inner["first"]
    chosen = [chooser(label) for label in table.labels[first : first + inner["count"]]]
    if all(chosen):
        return node
    inner_nodes = entries(node, table.paths) or {}
    parts = {key: part if keep else ABSENT for (key, part), keep in zip(inner_nodes.items(), chosen, strict=True)}
    return rebuilt(node, parts, inner_nodes)
