"""Trouble that a rank makes, in the middle of a save."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shardstore
from tests.kit.faults import Fault, FaultyStore
from tests.kit.inject import injected
from tests.ranks.jobs import step

PLACES = {
    "begin": "shardstore.saving.agree._fingerprint",
    "write": "shardstore.saving.attempt.put_all",
    "answer": "shardstore.saving.api.dump_contribution",
    "commit": "shardstore.saving.lead.check_written",
}


def told(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call came to, as data."""
    try:
        saved = call()
    except BaseException as error:  # noqa: BLE001 - interrupts too
        details = {"ranks": list(getattr(error, "ranks", ())), "phase": getattr(error, "phase", "")}
        return {"error": type(error).__name__, "text": str(error), **details}
    return {"digest": getattr(saved, "digest", None)}


def state() -> dict[str, Any]:
    """A tensor that all hold, one that is split over all, and a number."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    return {"same": {"w": torch.arange(12.0)}, "split": {"w": split}, "step": 3}


def _do(kind: str) -> None:
    if kind == "raise":
        raise ValueError("trouble of the test")
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "exit":
        sys.exit(3)
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        threading.Event().wait()


@contextmanager
def trouble(place: str, kind: str) -> Iterator[None]:
    """Let the kind of trouble come when this rank gets to the place."""
    with mock.patch(PLACES[place], side_effect=lambda *_, **__: _do(kind)):
        yield


@step
def troubled(
    url: str, who: int, place: str, kind: str, before: bool = True, again: bool = True
) -> list[dict[str, Any]]:
    """A save with trouble on one rank, after one without, and before another one at a new place."""
    mine = state()
    if before:
        shardstore.save(mine, f"{url}/first")
    with ExitStack() as stack:
        if dist.get_rank() == who:
            stack.enter_context(trouble(place, kind))
        found = [told(lambda: shardstore.save(mine, f"{url}/troubled"))]
    return [*found, told(lambda: shardstore.save(mine, f"{url}/next"))] if again else found


@step
def absent(url: str, missing: list[int], before: int = 1) -> list[dict[str, Any]]:
    """Saves of all; then one that some ranks don't come to; then of all again."""
    mine = state()
    found = [told(lambda at=at: shardstore.save(mine, f"{url}/before{at}")) for at in range(before)]
    if dist.get_rank() not in missing:
        found.append(told(lambda: shardstore.save(mine, f"{url}/partial")))
    else:
        found.append({})
    dist.barrier()
    found.append(told(lambda: shardstore.save(mine, f"{url}/after")))
    return found


@step
def late(url: str) -> list[dict[str, Any]]:
    """The last rank comes to a save only when the others have given up; then a save of all."""
    mine, last = state(), dist.get_world_size() - 1
    shardstore.save(mine, f"{url}/first")
    if dist.get_rank() == last:
        dist.barrier()
    found = [told(lambda: shardstore.save(mine, f"{url}/late"))]
    if dist.get_rank() != last:
        dist.barrier()
    dist.barrier()
    return [*found, told(lambda: shardstore.save(mine, f"{url}/next"))]


@step
def store_trouble(url: str, who: int, fault: dict[str, Any]) -> dict[str, Any]:
    """A save during which the store of one rank fails, or its process is killed, at a call."""
    mine = state()
    fault["calls"] = frozenset(fault["calls"])
    with ExitStack() as stack:
        if dist.get_rank() == who:
            stack.enter_context(injected(lambda store: FaultyStore(store, Fault(**fault))))
        return told(lambda: shardstore.save(mine, url))


@step
def vanishing(url: str) -> dict[str, Any]:
    """A file of rank 1 vanishes after it was written, before the commit."""
    mine = state()

    def look(stores: Any, index: Any) -> None:
        theirs = next(file for file in index.files if "/00002-of-" in file.path)
        os.unlink(os.path.join(url, theirs.path))
        check_written(stores, index)

    from shardstore.saving.commit import check_written

    with mock.patch("shardstore.saving.lead.check_written", look):
        return told(lambda: shardstore.save(mine, url))


@step
def other_arguments(url: str) -> list[dict[str, Any]]:
    """Calls in which rank 1 gives something else than the others; then one in which all give the same."""
    mine, odd = state(), dist.get_rank() == 1
    calls: list[tuple[str, dict[str, Any]]] = [
        ("elsewhere" if odd else "here", {}), ("steps", {"step": 4 if odd else 3}),
        ("hashes", {"hash": "sha256" if odd else "xxh3_128"}), ("overwrites", {"overwrite": odd}),
        ("shards", {"shards": 5 if odd else 4}), ("bad", {"step": -1} if odd else {}), ("good", {}),
    ]  # fmt: skip
    return [
        told(lambda name=name, options=options: shardstore.save(mine, f"{url}/{name}", **options))
        for name, options in calls
    ]


@step
def in_planning(url: str, who: int) -> list[dict[str, Any]]:
    """One rank's state can't be stored; one rank's place can't be opened; then a save of all."""
    mine, odd = state(), dist.get_rank() == who
    found = [told(lambda: shardstore.save({**mine, "bad": object()} if odd else mine, f"{url}/bad"))]
    found.append(told(lambda: shardstore.save(mine, "nonsense://x" if odd else f"{url}/nowhere")))
    return [*found, told(lambda: shardstore.save(mine, f"{url}/good"))]


@step
def cut_off(url: str) -> list[dict[str, Any]]:
    """The connections of rank 0 break right after a commit, and it goes on to the next save at once."""
    mine = state()

    def commit_and_cut(*arguments: Any, **more: Any) -> None:
        commit(*arguments, **more)
        _cut_connections()

    from shardstore.saving.lead import commit

    with mock.patch("shardstore.saving.lead.commit", commit_and_cut):
        found = [told(lambda: shardstore.save(mine, f"{url}/first"))]
    if dist.get_rank() == 0:
        found.append(told(lambda: shardstore.save(mine, f"{url}/second")))
    return found


def _cut_connections() -> None:
    """Break every connection but that to the store of the process group."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] != store.port:
                connection.shutdown(socket.SHUT_RDWR)
