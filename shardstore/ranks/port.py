"""What a save or a load needs of its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

Work: TypeAlias = Callable[[], bytes]
"""What every rank does; the result is for rank 0."""

Answer: TypeAlias = Callable[[Sequence[bytes]], bytes]
"""What rank 0 makes of all results, in order of ranks; it is for everybody."""


class Ranks(Protocol):
    """A group of ranks. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def members(self) -> Sequence[int]:
        """The global number of every rank of the group."""

    def prepare(self) -> Any:
        """Set up what `share` needs, on the main thread, where another thread is going to call it."""

    def share(self, phase: str, work: Work, answer: Answer) -> bytes:
        """Do `work` on every rank, `answer` on rank 0; returns the answer everywhere.

        What `work` raises is raised on its rank, and PeerError on all others; what `answer` raises is raised on all.
        Raises PeerError, which names the missing ranks and the phase, where a rank dies or does not come in time.
        """


class Alone:
    """This process alone."""

    rank = 0
    size = 1

    def members(self) -> Sequence[int]:
        """Nobody else."""
        return [0]

    def prepare(self) -> Any:
        """There is nothing to set up."""

    def share(self, phase: str, work: Work, answer: Answer) -> bytes:  # noqa: ARG002 - the phase is for messages
        """The answer to this process's own work."""
        return answer([work()])
