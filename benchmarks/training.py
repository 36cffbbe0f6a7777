"""What a training does while its state is saved: steps that use all cores, and workers that load data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

ALONE = 1.0  # seconds for which the steps are timed with nothing beside them, before a save and after it
LEAST = 0.01  # of the steps' time: less can't be told from nothing
BESIDE = 4.0  # seconds, at most, for which they are timed beside a save; then it is left to end alone
WORKERS = 4


class Steps:
    """A training in miniature: forward, backward and update of a small network, by torch's threads on all cores."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.rand(256, 512)

    def run(self, until: Callable[[], bool]) -> float:
        """Steps a second until then."""
        count, start = 0, time.perf_counter()
        while not until():
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            count += 1
        return count / (time.perf_counter() - start)

    def alone(self) -> float:
        """Steps a second with nothing beside them."""
        return self.run(after(ALONE))


def after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has gone by since this call."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


@dataclass
class Beside:
    """A background save, and the share of the steps' time that it took while it ran."""

    handle: Any
    share: float


def beside(begin: Callable[[], Any]) -> Beside:
    """Run steps while a background save runs, which `begin` begins. How fast they are alone drifts: the mean counts."""
    steps = Steps()
    steps.run(after(ALONE / 4))  # to warm up
    before = steps.alone()
    handle = begin()
    late = after(BESIDE)
    during = steps.run(lambda: handle.done() or late())
    handle.result()
    return Beside(handle, max(LEAST, 1 - 2 * during / (before + steps.alone())))


@contextmanager
def workers() -> Iterator[None]:
    """Forked workers of a DataLoader, which persist meanwhile: all memory that was touched is shared with them."""
    loader: Any = DataLoader(
        range(WORKERS * 8), num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork"
    )
    running = iter(loader)
    try:
        next(running)
        yield
    finally:
        running._shutdown_workers()
