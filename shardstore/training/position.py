"""Where training stands in its data: epoch, batch, and the random states that lead there again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from shardstore.errors import InvalidArgument, Mismatch, brief
from shardstore.training import rng
from shardstore.training.crew import Crew
from shardstore.training.workers import Draws, iterate
from shardstore.tree import PerRank

T = TypeVar("T")
Skip: TypeAlias = Literal["auto", "replay"]


class Position:
    """Counts epochs and batches, and brings a loader back to the batch after the one that was saved.

    A shuffling loader draws its order from the random state at the start of the epoch; what follows needs the state at
    the save. So both are kept, and the batches that were used are loaded again and thrown away in between. A loader
    that saves its own state goes to its place at once, unless its workers draw random numbers, which it doesn't keep.
    """

    def __init__(self, generators: rng.Generators, notice: Callable[[str], None], crew: Crew) -> None:
        self._generators, self._notice, self._crew = generators, notice, crew
        self._skipped: int | None = None
        self.epoch = 0
        self.batch = 0
        self.unstepped = 0
        self._start: rng.Rng | None = None
        self._saved: rng.Rng | None = None
        self._loader: list[torch.Generator] = []
        self._stateful: Any = None
        self._draws = Draws()
        self._loader_state: Any = None
        self._resumed = False

    def section(self) -> dict[str, Any]:
        """What a checkpoint has to say."""
        start, loader = (self._start, self._state_of_loader()) if self.batch else (None, None)
        own = {"rng": self._capture(), "epoch_rng": start, "loader": loader}
        if self._crew.several:
            own = {name: PerRank(value) for name, value in own.items()}
        return {"epoch": self.epoch, "batch": self.batch, **own}

    def _state_of_loader(self) -> Any:
        """What brings the loader to its place by itself; None where the batches have to be loaded again."""
        return None if self._stateful is None or self._draws else self._stateful.state_dict()

    def restore(self, section: Mapping[str, Any]) -> None:
        """Go to where a checkpoint was saved. The loader follows when its batches are asked for."""
        self._resumed = True
        self.epoch, self.batch = section["epoch"], section["batch"]
        ranks = len(section["rng"].values) if isinstance(section["rng"], PerRank) else 1
        if ranks != self._crew.size:
            self._restore_elsewhere(ranks)
            return
        section = {name: value.value if isinstance(value, PerRank) else value for name, value in section.items()}
        self._start, self._saved = section["epoch_rng"], section["rng"] if section["batch"] else None
        self._loader_state = section.get("loader")
        rng.restore(section["rng"], self._generators, self._notice)

    def _restore_elsewhere(self, ranks: int) -> None:
        """Go on at another number of ranks: as many batches are skipped as all of them together have used."""
        used, size = self.batch * ranks, self._crew.size
        self._skipped, self.batch = used // size if used else None, used // size
        more = f"; {used % size} batches of this epoch are used twice" if used % size else ""
        self._notice(
            f"{ranks} ranks have saved, {size} resume: random states stay as they are now, since each was one "
            f"rank's{more}"
        )

    def batches(self, loader: Iterable[T], shielded: Sequence[int], skip: Skip) -> Iterator[T]:
        """The batches of an epoch, or after a resume those that are left of it."""
        self._take(loader, skip)
        saved, self._saved = self._saved, None
        skipped, self._skipped = self._skipped, None
        if saved is None:
            self._begin(ends=skipped is None)
        elif self._start is not None:
            self._put(self._start)
        placed = saved is not None and self._place(loader)
        iterator = iterate(loader, shielded, self._draws if self._stateful is not None else None)
        if saved is not None:
            if not placed:
                self._skip(iterator, self.batch)
            self._put(saved)  # after iter(), which draws, and before the next batch
        elif skipped is not None:
            self._skip(iterator, skipped)
            self.batch = skipped
        for batch in iterator:
            self.batch += 1
            self.unstepped += 1
            yield batch
        self.epoch, self.batch, self._start = self.epoch + 1, 0, None

    def _take(self, loader: Any, skip: Skip) -> None:
        if skip not in ("auto", "replay"):
            raise InvalidArgument(f"skip must be 'auto' or 'replay', not {brief(skip)}")
        if isinstance(loader, Iterator):
            raise InvalidArgument("batches() takes a loader that can be iterated again and again, not an iterator")
        self._loader = _generators_of(loader)
        self._warn(loader)
        stateful = loader if skip == "auto" and _keeps_state(loader) else None
        if stateful is not self._stateful:
            self._stateful, self._draws = stateful, Draws()

    def _place(self, loader: Any) -> bool:
        """Bring a loader to the place of the save by its own state; False where that was not saved, or isn't wanted."""
        state, self._loader_state = self._loader_state, None
        if state is None or self._stateful is None:
            return False
        loader.load_state_dict(state)
        return True

    def _begin(self, *, ends: bool) -> None:
        """Start an epoch; with `ends`, one that was left early has ended thereby."""
        if self.batch and ends:
            self.epoch += 1
        self.batch = 0
        self._start = self._capture()

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


def _keeps_state(loader: Any) -> bool:
    """Whether a loader saves and restores its own place, as torchdata's StatefulDataLoader does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
