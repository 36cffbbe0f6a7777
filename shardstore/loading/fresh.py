"""Stored tensors into new memory: copied, or mapped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from shardstore.errors import InvalidArgument
from shardstore.hashing import DIGEST_BYTES, digest
from shardstore.loading.source import Source
from shardstore.memory import Extent, carve, over, single
from shardstore.plan import FileRead, Want, plan_reads
from shardstore.specs import Box, TensorSpec
from shardstore.transfer import damaged, in_parallel


def read_fresh(source: Source, numbers: Collection[int]) -> dict[int, torch.Tensor]:
    """New CPU tensors for stored tensors, by number."""
    tensors: dict[int, torch.Tensor] = {}
    reads: list[FileRead] = []
    wanted = [(file, extents) for file, extents in _extents(source, numbers) if extents]
    source.check_present(file for file, _ in wanted)  # before memory is asked for
    for file, extents in wanted:
        read = FileRead(file)
        for carved in carve(extents):
            tensors.update(carved.tensors)
            if carved.nbytes:
                read.segments.append((carved.offset, carved.address, carved.nbytes))
        if read.segments:
            reads.append(read)
    reads += _in_pieces(source, [n for n in numbers if n not in tensors], tensors)
    source.read(reads)
    return tensors


def _in_pieces(source: Source, numbers: list[int], tensors: dict[int, torch.Tensor]) -> list[FileRead]:
    """Reads of tensors that lie in several pieces."""
    source.check_present(sorted({piece.file for number in numbers for piece in source.index.located.get(number, ())}))
    for number in numbers:
        tensors[number] = single(source.index.specs[number])
    return plan_reads(source.index, [Want(number, tensors[number].data_ptr()) for number in numbers])


def _extents(source: Source, numbers: Collection[int]) -> Iterable[tuple[int, list[Extent]]]:
    """For each file, its wanted tensors that lie there whole."""
    index = source.index
    specs, everything = index.specs, len(numbers) == len(index.paths) - len(index.aliases)
    split = {index.files[file].pieces[at] for file, boxes in index.parts.items() for at in boxes}
    for file, entry in enumerate(index.files):
        if entry.start is None:
            continue
        rows = index.extents(file)
        if everything and not split:
            yield file, [Extent(t, at, size, specs[t]) for t, at, size in rows]
        else:
            yield file, [Extent(t, at, size, specs[t]) for t, at, size in rows if t in numbers and t not in split]


def read_mapped(source: Source, numbers: Collection[int]) -> dict[int, torch.Tensor]:
    """Tensors over private memory maps of the shards, each block verified once.

    Raises InvalidArgument where maps are unsafe.
    """
    for store in source.stores:
        if not store.capabilities.mappable:
            why = f"mode='map' is refused for {store.url}: {store.capabilities.why}"
            raise InvalidArgument(f"{why}; use mode='copy'")
    wanted = [(file, extents) for file, extents in _extents(source, numbers) if extents]
    source.check_present(file for file, _ in wanted)
    tensors: dict[int, torch.Tensor] = {}
    maps: dict[int, memoryview] = {}
    for file, _ in wanted:
        maps[file] = source.store(file).map(source.index.files[file].path)
    _verify_maps(source, wanted, maps)
    for file, extents in wanted:
        tensors.update(over(maps[file], extents))
    rest = [number for number in numbers if number not in tensors]
    if rest:
        source.read(_in_pieces(source, rest, tensors))
    return tensors


def _verify_maps(source: Source, wanted: list[tuple[int, list[Extent]]], maps: Mapping[int, memoryview]) -> None:
    index, size = source.index, DIGEST_BYTES[source.index.hash]
    units = []
    for file, extents in wanted:
        read = FileRead(file, [(e.offset, 0, e.nbytes) for e in extents if e.nbytes])
        units += [(file, number) for number in read.blocks(index.block)]

    def check(unit: tuple[int, int]) -> None:
        file, number = unit
        block = maps[file][number * index.block : (number + 1) * index.block]
        if digest(index.hash, block) != index.files[file].block_digest(number, size):
            raise damaged(index, file, [number])
        source.reporter.moved(len(block))

    in_parallel(check, units, source.threads)


def read_part(source: Source, number: int, box: Box) -> torch.Tensor:
    """A part of one stored tensor in new memory; reads only the blocks that hold it."""
    pieces = source.index.located.get(number, ()) if box.volume else ()
    source.check_present(sorted({piece.file for piece in pieces if piece.box.intersect(box)}))
    part = single(TensorSpec(source.index.specs[number].dtype, box.shape))
    if part.nbytes:
        source.read(plan_reads(source.index, [Want(number, part.data_ptr(), box)]))
    return part
