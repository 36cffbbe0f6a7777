"""Stored tensors into tensors of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from shardstore.errors import Damaged
from shardstore.loading.source import Outcome, Source
from shardstore.memory import WAVE, Window, fillable, windows
from shardstore.plan import FileRead, Want, plan_reads


def fill(source: Source, fills: list[tuple[int, torch.Tensor]]) -> None:
    """Fill every tensor with the stored one of its number. A number may come several times.

    Raises Damaged, whose `overwritten` names what had been filled, wholly or partly, before damage was met.
    """
    first: dict[int, torch.Tensor] = {}
    again: list[tuple[int, torch.Tensor]] = []
    for number, tensor in fills:
        if number in first:
            again.append((number, tensor))
        else:
            first[number] = tensor
    straight = {number: tensor for number, tensor in first.items() if fillable(tensor)}
    reads = plan_reads(source.index, [Want(number, tensor.data_ptr()) for number, tensor in straight.items()])
    source.check_present(read.file for read in reads)
    touched: list[str] = []
    try:
        source.read(reads)
        touched += [source.index.paths[number] for number in straight]
        for number, tensor in first.items():
            if number not in straight:
                touched.append(source.index.paths[number])
                _through_windows(source, number, tensor)
    except Damaged as error:
        error.overwritten = tuple(touched) or tuple(_reached(source, reads, error))
        raise
    with torch.no_grad():
        for number, tensor in again:
            tensor.copy_(first[number])


def _through_windows(source: Source, number: int, tensor: torch.Tensor) -> None:
    """Fill a tensor that bytes can't be read into, a few windows at a time."""
    for wave in _waves(windows(number, tensor)):
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
