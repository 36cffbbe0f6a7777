"""What each rank does between joining and leaving."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

from shardstore.dcp import Reader, Writer
from tests.ranks.jobs import step
from tests.ranks.models import build, print_of


def _state(built: dict[str, Any], at: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(built["model"], built["optimizer"])
    return {"model": model, "optimizer": optimizer, "step": at}


@step
def dcp_save(layout: str, url: str, background: bool = False) -> dict[str, str]:
    """Train in a layout and save as DCP's users do."""
    built = build(layout, trained=2)
    state = _state(built, 2)
    if background:
        dcp.async_save(state, storage_writer=Writer(url)).result()
    else:
        dcp.save(state, storage_writer=Writer(url))
    return print_of(built)


@step
def dcp_load(layout: str, url: str) -> list[Any]:
    """Load as DCP's users do, into a model of other values; returns the step, too."""
    built = build(layout, seed=1, trained=1)
    state = _state(built, 0)
    dcp.load(state, storage_reader=Reader(url))
    set_state_dict(
        built["model"], built["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return [print_of(built), state.get("step")]


@step
def dcp_load_weights(layout: str, url: str) -> dict[str, str]:
    """Load without asking for a step, which `shardstore.save` was not given."""
    built = build(layout, seed=1, trained=1)
    state = _state(built, 0)
    del state["step"]
    dcp.load(state, storage_reader=Reader(url))
    set_state_dict(
        built["model"], built["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return print_of(built)


@step
def dcp_cached(url: str) -> bool:
    """Save three times with a planner that caches its plan, each time other values to another place."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for at in range(3):
        whole = torch.arange(7.0) + at
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole * 2, "n": at}
        dcp.save(state, storage_writer=Writer(f"{url}{at}"), planner=DefaultSavePlanner(enable_plan_caching=True))
    return True


class Bad(Writer):
    """A writer on which something happens on rank 1 when its files are written."""

    what = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        here = dist.get_rank() == 1
        if here and self.what == "raise":
            raise OSError("the disk has gone")
        if here and self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write_data(plan, planner)
        if here and self.what == "vanish":
            for folder, _, names in os.walk(self.checkpoint_id):
                for name in names:
                    if f"00002-of-00002-{plan.storage_data.attempt}" in name:
                        os.unlink(os.path.join(folder, name))
        return written


@step
def dcp_trouble(url: str, what: str) -> list[Any]:
    """Save while something goes wrong on rank 1; returns the errors by rank, and whether marks are still refreshed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "n": 1}
    if what == "differ":
        state["n"] = dist.get_rank()
    if what == "refuse":
        state["f"] = print
    Bad.what = what
    try:
        dcp.save(state, storage_writer=Bad(url))
    except CheckpointException as error:
        failures = {rank: f"{type(found[0]).__name__}: {found[0]}" for rank, found in error.failures.items()}
    except RuntimeError as error:  # DCP's collectives, where a rank has died
        failures = {dist.get_rank(): f"{type(error).__name__}"}
    else:
        failures = {}
    return [failures, any(thread.name == "shardstore-mark" for thread in threading.enumerate())]


@step
def dcp_damaged(url: str) -> list[str]:
    """Load what is damaged; returns the errors of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "n": 0}
    try:
        dcp.load(state, storage_reader=Reader(url))
    except CheckpointException as error:
        return [f"{type(found[0]).__name__}: {found[0]}" for found in error.failures.values()]
    return []


@step
def dcp_alone(url: str) -> str:
    """Rank 0 saves a sharded tensor without the others, as `no_dist=True` says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    if dist.get_rank():
        return ""
    try:
        dcp.save(state, storage_writer=Writer(url), no_dist=True)
    except CheckpointException as error:
        return str(error)
    return "saved"
