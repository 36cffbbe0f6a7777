"""The steps of the tests, by name: what each rank does between joining and leaving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardstore
from shardstore.tree.dtensors import Layouts, part_held
from tests.ranks.faulty import told
from tests.ranks.jobs import step
from tests.ranks.models import build, print_of, print_of_data
from tests.ranks.states import lists_of, make, split, tensors_of, values


@step
def save(layout: str, url: str, wide: int = 8, trained: int = 2) -> dict[str, str]:
    """Train in a layout and save."""
    state = build(layout, wide=wide, trained=trained)
    shardstore.save(state, url)
    return print_of(state)


@step
def load_all(layout: str, urls: list[str]) -> list[dict[str, str]]:
    """Load several checkpoints, each into a fresh model of a layout, whose optimizer has never stepped."""
    found = []
    for url in urls:
        state = build(layout, seed=1)
        shardstore.load(url, into=state)
        found.append(print_of(state))
    return found


@step
def load_data(urls: list[str]) -> list[dict[str, str]]:
    """Load everything as data."""
    return [print_of_data(shardstore.load(url)) for url in urls]


@step
def save_untrained(layout: str, url: str, wide: int) -> dict[str, Any]:
    """Save a model of some width, not trained; what came of it."""
    return told(lambda: shardstore.save(build(layout, wide=wide), url))


@step
def save_each(url: str, names: list[str], **options: Any) -> dict[str, Any]:
    """Save several states, each at a place of its own; what came of each."""
    return {name: told(lambda name=name: shardstore.save(make(name), f"{url}/{name}", **options)) for name in names}


@step
def load_each(url: str, names: list[str]) -> dict[str, Any]:
    """Load states into others of the same name, which hold nothing but sevens before."""
    found = {}
    for name in names:
        state = make(name)
        for tensor in tensors_of(state).values():
            tensor.fill_(7)
        shardstore.load(f"{url}/{name}", into=state)
        found[name] = lists_of(state)
    return found


@step
def round_trips(url: str, names: list[str]) -> dict[str, Any]:
    """Save states and load them into others that were made alike and overwritten."""
    found = {}
    for name in names:
        state, again = make(name), make(name)
        shardstore.save(state, f"{url}/{name}")
        for tensor in tensors_of(again).values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.detach().logical_not_() if local.dtype == torch.bool else local.detach().fill_(7)
        shardstore.load(f"{url}/{name}", into=again)
        found[name] = lists_of(again) == lists_of(state)
    return found


@step
def per_rank_again(url: str) -> dict[str, Any]:
    """Load values that each rank has of its own, with and without a rule, and as data."""
    made = make("per_rank")
    strict = told(lambda: shardstore.load(url, into=made))
    seen = {"strict": strict, "seed": made["seed"].value, "rng": made["rng"].value["state"].tolist()}
    ruled = {"seed": shardstore.PerRank(-1, rule=lambda values, rank, size: [sum(values), rank, size])}
    seen["ruled"] = shardstore.load(url, into=ruled)["seed"].value
    seen["data"] = list(shardstore.load(url)["seed"].values)
    return seen


@step
def watched(url: str, name: str) -> list[str]:
    """Save, and return what was noticed on the way."""
    notes: list[str] = []
    shardstore.save(make(name), url, listener=lambda event: notes.append(getattr(event, "what", "")))
    return [note for note in notes if note]


@step
def load_halves(url: str) -> list[Any]:
    """Load into DTensors of which some ranks hold an empty shell; what this rank can see of them."""
    state = make("half_mesh")
    for tensor in tensors_of(state).values():
        tensor.to_local().fill_(7)
    shardstore.load(f"{url}/half_mesh", into=state)
    part = state["part"]["w"]
    seen = part.full_tensor().flatten().tolist() if part.device_mesh.get_coordinate() else None
    return [seen, state["all"]["w"].full_tensor().flatten().tolist()]


@step
def damaged(url: str) -> list[dict[str, Any]]:
    """A bit of rank 1's file flips; loads of it, and into tensors that don't fit."""
    size = dist.get_world_size()

    def load(tensor: torch.Tensor) -> dict[str, Any]:
        return told(lambda: shardstore.load(url, into={"model": {"w": split(tensor, size)}}))

    shardstore.save({"model": {"w": split(values(600, 3), size)}}, url)
    dist.barrier()
    if dist.get_rank() == 0:
        (path,) = Path(url).rglob("*00002-of-*.safetensors")
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)
    dist.barrier()
    return [load(values(600, 3)), load(values(600, 3).double()), load(values(601, 3))]


@step
def load_into(layout: str, url: str) -> dict[str, str]:
    """Load one checkpoint, as `load_all` does."""
    (found,) = load_all(layout, [url])
    return found


@step
def load_fresh(url: str) -> dict[str, str]:
    """Load one checkpoint as data."""
    (found,) = load_data([url])
    return found


@step
def load_ties_apart(url: str) -> list[bool]:
    """Load tied tensors into some that are not tied and are cut differently; whether each has its part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(600 * 300.0).view(600, 300)
    into: dict[str, torch.Tensor] = {"a": torch.zeros_like(whole)}
    into |= {name: distribute_tensor(torch.zeros_like(whole), mesh, [Shard(dim)]) for dim, name in enumerate("bc")}
    shardstore.load(url, into={"x": into})
    wanted = {name: distribute_tensor(whole, mesh, [Shard(dim)]).to_local() for dim, name in enumerate("bc")}
    return [torch.equal(into["a"], whole), *(torch.equal(into[name].to_local(), wanted[name]) for name in "bc")]


@step
def short_lived_meshes() -> int:
    """Look at many DTensors on two meshes, each with a mesh object of its own that dies; how many seem misplaced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    meshes, wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), 0
    known: Layouts = {}
    members = {name: tuple(meshes[name].mesh.tolist()) for name in "ab"}
    for turn in range(200):
        name = "ab"[turn % 2]
        tensor = DTensor.from_local(torch.zeros(2, 3), meshes[name], [Shard(0)], run_check=False)
        wrong += part_held(tensor, "w", known).mesh != members[name]
        del tensor  # before the next mesh is made
    return wrong


@step
def ties_of_one_rank(url: str) -> dict[str, Any]:
    """Two ranks with two DTensors, which are tied on the first alone; a third one with something else."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    rank, mesh = dist.get_rank(), DeviceMesh("cpu", [0, 1])
    local = torch.full((2, 3), float(rank))
    locals_ = {"a": local, "b": local if rank == 0 else local + 10}
    mine = {name: DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for name, one in locals_.items()}
    return told(lambda: shardstore.save({"x": mine} if rank < 2 else {"y": {"c": torch.zeros(2)}}, url))


@step
def unequal_kinds(url: str) -> list[dict[str, Any]]:
    """Numbers that Python takes for equal, though they are not the same, each on one rank."""
    mine = dist.get_rank()
    pairs = [(1, True), (1, 1.0), (0.0, -0.0)]
    return [
        told(lambda at=at, pair=pair: shardstore.save({"a": [pair[mine]]}, f"{url}/{at}"))
        for at, pair in enumerate(pairs)
    ]
