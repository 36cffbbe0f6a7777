"""What can be known before the first step: that the state can be saved, and that there is room for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

import torch

from shardstore import header, tree
from shardstore.errors import InvalidArgument, StoreError, brief
from shardstore.plan import ShardOptions, Tensors, plan_shards
from shardstore.run import Run
from shardstore.run.names import SECTION
from shardstore.storage import LocalStore, unwrap

_ATTEMPT = "0" * 16


def positive(name: str, value: Any, *types: type) -> Any:
    """The value. Raises InvalidArgument unless it is a number above 0 of one of the types, or None."""
    if value is not None and not (type(value) in types and value > 0):
        raise InvalidArgument(f"{name} must be a number above 0, or None, not {brief(value)}")
    return value


def check_sections(state: Any) -> None:
    """That a state is a dict of sections, with none of ours. Raises InvalidArgument, UnsupportedState."""
    if type(state) is not dict or not all(isinstance(name, str) for name in state):
        raise InvalidArgument("the state of a training is a dict of sections: wrap it, as in {'model': model}")
    if SECTION in state:
        raise InvalidArgument(f"the section {SECTION!r} is reserved: give yours another name")
    if tree.flatten(state).flat:
        raise InvalidArgument("a dict of nothing but tensors is one section: wrap it, as in {'model': state}")


def planned_bytes(state: dict[str, Any], options: ShardOptions) -> int:
    """A dry run of a save: how many bytes its files would have. Raises what the save would, but for the store."""
    flat = tree.flatten(state)
    paths, specs = [leaf.path for leaf in flat.leaves], [leaf.spec for leaf in flat.leaves]
    stored = Tensors(paths, specs, (number for number in range(len(paths)) if number not in flat.aliases))
    shards = plan_shards(stored, options, _ATTEMPT)
    rows = (zip(shard.names(paths), map(specs.__getitem__, shard.tensors), strict=True) for shard in shards)
    data = sum(stored.bytes_of(shard.tensors) for shard in shards)
    return data + sum(len(header.build(row)) for row in rows) + len(tree.dump_meta(flat, _ATTEMPT))


def check_room(run: Run, nbytes: int) -> None:
    """That a checkpoint of so many bytes fits where the run lies. Only file systems can tell; others pass.

    Raises StoreError with ENOSPC.
    """
    if not isinstance(unwrap(run.store), LocalStore):
        return
    place = run.url if os.path.isdir(run.url) else os.path.dirname(run.url)
    try:
        found = os.statvfs(place)
    except OSError:
        return  # whatever is wrong there is said when the run is made
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < nbytes:  # without blocks: a network file system that doesn't know
        raise StoreError(
            f"{place} has {free / 1e6:,.1f} MB free, and one checkpoint takes {nbytes / 1e6:,.1f} MB: make room, or "
            "choose another place",
            errno=errno.ENOSPC, filename=place,
        )  # fmt: skip


def has_gradients(state: Mapping[str, Any]) -> bool:
    """Whether a parameter of a Module of the state has a gradient."""
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    return any(parameter.grad is not None for module in modules for parameter in module.parameters())
