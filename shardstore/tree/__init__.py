"""State to leaves and back: a nested state becomes numbered tensors and a JSON skeleton, and the other way round.

Nothing here does I/O. `flatten` never changes the caller's objects; `bind` touches nothing either: what it plans is
carried out by the loader, which fills `Binding.fills`, makes `Binding.fresh`, and then calls `Binding.finish`.

Terms: a *section* is a top-level key of the state. A tensor's *path* is `section/name`, a label that is unique in its
checkpoint; the structure lies in the skeleton, which refers to tensors by number. `docs/format.md` ("The skeleton") is
the specification.
"""

from __future__ import annotations

from shardstore.patterns import matches
from shardstore.tree.bind import bind
from shardstore.tree.binding import Binding, Report
from shardstore.tree.destinations import Fill
from shardstore.tree.flatten import flatten
from shardstore.tree.joining import join
from shardstore.tree.merging import REMEDY, Member, Union, unite
from shardstore.tree.meta import Meta, dump_meta, parse_meta
from shardstore.tree.per_rank import PerRank
from shardstore.tree.registry import register_type
from shardstore.tree.restore import outline, restore
from shardstore.tree.select import Selection, select
from shardstore.tree.state import Flat, Leaf, Part
from shardstore.tree.tensors import refuse

__all__ = [
    "REMEDY",
    "Binding",
    "Fill",
    "Flat",
    "Leaf",
    "Member",
    "Meta",
    "Part",
    "PerRank",
    "Report",
    "Selection",
    "Union",
    "bind",
    "dump_meta",
    "flatten",
    "join",
    "matches",
    "outline",
    "parse_meta",
    "refuse",
    "register_type",
    "restore",
    "select",
    "unite",
]
