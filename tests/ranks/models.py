"""Models and trainings of every layout that ranks have."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Layout = str
LAYOUTS = ("fsdp", "hsdp", "tp", "fsdp+tp", "ddp", "plain")


class Net(nn.Module):
    """Small, with sizes that most numbers of ranks don't divide, a scalar, a buffer and a tie."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, wide)
        self.middle = nn.Linear(wide, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.outer = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.middle(torch.relu(self.inner(x))))) * self.scale


def warm_up() -> None:
    """Run what is slow at its first time."""
    net = Net(7)
    torch.optim.AdamW(net.parameters())
    net(torch.zeros(2, 6)).sum().backward()


def build(layout: Layout, seed: int = 0, wide: int | None = None, trained: int = 0) -> dict[str, Any]:
    """A model in a layout, with its AdamW; `trained` steps of training behind it."""
    torch.manual_seed(seed)
    size = dist.get_world_size() if dist.is_initialized() else 1
    model: nn.Module = Net(wide or 8)
    model = _laid_out(model, layout, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(trained):
        train_step(model, optimizer, step)
    return {"model": model, "optimizer": optimizer}


def _laid_out(model: nn.Module, layout: Layout, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if layout == "plain":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        return _tensor_parallel(model, mesh)
    else:
        whole = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, whole["tp"])
        mesh = whole["dp"]
    for part in (model.inner, model.middle, model.outer):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"inner": ColwiseParallel(), "middle": RowwiseParallel()})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step, on the same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 6, generator=generator)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def whole(value: Any) -> Any:
    """A state with whole tensors instead of DTensors; collective."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def print_of(state: dict[str, Any]) -> dict[str, str]:
    """Name -> digest of every whole tensor of a model and its optimizer, in whatever layout; collective."""
    model, optimizer = state["model"], state["optimizer"]
    names = {id(param): _short(name) for name, param in model.named_parameters()}
    found = {f"model.{_short(name)}": tensor for name, tensor in model.state_dict().items()}
    for param, values in optimizer.state.items():
        found.update({f"optimizer.{names[id(param)]}.{key}": value for key, value in values.items()})
    return {name: _hash(whole(tensor)) for name, tensor in sorted(found.items())}


def print_of_data(state: dict[str, Any]) -> dict[str, str]:
    """The same of what `load` returns without into."""
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found.update({f"optimizer.{name}.{key}": value for key, value in values.items()})
    return {name: _hash(tensor) for name, tensor in sorted(found.items())}


def _short(name: str) -> str:
    return name.removeprefix("module.")


def _hash(tensor: Any) -> str:
    tensor = tensor.detach().contiguous()
    about = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(about + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
