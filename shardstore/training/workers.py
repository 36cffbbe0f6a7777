"""DataLoader workers: they ignore the signals of training, and tell whether they have drawn random numbers."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

T = TypeVar("T")


class Shield:
    """A worker_init_fn that has workers ignore signals, which often go to the whole process group.

    The parent would stop in the middle of a step when they die; they end when it does. `inner` is called then.
    """

    def __init__(self, numbers: Sequence[int], inner: Callable[[int], None] | None) -> None:
        self._numbers, self._inner = [int(number) for number in numbers], inner

    def __call__(self, worker: int) -> None:
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)
        if self._inner is not None:
            self._inner(worker)


class Draws:
    """Whether any worker has drawn from its global generators, be it for a batch that is not used yet."""

    def __init__(self) -> None:
        self._seen = torch.zeros(1, dtype=torch.uint8, device="cpu").share_memory_()

    def __bool__(self) -> bool:
        return bool(self._seen.item())

    def tell(self) -> None:
        """Called in a worker."""
        self._seen.fill_(1)


class Watch:
    """A worker_init_fn and a collate_fn, around those of the loader, that watch a worker's generators."""

    def __init__(self, draws: Draws, begin: Callable[[int], None] | None, collate: Callable[[Any], Any]) -> None:
        self._draws, self._begin, self._collate = draws, begin, collate
        self._before: list[Any] | None = None

    def begin(self, worker: int) -> None:
        """The worker_init_fn."""
        if self._begin is not None:
            self._begin(worker)
        self._before = _states()

    def collate(self, items: Any) -> Any:
        """The collate_fn."""
        batch = self._collate(items)
        if self._before is not None and _states() != self._before:
            self._before = None
            self._draws.tell()
        return batch


def _states() -> list[Any]:
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global generator is what is meant
    drawn = numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"]
    return [random.getstate(), drawn, torch.get_rng_state().numpy().tobytes()]


def iterate(loader: Iterable[T], shielded: Sequence[int], draws: Draws | None) -> Iterator[T]:
    """The loader's iterator. Its workers ignore signals, and report to `draws`."""
    if not (isinstance(loader, DataLoader) and loader.num_workers):
        return iter(loader)
    begin, collate = loader.worker_init_fn, loader.collate_fn
    loader.worker_init_fn = Shield(shielded, begin)
    if draws is not None:
        watch = Watch(draws, loader.worker_init_fn, collate)
        loader.worker_init_fn, loader.collate_fn = watch.begin, watch.collate
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn, loader.collate_fn = begin, collate
