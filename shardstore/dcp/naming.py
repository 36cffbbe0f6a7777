"""DCP's names and our skeletons: a name there is the path of a leaf in the nested state, joined by dots.

Source of the rules: `_traverse.py` of torch 2.13. Dicts are taken apart, whatever their keys, which become text; lists
are if a dict or a tensor stands in them; everything else is one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shardstore.errors import UnsupportedState
from shardstore.tree.skeleton import MAPPINGS, Node, entries, tag, unwrap
from shardstore.tree.state import FLAT_SECTION, MAX_DEPTH, section_label

Path: TypeAlias = tuple[str | int, ...]
"""Where something stands in a state: text for keys of dicts, whole numbers for places in lists."""


def path_of(name: str, planner_data: Any) -> Path:
    """Where a name stands, as the planner says; at the top where it says nothing.

    Raises UnsupportedState for a path that can't be stored.
    """
    path = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    if type(path) is not tuple or not path or any(type(part) not in (str, int) for part in path):
        path = (name,)
    if len(path) > MAX_DEPTH:
        raise UnsupportedState(f"{name[:200]}...: this is nested more than {MAX_DEPTH} levels deep", path=name)
    return path


def label_of(path: Path, *, flat: bool) -> str:
    """Our path of what stands there. `flat`: the state is the section `model` itself."""
    if flat:
        return f"{FLAT_SECTION}{path[0]}"
    return section_label(path[0]) + ".".join(map(str, path[1:]))


# ------------------------------------------------------------------------------------------------- names to a skeleton


class _Branch(dict[str | int, Any]):
    """A dict or list of the state under construction."""


def nested(nodes: Mapping[Path, Node]) -> Node:
    """The skeleton of a state of which these are the leaves. Raises UnsupportedState where paths contradict."""
    root = _Branch()
    for path, node in nodes.items():
        branch = root
        for part in path[:-1]:
            branch = branch.setdefault(part, _Branch())
            if type(branch) is not _Branch:
                raise _torn(path)
        if path[-1] in branch:
            raise _torn(path)
        branch[path[-1]] = node
    return _made(root, ())


def _made(branch: _Branch, path: Path) -> Node:
    made = {key: _made(node, (*path, key)) if type(node) is _Branch else node for key, node in branch.items()}
    places = [key for key in made if isinstance(key, int)]
    if places and len(places) == len(made):
        return [made.get(place, {}) for place in range(max(places) + 1)]  # DCP leaves out empty dicts
    if places:
        raise _torn(path)
    if any(str(key)[:1] == "$" for key in made):
        return {"$": "dict", "items": [list(pair) for pair in made.items()]}
    return made


def _torn(path: Path) -> UnsupportedState:
    name = ".".join(map(str, path))
    return UnsupportedState(f"{name}: the planner gives this name a place that another one contradicts", path=name)


# ------------------------------------------------------------------------------------------------- a skeleton to names


def names_of(state: Node, paths: Sequence[str]) -> dict[str, tuple[Path, Node]]:
    """Name -> path and node of every leaf, as DCP would name them in the state that a load gives.

    Optimizers have their groups under both of DCP's names for them: by place, and by parameter. What has no name there
    is not among them: values per rank, and keys that are equal as text.
    """
    found: dict[str, tuple[Path, Node]] = {}
    twice: set[str] = set()
    for path, node in [*_leaves(state, (), paths), *_by_parameter(state, (), paths)]:
        name = ".".join(map(str, path))
        if name in found:
            twice.add(name)
        found[name] = path, node
    return {name: leaf for name, leaf in found.items() if name not in twice}


def _leaves(node: Node, path: Path, paths: Sequence[str]) -> Iterator[tuple[Path, Node]]:
    node = unwrap(node)
    inner = entries(node, paths)
    if inner is not None:
        for key, item in inner.items():
            yield from _leaves(item, (*path, str(key)), paths)
    elif type(node) is list and _opens(node):
        for place, item in enumerate(node):
            yield from _leaves(item, (*path, place), paths)
    elif tag(node) != "per_rank":
        yield path, node


def _opens(node: Node) -> bool:
    """Whether DCP takes a list apart."""
    return any(
        _opens(item) if type(item) is list else _is_mapping(item) or tag(item) in ("$t", "sparse")
        for item in map(unwrap, node)
    )


def _is_mapping(node: Node) -> bool:
    kind = tag(node)
    return type(node) is dict and (kind is None or kind == "$tensors" or kind in MAPPINGS)


def _by_parameter(node: Node, path: Path, paths: Sequence[str]) -> Iterator[tuple[Path, Node]]:
    """The groups of optimizers as `flatten_optimizer_state_dict` names them: `param_groups.<parameter>.<member>`."""
    inner = entries(unwrap(node), paths) or {}
    groups = inner.get("param_groups")
    if type(groups) is list and "state" in inner:
        for group in groups:
            members = entries(group, paths) or {}
            for name in _texts(members.pop("params", None)):
                for key, item in members.items():
                    yield (*path, f"param_groups.{name}.{key}"), item
    else:
        for key, item in inner.items():
            yield from _by_parameter(item, (*path, str(key)), paths)


def _texts(node: Node) -> list[str]:
    return node if type(node) is list and all(type(item) is str for item in node) else []
