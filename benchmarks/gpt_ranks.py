"""A GPT-2 with AdamW, sharded by FSDP2 over the ranks of this process's group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.states import GPT_124M, TOY, Tree, gpt_shapes, leaves

SIZES = {"fsdp-2": GPT_124M, "fsdp-4": GPT_124M, "toy-fsdp": TOY}


def build(name: str) -> Tree:
    """Weights and moments as DTensors, in plain dicts, after one step on random gradients."""
    with torch.device("meta"):
        model = _module(gpt_shapes(**SIZES[name]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.to_local().detach().uniform_()
        parameter.grad = torch.rand_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    moments = {
        key: {name: optimizer.state[parameter][key] for name, parameter in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {"model": {name: tensor.detach() for name, tensor in model.state_dict().items()}, "optimizer": moments}


def _module(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    root = nn.Module()
    for name, shape in shapes.items():
        *places, last = name.split(".")
        at = root
        for place in places:
            if not hasattr(at, place):
                at.add_module(place, nn.Module())
            at = getattr(at, place)
        at.register_parameter(last, nn.Parameter(torch.empty(shape)))
    return root


def parts(state: Tree) -> Iterator[torch.Tensor]:
    """The memory of this rank's parts."""
    return (tensor.to_local() for _, tensor in leaves(state))


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor on rank 0, nothing on the others; every rank calls it."""
    full = tensor.full_tensor()
    return full if dist.get_rank() == 0 else torch.empty(0)
