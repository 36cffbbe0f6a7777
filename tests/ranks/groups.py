"""Saves of several groups, in the background, to several roots, over others; and what all of them say and write."""

from __future__ import annotations

import os
import pickle
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardstore
from shardstore.ranks import distributed
from tests.kit.faults import CountingStore
from tests.kit.inject import injected
from tests.ranks import faulty, stages, states
from tests.ranks.faulty import told
from tests.ranks.jobs import step


@step
def subsets(url: str) -> dict[str, Any]:
    """Two of four ranks save, twice; then two pairs at once; then all; then who may not."""
    rank = dist.get_rank()
    first, cross = dist.new_group([0, 1]), [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found: dict[str, Any] = {}
    own = {"model": {"w": torch.full((4,), float(rank // 2))}}
    if rank < 2:
        found["pair"] = [told(lambda at=at: shardstore.save(own, f"{url}/pair{at}", group=first)) for at in range(2)]
    else:
        found["outsider"] = told(lambda: shardstore.save(own, f"{url}/outsider", group=first))
    mine = cross[rank % 2]
    here = DeviceMesh.from_group(mine, "cpu")
    split = {"model": {"w": distribute_tensor(states.values(5, 2) + rank % 2, here, [Shard(0)])}}
    found["cross"] = told(lambda: shardstore.save(split, f"{url}/cross{rank % 2}", group=mine))
    found["all"] = told(lambda: shardstore.save(faulty.state(), f"{url}/all"))
    if rank < 2:
        found["too small"] = told(lambda: shardstore.save(split, f"{url}/small", group=first))
    found["alone"] = told(lambda: shardstore.save(own, f"{url}/alone{rank}", group=None))
    found["split alone"] = told(lambda: shardstore.save(split, f"{url}/split{rank}", group=None))
    found["no group"] = told(lambda: shardstore.save(own, f"{url}/none{rank}", group="ranks"))
    return found


@step
def in_the_background(url: str) -> list[dict[str, Any]]:
    """Background saves, with one in the foreground meanwhile, and changes to the state at once."""
    state, found = faulty.state(), []
    for turn in range(2):
        pending = shardstore.save_async(state, f"{url}/async{turn}")
        state["same"]["w"].add_(100)
        state["split"]["w"].to_local().add_(100)
        found.append(told(lambda turn=turn: shardstore.save(state, f"{url}/sync{turn}")))
        found.append(told(pending.result))
    skip = told(lambda: shardstore.save_async(state, f"{url}/skip", busy="skip"))
    return [*found, skip]


@step
def failing_in_the_background(url: str) -> list[dict[str, Any]]:
    """One rank fails in a background save: the error comes at the result, on all; the next one works."""
    state = faulty.state()
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(faulty.trouble("write", "raise"))
        failed = told(shardstore.save_async(state, f"{url}/failed").result)
    return [failed, told(lambda: shardstore.save_async(state, f"{url}/next").result())]


@step
def several_roots(url: str) -> dict[str, Any]:
    """A striped save, and a load with the roots in another order."""
    for name in ("one", "two") if dist.get_rank() == 0 else ():
        os.mkdir(f"{url}/{name}")
    dist.barrier()
    roots = [f"{url}/one/c", f"{url}/two/c"]
    saved = told(lambda: shardstore.save(faulty.state(), roots, shards=6))
    state = faulty.state()
    state["split"]["w"].to_local().zero_()
    shardstore.load(roots[::-1], into=state)
    return {**saved, "w": state["split"]["w"].full_tensor().flatten().tolist()}


@step
def over_another(url: str) -> list[Any]:
    """Save, save there again, replace it, and load what is expected."""
    state = faulty.state()
    first = shardstore.save(state, url, hash="sha256")
    again = told(lambda: shardstore.save(state, url, hash="sha256"))
    state["split"]["w"].to_local().add_(1)
    second = shardstore.save(state, url, hash="sha256", overwrite=True)
    old = told(lambda: shardstore.load(url, into=faulty.state(), expect=first.digest))
    shardstore.load(url, into=state, expect=second.digest)
    return [again, old, state["split"]["w"].full_tensor().flatten().tolist(), second.digest]


@step
def on_s3(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Save to an object store and load from it."""
    saved = told(lambda: shardstore.save(faulty.state(), url, storage_options=options))
    state = faulty.state()
    state["split"]["w"].to_local().zero_()
    shardstore.load(url, into=state, storage_options=options)
    return {**saved, "w": state["split"]["w"].full_tensor().flatten().tolist()}


@step
def another_world(url: str, port: int) -> list[dict[str, Any]]:
    """Leave the process group, join a new one in the same processes, and save again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [told(lambda: shardstore.save(faulty.state(), f"{url}/0"))]
    for turn in range(1, 3):
        dist.destroy_process_group()
        store = dist.PrefixStore(f"world{url}{turn}", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found.append(told(lambda turn=turn: shardstore.save(faulty.state(), f"{url}/{turn}")))
    return found


class Traffic:
    """Counts what this rank says, and lets nobody pickle."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.sent = 0

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        share, send = distributed.Star.share, distributed._send

        def counted(star: Any, phase: str, work: Any, answer: Any) -> bytes:
            self.phases.append(phase)
            return share(star, phase, work, answer)

        def told_to(line: Any, to: int, message: tuple[int, bytes]) -> None:
            self.sent += 24 + len(message[1])
            send(line, to, message)

        self._stack.enter_context(mock.patch.object(distributed.Star, "share", counted))
        self._stack.enter_context(mock.patch.object(distributed, "_send", told_to))
        for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
            self._stack.enter_context(mock.patch.object(pickle, name, side_effect=AssertionError("pickled")))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def large(rows: int) -> dict[str, Any]:
    """Tensors of many MiB, split over all ranks, and one on all."""
    size = dist.get_world_size()
    return {"model": {
        "w": states.split(torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024), size),
        "v": states.split(torch.arange(rows * 512, dtype=torch.float32).view(rows, 512), size),
        "same": torch.arange(300_000, dtype=torch.float32),
    }}  # fmt: skip


@step
def traffic(url: str, rows: int) -> dict[str, Any]:
    """A large save and a second one: what is said, and what is put."""
    state, found = large(rows), {}
    dist.barrier()
    for turn in range(2):
        with Traffic() as said, injected(CountingStore) as stores:
            shardstore.save(state, f"{url}/{turn}")
        puts = [
            call for store in stores for call in store.calls if call.name == "put" and call.key.endswith(".safetensors")
        ]
        found = {"phases": said.phases, "sent": said.sent, "put": sum(call.nbytes for call in puts)}
    return found


@step
def traffic_of_stages(url: str) -> list[str]:
    """The phases of a save of two stages."""
    state = stages.build(2)
    with Traffic() as said:
        shardstore.save(state, url)
    return said.phases


@step
def reads(url: str, rows: int) -> dict[str, int]:
    """Load into another number of ranks: how much is read, of how many pieces, and how much this rank has."""
    state = large(rows)
    own = sum(w.to_local().nbytes if hasattr(w, "to_local") else w.nbytes for w in state["model"].values())
    for w in state["model"].values():
        (w.to_local() if hasattr(w, "to_local") else w).zero_()
    with Traffic() as said, injected(CountingStore) as stores:
        shardstore.load(url, into=state)
    calls = [call for store in stores for call in store.calls if call.key.endswith(".safetensors")]
    good = all(
        torch.equal((w.full_tensor() if hasattr(w, "to_local") else w).flatten(), torch.arange(float(w.numel())))
        for w in state["model"].values()
    )
    files = len({call.key for call in calls if call.nbytes})
    return {
        "own": own,
        "read": sum(call.nbytes for call in calls),
        "files": files,
        "good": good,
        "said": len(said.phases),
    }
