"""Stored tensors into tensors of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch

from shardstore.errors import Damaged
from shardstore.loading.source import Outcome, Source
from shardstore.memory import WAVE, Window, fillable, windows
from shardstore.plan import FileRead, Want, plan_reads
from shardstore.specs import Box
from shardstore.tree import Fill

Key: TypeAlias = int | tuple[int, Box]
"""What of the checkpoint a tensor is to hold: a whole tensor, by number, or a part of one."""


def fill(source: Source, fills: Sequence[Fill]) -> None:
    """Fill every tensor with the stored one of its number, or the part of it. A number may come several times.

    Raises Damaged, whose `overwritten` names what had been filled, wholly or partly, before damage was met.
    """
    first: dict[Key, torch.Tensor] = {}
    again: list[tuple[Key, torch.Tensor]] = []
    for number, tensor, box in fills:
        key = number if box is None else (number, box)
        if key in first:
            again.append((key, tensor))
        else:
            first[key] = tensor
    straight = {key: tensor for key, tensor in first.items() if fillable(tensor)}
    rounds = [(keys, plan_reads(source.index, _wants(keys))) for keys in _rounds(straight)]
    source.check_present({read.file for _, reads in rounds for read in reads})
    touched: list[Key] = []
    reads: list[FileRead] = []
    try:
        for keys, reads in rounds:
            source.read(reads)
            touched += keys
        reads = []
        for key, tensor in first.items():
            if key not in straight:
                touched.append(key)
                _through_windows(source, key, tensor)
    except Damaged as error:
        paths = source.index.paths
        reached = [*(paths[_number(key)] for key in touched), *_reached(source, reads, error)]
        error.overwritten = tuple(dict.fromkeys(reached))
        raise
    with torch.no_grad():
        for key, tensor in again:
            tensor.copy_(first[key])


def _rounds(straight: dict[Key, torch.Tensor]) -> list[dict[Key, torch.Tensor]]:
    """The tensors in groups, in each of which a stored tensor comes once: a read brings every byte to one place only.

    Tied tensors may be wanted in several parts, which overlap.
    """
    if set(map(type, straight)) <= {int}:  # whole ones, each once
        return [straight]
    rounds: list[dict[Key, torch.Tensor]] = [{}]
    met: dict[int, int] = {}
    for key, tensor in straight.items():
        number = _number(key)
        turn = met[number] = met.get(number, -1) + 1
        if turn == len(rounds):
            rounds.append({})
        rounds[turn][key] = tensor
    return rounds


def _number(key: Key) -> int:
    return key if isinstance(key, int) else key[0]


def _wants(straight: Mapping[Key, torch.Tensor]) -> list[Want]:
    return [
        _make_want((key, tensor.data_ptr(), None) if isinstance(key, int) else (key[0], tensor.data_ptr(), key[1]))
        for key, tensor in straight.items()
    ]


_make_want = cast("Any", partial(tuple.__new__, Want))  # as Want(...), without a Python frame for each of 100,000


def _through_windows(source: Source, key: Key, tensor: torch.Tensor) -> None:
    """Fill a tensor that bytes can't be read into, a few windows at a time."""
    number, box = (key, None) if isinstance(key, int) else key
    for wave in _waves(windows(number, tensor, box)):
        _deliver(source, wave)


def _deliver(source: Source, wave: list[Window]) -> None:
    wants = [Want(window.number, window.memory.data_ptr(), window.box) for window in wave]
    reads = plan_reads(source.index, wants)
    source.check_present(read.file for read in reads)
    source.read(reads)
    for window in wave:
        window.deliver()


def _waves(found: Iterable[Window]) -> Iterator[list[Window]]:
    wave: list[Window] = []
    for window in found:
        if wave and sum(w.memory.nbytes for w in wave) + window.memory.nbytes > WAVE:
            yield wave
            wave = []
        wave.append(window)
    if wave:
        yield wave


def _reached(source: Source, reads: list[FileRead], error: Damaged) -> Iterator[str]:
    """Paths of the tensors into which blocks were read before the error."""
    outcome: Outcome | None = getattr(error, "outcome", None)
    if outcome is None:
        return
    for read in reads:
        yield from source.index.tensors_in(read.file, outcome.done.get(read.file, ()))
