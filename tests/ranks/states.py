"""States that ranks have: each is made on every rank, with what differs between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardstore import PerRank
from tests.ranks.models import build

MAKERS: dict[str, Callable[[int, int], Any]] = {}


def maker(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """Make a function of rank and size known by its name."""
    MAKERS[function.__name__] = function
    return function


def make(name: str) -> Any:
    """The state of that name on this rank."""
    return MAKERS[name](dist.get_rank(), dist.get_world_size())


def mesh(size: int) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (size,))


def split(values: torch.Tensor, size: int, dim: int = 0) -> DTensor:
    """A tensor that is split over all ranks."""
    return distribute_tensor(values, mesh(size), [Shard(dim)])


def values(*shape: int) -> torch.Tensor:
    """Numbers that are all different."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 0.5


@maker
def few_rows(rank: int, size: int) -> Any:
    """D07: shards that are empty on some ranks, or on all."""
    return {
        "six": {"w": split(values(6, 3), size)}, "one": {"w": split(values(1, 3), size)},
        "none": {"w": split(values(0, 3), size)}, "columns": {"w": split(values(3, 5), size, 1)},
        "scalar": {"w": distribute_tensor(torch.tensor(2.5), mesh(size), [Replicate()])},
    }  # fmt: skip


@maker
def different_plain(rank: int, size: int) -> Any:
    """D06: every rank has other values under one name."""
    return {"model": {"same": torch.ones(3), "w": torch.tensor([float(rank)])}}


@maker
def different_large(rank: int, size: int) -> Any:
    """The same with a tensor that is compared at the first save only."""
    w = torch.zeros(600_000)
    w[-1] = rank
    return {"model": {"w": w}}


@maker
def different_number(rank: int, size: int) -> Any:
    """A plain number differs."""
    return {"model": {"w": torch.ones(2)}, "seed": 100 + rank}


@maker
def different_shape(rank: int, size: int) -> Any:
    """Megatron-like: plain tensors, of which each rank has its own rows."""
    return {"model": {"w": torch.ones(2 + rank, 3)}}


@maker
def different_rows(rank: int, size: int) -> Any:
    """Megatron-like, with as many rows on each rank."""
    return {"model": {"w": values(size * 2, 3)[rank * 2 : rank * 2 + 2].clone()}}


@maker
def per_rank(rank: int, size: int) -> Any:
    """What each rank has of its own, declared so."""
    return {
        "model": {"w": torch.ones(2)},
        "rng": PerRank({"state": torch.full((5 + rank,), rank, dtype=torch.uint8), "position": 10 * rank}),
        "seed": PerRank(rank),
    }  # fmt: skip


@maker
def per_rank_not_on_all(rank: int, size: int) -> Any:
    """One rank forgets to declare it."""
    return {"model": {"w": torch.ones(2)}, "seed": PerRank(rank) if rank else 0}


@maker
def partial(rank: int, size: int) -> Any:
    """A sum that is not finished."""
    return {"model": {"w": DTensor.from_local(torch.ones(3), mesh(size), [Partial()])}}


@maker
def replicated(rank: int, size: int) -> Any:
    """D14: many tensors that every rank holds, as DTensors and as plain ones."""
    here = mesh(size)
    kept = {f"d{at}": distribute_tensor(values(200, 200) + at, here, [Replicate()]) for at in range(8)}
    plain = {f"p{at}": values(200, 200) - at for at in range(8)}
    tiny = {f"t{at}": torch.tensor(float(at)) for at in range(50)}
    return {"kept": kept, "plain": plain, "tiny": tiny}


@maker
def tied(rank: int, size: int) -> Any:
    """Ties of split tensors, of which one part is empty on the last ranks, and of whole ones."""
    one, whole = split(values(2, 3), size), values(3)
    return {"model": {"a": one, "b": one, "c": whole, "d": whole}}


@maker
def tied_on_one(rank: int, size: int) -> Any:
    """A tie of split tensors that only rank 0 has."""
    one, other = split(values(8, 3), size), split(values(8, 3), size)
    return {"model": {"a": one, "b": one if rank == 0 else other}}


@maker
def tied_whole_on_one(rank: int, size: int) -> Any:
    """Rank 0 has one tensor under two names, the others have another one under the second."""
    one = values(8)
    return {"model": {"a": one, "b": one if rank == 0 else values(8) + 1}}


@maker
def half_mesh(rank: int, size: int) -> Any:
    """A DTensor on the first two ranks only, of which the others have an empty shell; and one on all."""
    here = DeviceMesh("cpu", [0, 1])
    return {"part": {"w": distribute_tensor(values(5, 2), here, [Shard(0)])}, "all": {"w": split(values(7, 2), size)}}


@maker
def two_halves(rank: int, size: int) -> Any:
    """One DTensor on the first two ranks, another one on the last two."""
    one, two = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    return {"model": {
        "a": distribute_tensor(values(5, 2), one, [Shard(0)]), "b": distribute_tensor(values(9, 2), two, [Shard(0)]),
    }}  # fmt: skip


