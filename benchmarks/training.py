"""What a training does while its state is saved: steps that use all cores, and workers that load data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

PHASE, PHASES = 0.5, 4  # seconds for which steps are timed beside a save, and without it; how many of each, at most
FADE = 0.3  # seconds that are left out after a save has begun or goes on: the kernel may take 0.2 to spread threads
WORKERS = 4


class Pace(NamedTuple):
    """So many steps in so many seconds."""

    steps: int
    seconds: float


class Steps:
    """A training in miniature: forward, backward and update of a small network, by torch's threads on all cores.

    Written out, into tensors that are there: a virtual machine hands back to its host what a process frees, a step of
    every two seconds is slower for it, and that would count as the save's.
    """

    def __init__(self) -> None:
        self._batch, self._weights = torch.rand(256, 512), [torch.rand(2048, 512) / 512, torch.rand(512, 2048) / 2048]
        self._hidden, self._output = torch.empty(256, 2048), torch.empty(256, 512)
        self._inner = torch.empty(256, 2048)  # the gradient there
        self._gradients, self._means, self._squares, self._roots = (
            [torch.zeros_like(weight) for weight in self._weights] for _ in range(4)
        )

    def run(self, until: Callable[[], bool]) -> Pace:
        """Steps until then, one at least."""
        count, start = 0, time.perf_counter()
        while not count or not until():
            self._step()
            count += 1
        return Pace(count, time.perf_counter() - start)

    def _step(self) -> None:
        first, second = self._weights
        torch.mm(self._batch, first.t(), out=self._hidden).relu_()
        torch.mm(self._hidden, second.t(), out=self._output).mul_(2 / self._output.numel())
        torch.mm(self._output.t(), self._hidden, out=self._gradients[1])
        torch.mm(self._output, second, out=self._inner).mul_(self._hidden.sign_())
        torch.mm(self._inner.t(), self._batch, out=self._gradients[0])
        for weight, gradient, mean, square, root in zip(
            self._weights, self._gradients, self._means, self._squares, self._roots, strict=True
        ):
            mean.lerp_(gradient, 0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            weight.addcdiv_(mean, torch.sqrt(square, out=root).add_(1e-8), value=-1e-3)


def after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has gone by since this call."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


class Hold:
    """What a save calls before each piece of work, and is held in meanwhile."""

    def __init__(self) -> None:
        self._may, self._holds = threading.Event(), threading.Event()
        self._may.set()

    def __call__(self, *_: object) -> None:
        if not self._may.is_set():
            self._holds.set()
            self._may.wait()

    def close(self) -> None:
        self._may.clear()

    def open(self) -> None:
        self._holds.clear()
        self._may.set()

    def holds(self) -> bool:
        """Whether somebody has come to it since it was closed."""
        return self._holds.is_set()


def _either(one: Callable[[], bool], other: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: one() or other()


@dataclass
class Beside:
    """A background save, and the share of the steps' time that it took while it ran."""

    handle: Any
    share: float


def beside(begin: Callable[[], Any], held: Callable[[Hold], Any]) -> Beside:
    """Run steps while a background save runs, which `held` begins, or `begin` where that returns None.

    How fast steps are alone drifts by several percent within seconds, so a save that can be held is held half the time.
    One that can't is timed in one piece, and the steps alone before and after it.
    """
    steps, hold = Steps(), Hold()
    steps.run(after(PHASE))  # to warm up
    before = steps.run(after(PHASE))
    handle = held(hold)
    if handle is not None:
        with_it, alone = _in_turn(steps, handle, hold)
        handle.result()
    else:
        handle = begin()
        with_it, alone = [steps.run(_either(handle.done, after(2 * PHASES * PHASE)))], []
        handle.result()
    if not alone:
        alone = [before, steps.run(after(PHASE))]
    return Beside(handle, 1 - _rate(with_it) / _rate(alone))


def _in_turn(steps: Steps, handle: Any, hold: Hold) -> tuple[list[Pace], list[Pace]]:
    """Steps beside a save, and while it is held, in turn."""
    with_it, alone = [], []
    try:
        while not handle.done() and len(alone) < PHASES:
            first = steps.run(_either(handle.done, after(FADE)))
            with_it.append(first if handle.done() else steps.run(_either(handle.done, after(PHASE))))
            hold.close()
            steps.run(_either(hold.holds, handle.done))
            if not handle.done():
                alone.append(steps.run(after(PHASE)))
            hold.open()
    finally:
        hold.open()
    return with_it or [steps.run(handle.done)], alone  # it may have ended before the first step


def _rate(paces: list[Pace]) -> float:
    return sum(pace.steps for pace in paces) / sum(pace.seconds for pace in paces)


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
