"""What each rank has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from shardstore.errors import InvalidArgument, Mismatch

Rule: TypeAlias = Callable[[Sequence[Any], int, int], Any]
"""(values of all ranks, this rank, number of ranks) -> this rank's value."""


class PerRank:
    """A value in a state that differs from rank to rank: RNG states, the position of a data loader.

    `PerRank(x)` saves the x of every rank; a load into it takes that of the same rank. Where as many ranks load as
    saved it, that is all. At another number of ranks a load raises Mismatch, unless `rule` says what a rank gets: it
    is called with the values of all ranks in order, this rank's number, and the number of ranks.

    A load without `into` gives a PerRank with `values`, those of all ranks that saved. Tensors in it are stored each
    for itself: ties among them are not kept.
    """

    def __init__(self, value: Any, *, rule: Rule | None = None) -> None:
        if isinstance(value, PerRank):
            raise InvalidArgument("a PerRank stands inside of another one; take one away")
        if rule is not None and not callable(rule):
            raise InvalidArgument("rule is a function of (values of all ranks, rank, number of ranks)")
        self._values: tuple[Any, ...] = (value,)
        self._at: int | None = 0
        self.rule = rule

    @classmethod
    def loaded(cls, values: Sequence[Any], rank: int, size: int) -> PerRank:
        """The values of all ranks of a checkpoint, as `rank` of `size` sees them."""
        made = cls(None)
        made._values = tuple(values)
        made._at = rank if size == len(made._values) else None
        return made

    @property
    def values(self) -> tuple[Any, ...]:
        """The value of each rank; before a load, only this rank's."""
        return self._values

    @property
    def value(self) -> Any:
        """This rank's value. Raises Mismatch where another number of ranks saved it."""
        if self._at is None:
            raise Mismatch(f"{len(self._values)} ranks have saved this value, which is per rank: choose from .values")
        return self._values[self._at]

    @value.setter
    def value(self, value: Any) -> None:
        self._values, self._at = (value,), 0

    def __repr__(self) -> str:
        return f"PerRank({self._values[0]!r})" if len(self._values) == 1 else f"PerRank.values={self._values!r}"
