"""Ranks as real processes, which talk over gloo."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.crash.zygote import Child, Outcome, Zygote


class Ranks:
    """Starts groups of ranks. Their store lies in this process, as torchrun's does in its agent."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._turns = itertools.count()
        self.port = self._store.port

    def start(
        self, step: str, size: int, *, seconds: float = 30, hosted: int = 0, **arguments: Any
    ) -> list[Child]:  # fmt: skip
        """Begin a step on so many ranks. `seconds`: for which they wait for each other. `hosted`: see `jobs.rank`."""
        prefix = f"job{next(self._turns)}"
        return [
            self._zygote.start(
                "rank", name=step, rank=rank, size=size, port=self.port, prefix=prefix, seconds=seconds,
                hosted=hosted, arguments=arguments,
            )
            for rank in range(size)
        ]  # fmt: skip

    def outcomes(self, step: str, size: int, *, asleep: int | None = None, **arguments: Any) -> list[Outcome]:
        """What became of every rank. `asleep`: one that does not end by itself; it is killed when the others have."""
        children = self.start(step, size, **arguments)
        found = {rank: child.wait() for rank, child in enumerate(children) if rank != asleep}
        if asleep is not None:
            os.kill(children[asleep].pid, signal.SIGKILL)
            found[asleep] = children[asleep].wait()
        return [found[rank] for rank in range(size)]

    def run(self, step: str, size: int, **arguments: Any) -> list[Any]:
        """What a step returned on every rank."""
        found = self.outcomes(step, size, **arguments)
        assert all(outcome.signal == 0 and outcome.value is not None for outcome in found), found
        return [outcome.value for outcome in found]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Groups of ranks."""
    with Zygote("tests.ranks.jobs") as zygote:
        yield Ranks(zygote)