@maker
def reversed_mesh(rank: int, size: int) -> Any:
    """A mesh in which rank 0 comes last, so that its part is empty; with a tie."""
    here, at = DeviceMesh("cpu", list(reversed(range(size)))), size - 1 - rank
    rows = values(2, 3)[at : at + 1].clone()
    one = DTensor.from_local(rows, here, [Shard(0)], run_check=False, shape=torch.Size((2, 3)), stride=(3, 1))
    return {"model": {"a": one, "b": one}}


@maker
def by_state_dict(rank: int, size: int) -> Any:
    """The model by its state_dict, whose parts are empty on some ranks, and the optimizer itself."""
    made = build("fsdp", trained=1)
    return {"model": made["model"].state_dict(), "optimizer": made["optimizer"]}


@maker
def never_stepped(rank: int, size: int) -> Any:
    """An optimizer without state."""
    return build("fsdp")


@maker
def by_number(rank: int, size: int) -> Any:
    """Two stages, whose optimizers' state_dicts have numbers for names."""
    layer = nn.Linear(3, 2 + rank)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": {f"layer{rank}.{name}": w for name, w in layer.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }


@maker
def odd_layouts(rank: int, size: int) -> Any:
    """Parts that are not contiguous, several dtypes, and every way of splitting over two mesh dimensions."""
    here, two = mesh(size), init_device_mesh("cpu", (2, size // 2))
    both = {
        "corners": ((5, 7), [Shard(0), Shard(1)]), "twice": ((9, 2), [Shard(0), Shard(0)]),
        "kept": ((9, 2), [Shard(0), Replicate()]), "three": ((3, 4, 5), [Shard(2), Shard(1)]),
    }  # fmt: skip
    columns = values(4, 2 * size)[:, 2 * rank : 2 * rank + 2]
    return {"model": {
        "columns": DTensor.from_local(columns, here, [Shard(1)], run_check=False),
        "turned": DTensor.from_local(values(3, 2).t(), here, [Shard(0)], run_check=False),
        "half": split(values(5, 3).bfloat16(), size), "whole": split(torch.arange(11), size),
        "flags": split(torch.arange(11) % 2 == 0, size),
        **{name: distribute_tensor(values(*shape), two, layout) for name, (shape, layout) in both.items()},
    }}  # fmt: skip


@maker
def other_order(rank: int, size: int) -> Any:
    """The same in another order on each rank, odd keys, and a key that only this rank has."""
    items = [("a", values(2)), ("b", values(3)), ("n", 3), ("l", [1, 2])]
    return {"model": dict(items[:: -1 if rank else 1]), 5: {(1, 2): values(1)}, "own": {rank: f"of {rank}"}}


@maker
def bare_model(rank: int, size: int) -> Any:
    """A Module that is the state itself."""
    torch.manual_seed(0)
    return fully_shard(nn.Linear(5, 3), mesh=mesh(size))


@maker
def more_optimizers(rank: int, size: int) -> Any:
    """Two optimizers with other states, a scheduler, a frozen parameter and the state of the random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[1].bias.requires_grad_(False)
    fully_shard(model, mesh=mesh(size))
    adam = torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    adam.step()
    sgd.step()
    rng = PerRank(torch.get_rng_state())
    return {
        "model": model,
        "adam": adam,
        "sgd": sgd,
        "turn": torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10),
        "rng": rng,
    }


@maker
def split_per_rank(rank: int, size: int) -> Any:
    """A DTensor in a PerRank."""
    return {"model": {"w": PerRank(split(values(4, 2), size))}}


class WithStatistics(nn.Module):
    """A BatchNorm in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


@maker
def statistics(rank: int, size: int) -> Any:
    """DDP with a BatchNorm that has seen other data on each rank."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(WithStatistics(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 3) + rank).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@maker
def statistics_in_stages(rank: int, size: int) -> Any:
    """Two stages of two ranks each, with a BatchNorm whose statistics differ between the ranks of a stage."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(6, 4) + rank)
    return {"model": {f"stage{rank // 2}": norm}}


@maker
def fsdp1(rank: int, size: int) -> Any:
    """The old FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return {"model": FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))}


@maker
def old_shards(rank: int, size: int) -> Any:
    """A ShardedTensor."""
    from torch.distributed import _shard

    spec = _shard.sharding_spec.ChunkShardingSpec(dim=0, placements=[f"rank:{at}/cpu" for at in range(size)])
    return {"model": {"w": _shard.sharded_tensor.ones(spec, 4, 4)}}


def tensors_of(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors in nested dicts and Modules, by path."""
    if isinstance(state, nn.Module):
        return {f"{path}/{name}": tensor for name, tensor in state.state_dict().items()}
    if isinstance(state, torch.optim.Optimizer):
        return tensors_of(state.state_dict()["state"], path)
    if isinstance(state, torch.Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else ()
    return {name: tensor for key, item in items for name, tensor in tensors_of(item, f"{path}/{key}").items()}


def lists_of(state: Any) -> dict[str, list[Any]]:
    """The values of all tensors, of DTensors the whole ones; collective."""
    found = tensors_of(state).items()
    return {path: (w.full_tensor() if isinstance(w, DTensor) else w).tolist() for path, w in found}
