"""The ranks of one training: rank 0 leads, and alone writes to the run folder; what it decides, all do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from shardstore import strictjson
from shardstore.ranks import ranks_of
from shardstore.ranks.words import Words, words_of

T = TypeVar("T")
_LIMIT = 1 << 28


class Crew:
    """All ranks of a process group. Every rank makes the same calls; one process alone just does what is to be done."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._ranks = ranks_of(group, "training")
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self.saving = ranks_of(group, "save")
        self.background = ranks_of(group, "background save")
        self._words: Words | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    @property
    def words(self) -> Words:
        """Where a rank says after each step what it wants. Waits for all ranks at its first use."""
        if self._words is None:
            self._words = words_of(ranks_of(self.group, "control"))
        return self._words

    def decide(self, phase: str, decision: Callable[[], T]) -> T:
        """What rank 0 decides, on every rank: plain JSON. What it raises is raised everywhere."""
        if not self.several:
            return decision()
        data = self._ranks.share(phase, lambda: b"", lambda _: strictjson.dumps(decision()))
        return cast("T", strictjson.loads(data, limit=_LIMIT))

    def hear(self, phase: str, work: Callable[[], list[str]]) -> list[list[str]]:
        """What `work` returned on each rank, on every rank."""
        if not self.several:
            return [work()]
        data = self._ranks.share(
            phase,
            lambda: strictjson.dumps(work()),
            lambda told: strictjson.dumps([strictjson.loads(one, limit=_LIMIT) for one in told]),
        )
        return cast("list[list[str]]", strictjson.loads(data, limit=_LIMIT))
