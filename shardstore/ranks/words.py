"""A word that all ranks have heard one step later: whether any of them wants to stop, or to save."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardstore.ranks.port import Ranks


class Wish(NamedTuple):
    """What a rank wants at the end of a step, or any rank wanted."""

    stop: bool = False
    save: bool = False


class Words(Protocol):
    """Passes wishes on. Every rank says one after each step."""

    def say(self, wish: Wish) -> Wish:
        """Say what this rank wants; returns what is to be done now, the same on every rank."""


class AtOnce:
    """One process does what it wants."""

    def say(self, wish: Wish) -> Wish:
        """The wish itself."""
        return wish


class StepLater:
    """Ranks do together what any of them wanted a step ago: the all-reduce passes by beside the step."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._word = torch.zeros(2, dtype=torch.int32, device="cpu")
        self._under_way: Any = None

    def say(self, wish: Wish) -> Wish:
        """What any rank wanted at the last step."""
        heard = Wish()
        if self._under_way is not None:
            self._under_way.wait()
            stop, save = self._word.tolist()
            heard = Wish(bool(stop), bool(save))
        self._word.copy_(torch.tensor([wish.stop, wish.save], dtype=torch.int32, device="cpu"))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._under_way = self._group.allreduce([self._word], options)
        return heard


def words_of(ranks: Ranks) -> Words:
    """The way by which these ranks pass wishes on. Waits for all of them where there are several."""
    return AtOnce() if ranks.size == 1 else StepLater(ranks.prepare())
