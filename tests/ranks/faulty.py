"""Trouble that a rank makes, in the middle of a save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    return {
        "same": {"w": torch.arange(12.0)}, "split": {"w": distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])},
        "step": 3,
    }  # fmt: skip


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
def troubled(url: str, who: int, place: str, kind: str) -> list[dict[str, Any]]:
    """A save with trouble on one rank, then one without at another place."""
    mine = state()
    shardstore.save(mine, f"{url}/first")
    with ExitStack() as stack:
        if dist.get_rank() == who:
            stack.enter_context(trouble(place, kind))
        found = [told(lambda: shardstore.save(mine, f"{url}/troubled"))]
    return [*found, told(lambda: shardstore.save(mine, f"{url}/next"))]


@step
def troubled_at_first(url: str, who: int, place: str, kind: str) -> list[dict[str, Any]]:
    """The same without a save before."""
    mine = state()
    with ExitStack() as stack:
        if dist.get_rank() == who:
            stack.enter_context(trouble(place, kind))
        found = [told(lambda: shardstore.save(mine, f"{url}/troubled"))]
    return [*found, told(lambda: shardstore.save(mine, f"{url}/next"))]


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
def store_trouble(url: str, who: int, fault: dict[str, Any]) -> dict[str, Any]:
    """A save during which the store of one rank fails, or its process is killed, at a call."""
    mine = state()
    fault["calls"] = frozenset(fault["calls"])
    with ExitStack() as stack:
        if dist.get_rank() == who:
            stack.enter_context(injected(lambda store: FaultyStore(store, Fault(**fault))))
        return told(lambda: shardstore.save(mine, url))
