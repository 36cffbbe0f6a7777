"""Pipeline stages: every rank has other layers, and its optimizer only theirs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardstore
from tests.ranks.faulty import told
from tests.ranks.jobs import step
from tests.ranks.models import print_of


class Model(nn.Module):
    """A whole model, or one stage of it: the first has the embedding, the last one as well, tied to its head."""

    def __init__(self, stages: range, of: int) -> None:
        super().__init__()
        ends = {0, of - 1}
        if ends & set(stages):
            self.embedding = nn.Embedding(7, 4)
        for layer in (2 * stage + at for stage in stages for at in range(2)):
            self.add_module(f"layer{layer}", nn.Linear(4, 4, bias=layer % 2 == 0))
        if of - 1 in stages:
            self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embedding"):
            x = x + self.embedding(torch.tensor([1, 2, 6]))
        for name, part in self.named_children():
            x = x if name == "embedding" else torch.tanh(part(x))
        return x @ self.embedding.weight.T if hasattr(self, "embedding") else x


def stage_of(rank: int, size: int, stages: int) -> int:
    """Which stage a rank belongs to: ranks of one stage stand together."""
    return rank * stages // size


def build(stages: int, seed: int = 0, trained: int = 2, *, fsdp: bool = False, whole: bool = False) -> dict[str, Any]:
    """The part of a model that this rank has, with its AdamW in two groups."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    at = stage_of(rank, size, stages)
    torch.manual_seed(seed)
    model = Model(range(stages), stages)
    if not whole:
        own = Model(range(at, at + 1), stages)
        own.load_state_dict({name: w for name, w in model.state_dict().items() if name in own.state_dict()})
        model = own
    if fsdp:
        model = _spread(model, stages, size)
    norms = [param for name, param in model.named_parameters() if "bias" in name or "norm" in name]
    others = [param for name, param in model.named_parameters() if not ("bias" in name or "norm" in name)]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, foreach=False)
    for turn in range(trained):
        _train(model, optimizer, turn)
    return {"model": model, "optimizer": optimizer, "step": trained}


def _spread(model: nn.Module, stages: int, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (stages, size // stages), mesh_dim_names=("pp", "dp"))
    return fully_shard(model, mesh=mesh["dp"])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int) -> None:
    """A step with gradients that only names and turns decide, so that what stages share stays equal."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(turn * 1000 + sum(map(ord, name)))
        grad = torch.randn(param.shape, generator=generator)
        if hasattr(param, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


@step
def save_stages(url: str, stages: int, fsdp: bool = False, trained: int = 2) -> dict[str, Any]:
    """Save what the stages have; the prints of it."""
    state = build(stages, fsdp=fsdp, trained=trained)
    outcome = told(lambda: shardstore.save(state, url))
    return {**outcome, "print": print_of(state)}


@step
def load_stages(url: str, stages: int, fsdp: bool = False) -> dict[str, str]:
    """Load into stages, whose optimizers have never stepped."""
    state = build(stages, seed=1, trained=0, fsdp=fsdp)
    shardstore.load(url, into=state)
    return print_of(state)


@step
def load_whole(url: str, stages: int, fsdp: bool = False) -> dict[str, str]:
    """Load into the whole model, on every rank alike."""
    state = build(stages, seed=1, trained=0, whole=True)
    shardstore.load(url, into=state)
    return print_of(state)


@step
def unequal_stages(url: str, fsdp: bool = False) -> dict[str, Any]:
    """Stages that have the embedding in common, with other values."""
    state = build(2, fsdp=fsdp)
    with torch.no_grad():
        weight = state["model"].embedding.weight
        (weight.to_local() if fsdp else weight)[-1, 3] += dist.get_rank()
    return told(lambda: shardstore.save(state, url))


@step
def load_stages_of_whole(url: str, stages: int) -> dict[str, str]:
    """Load the checkpoint of a whole model into stages, which want a part of it."""
    state = build(stages, seed=1, trained=0)
    shardstore.load(url, into=state, strict=False)
    return print_of(state)


@step
def load_more(url: str) -> dict[str, Any]:
    """Load into a stage that has a layer more."""
    state = build(2, seed=1, trained=0)
    state["model"].layer9 = nn.Linear(2, 2)
    return told(lambda: shardstore.load(url, into={"model": state["model"]}))
