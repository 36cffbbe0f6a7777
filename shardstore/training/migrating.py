"""Another structure of the state than at the save: migrations, and the way of their result into live objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from shardstore import tree
from shardstore.errors import InvalidArgument, Mismatch, brief

State: TypeAlias = dict[str, Any]
Migration: TypeAlias = Callable[[State], State]


@dataclass(frozen=True, slots=True)
class Schema:
    """The name of the state's structure, and what leads to it from earlier ones, oldest first.

    Each migration makes of the state of its schema that of the next one in the dict, the last one that of `name`.
    The key None stands for states that were saved without a schema. Raises InvalidArgument.
    """

    name: str | None
    migrations: Mapping[str | None, Migration]

    def __post_init__(self) -> None:
        given: Any = self.migrations
        if type(self.name) not in (str, type(None)) or self.name == "":
            raise InvalidArgument(f"schema is a name, as 'mine.v2', not {brief(self.name)}")
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"migrations is a dict of schema to function, not {brief(given)}")
        if given and self.name is None:
            raise InvalidArgument("migrations lead to a schema: name it, as in schema='mine.v2'")
        for old, step in given.items():
            if old == self.name or type(old) not in (str, type(None)) or not callable(step):
                raise InvalidArgument(
                    f"migrations go from earlier schemas by functions, not {brief(old)}: {brief(step)}"
                )

    def chain(self, saved: str | None, url: str) -> list[tuple[str | None, Migration]]:
        """The migrations from a saved schema to this one, in order; none if it is this one. Raises Mismatch."""
        if saved == self.name:
            return []
        known = list(self.migrations)
        if saved not in known:
            there = f"migrations= begins at {', '.join(map(repr, known))}" if known else "there is no migrations="
            raise Mismatch(
                f"{url} has the schema {saved!r}, this training {self.name!r}, and nothing leads from one to the other "
                f"({there}): give migrations={{{saved!r}: function}}, or begin a new run"
            )
        return list(self.migrations.items())[known.index(saved) :]


def migrate(state: State, chain: list[tuple[str | None, Migration]]) -> State:
    """What a chain of migrations makes of a loaded state. Raises Mismatch where one fails."""
    for old, step in chain:
        try:
            state = step(state)
        except Exception as error:
            raise Mismatch(f"the migration from the schema {old!r} failed: {type(error).__name__}: {error}") from error
        if type(state) is not dict:
            raise Mismatch(f"the migration from the schema {old!r} gave {brief(state)}: it must return the state")
    return state


def put_into(data: State, target: State) -> State:
    """Fill live objects and tensors with loaded data, as a load into them does; returns `target`.

    Where the target has an object, the data is taken for the state of one. Raises Mismatch before anything is touched.
    """
    flat, live = tree.flatten(data), tree.flatten(target)
    flat.state, flat.left = _dressed(flat.state, live.state), live.left
    leaves = flat.leaves
    meta = tree.parse_meta(tree.dump_meta(flat, "0" * 16), count=len(leaves))
    paths, specs = [leaf.path for leaf in leaves], [leaf.spec for leaf in leaves]
    binding = tree.bind(meta, paths, specs, flat.aliases, target)
    with torch.no_grad():
        for number, tensor, box in binding.fills:
            tensor.copy_(leaves[number].tensor[box.slices] if box else leaves[number].tensor)
    fresh = {number: leaves[number].tensor.clone().to(device) for number, device in binding.fresh.items()}
    state: State = binding.finish(fresh)
    return state


def _dressed(node: Any, live: Any) -> Any:
    """The skeleton of data with the objects of a live one: those are compared and filled by their kinds."""
    if type(live) is not dict or _is_object(node):
        return node
    if _is_object(live):
        return {**live, "value": node}
    if type(node) is not dict or "$" in node or "$" in live:
        return node
    return {key: _dressed(inner, live.get(key)) for key, inner in node.items()}


def _is_object(node: Any) -> bool:
    return type(node) is dict and node.get("$") == "object"
