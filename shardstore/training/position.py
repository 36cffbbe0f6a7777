"""Where training stands in its data: epoch, batch, and the random states that lead there again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from shardstore.errors import InvalidArgument, Mismatch
from shardstore.training import rng
from shardstore.training.signals import Shield

T = TypeVar("T")


class Position:
    """Counts epochs and batches, and brings a loader back to the batch after the one that was saved.

    A shuffling loader draws its order from the random state at the start of the epoch; what follows needs the state at
    the save. So both are kept, and the batches that were used are loaded again and thrown away in between.
    """

    def __init__(self, generators: rng.Generators, notice: Callable[[str], None]) -> None:
        self._generators, self._notice = generators, notice
        self.epoch = 0
        self.batch = 0
        self.unstepped = 0
        self._start: rng.Rng | None = None
        self._saved: rng.Rng | None = None
        self._loader: list[torch.Generator] = []
        self._resumed = False

    def section(self) -> dict[str, Any]:
        """What a checkpoint has to say."""
        start = self._start if self.batch else None
        return {"epoch": self.epoch, "batch": self.batch, "rng": self._capture(), "epoch_rng": start}

    def restore(self, section: Mapping[str, Any]) -> None:
        """Go to where a checkpoint was saved. The loader follows when its batches are asked for."""
        self.epoch, self.batch = section["epoch"], section["batch"]
        self._start, self._saved = section["epoch_rng"], section["rng"] if section["batch"] else None
        self._resumed = True
        rng.restore(section["rng"], self._generators, self._notice)

    def batches(self, loader: Iterable[T], shielded: Sequence[int]) -> Iterator[T]:
        """The batches of an epoch, or after a resume those that are left of it."""
        if isinstance(loader, Iterator):
            raise InvalidArgument("batches() takes a loader that can be iterated again and again, not an iterator")
        self._loader = _generators_of(loader)
        self._warn(loader)
        saved, self._saved = self._saved, None
        skip = self._begin() if saved is None else self.batch
        if saved is not None and self._start is not None:
            self._put(self._start)
        iterator = _iterator(loader, shielded)
        self._skip(iterator, skip)
        if saved is not None:
            self._put(saved)
        for batch in iterator:
            self.batch += 1
            self.unstepped += 1
            yield batch
        self.epoch, self.batch, self._start = self.epoch + 1, 0, None

    def _begin(self) -> int:
        """Start an epoch; one that was left early has ended thereby."""
        if self.batch:
            self.epoch += 1
        self.batch = 0
        self._start = self._capture()
        return 0

    def _skip(self, iterator: Iterator[Any], count: int) -> None:
        for number in range(count):
            try:
                next(iterator)
            except StopIteration:
                raise Mismatch(
                    f"the checkpoint was saved after batch {count} of epoch {self.epoch}, and the loader ends after "
                    f"{number}: give it the same data and the same batch size, or begin a new run"
                ) from None

    def _capture(self) -> rng.Rng:
        own = [rng.capture_one("loader", generator) for generator in self._loader]
        return {**rng.capture(self._generators), "loader": own}

    def _put(self, state: rng.Rng) -> None:
        rng.restore(state, self._generators, lambda _: None)  # what is odd was told at the resume
        if len(state["loader"]) != len(self._loader):
            raise Mismatch(
                f"the loader has {len(self._loader)} generators of its own, it had {len(state['loader'])} at the save: "
                "build it as before"
            )
        for generator, saved in zip(self._loader, state["loader"], strict=True):
            rng.restore_one("loader", generator, saved)

    def _warn(self, loader: Any) -> None:
        if self._resumed and getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0):
            self._notice("the loader has persistent workers: random numbers that they draw are not those of before")
        self._resumed = False


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    return list(found.values())


def _iterator(loader: Iterable[T], shielded: Sequence[int]) -> Iterator[T]:
    """The loader's iterator, whose workers ignore the signals that training handles."""
    if not (isinstance(loader, DataLoader) and loader.num_workers and shielded):
        return iter(loader)
    inner = loader.worker_init_fn
    loader.worker_init_fn = Shield(shielded, inner)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = inner
