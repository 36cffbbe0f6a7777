"""What the ranks of a test do: each is a process of its own, forked from one that has imported all."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardstore.ranks import distributed

JOBS: dict[str, Callable[..., Any]] = {}
STEPS: dict[str, Callable[..., Any]] = {}


MODULES = (
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict",
    "shardstore.saving", "shardstore.loading", "tests.ranks.steps", "tests.ranks.training_steps", "tests.ranks.faulty",
    "tests.ranks.states", "tests.ranks.stages", "tests.ranks.groups",
)  # fmt: skip


def warm_up() -> None:
    """Import what takes long, on one thread."""
    torch.set_num_threads(1)
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("tests.ranks.models").warm_up()


def step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function known by its name, for `Ranks.run`."""
    STEPS[function.__name__] = function
    return function


def rank(
    name: str, rank: int, size: int, port: int, prefix: str, seconds: float, arguments: dict[str, Any], hosted: int = 0
) -> Any:  # fmt: skip
    """Be one rank: join the others, do a step, leave. `hosted`: a port at which rank 0 itself holds the store."""
    os.environ["SHARDSTORE_TIMEOUT_SECONDS"] = str(seconds)
    distributed._GRACE_SECONDS = seconds
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    limit = timedelta(seconds=60)
    if hosted:  # in rank 0, as without torchrun
        store = dist.TCPStore("127.0.0.1", hosted, is_master=rank == 0, timeout=limit)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=size, timeout=limit)
    try:
        return STEPS[name](**arguments)
    finally:
        dist.destroy_process_group()


JOBS["rank"] = rank
