"""The index of a checkpoint as a value: files, tensors, where each tensor's bytes lie, and their digests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardstore.specs import BLOCK, DTYPES, Box, TensorSpec

NAME = "shardstore.json"
HF_NAME = "model.safetensors.index.json"


def mark_name(attempt: str) -> str:
    """The file that says that an attempt is under way, or that its files are no longer needed."""
    return f"attempt-{attempt}.json"


class Piece(NamedTuple):
    """The part `box` of a tensor, contiguous in `file` (its number) from byte `offset` of the file on."""

    file: int
    offset: int
    box: Box


@dataclass(slots=True)
class FileEntry:
    """One data file. `blocks`: digests of its blocks, concatenated.

    `start`: where data begins in a shard, None for meta. `pieces`: numbers of the tensors whose pieces lie in it, in
    order, without gaps from `start` to the end.
    """

    path: str
    nbytes: int
    digest: bytes
    blocks: bytes
    start: int | None = None
    pieces: list[int] = field(default_factory=list)
    root: int = 0

    def block_digest(self, number: int, size: int) -> bytes:
        """The digest of block `number`, each being `size` bytes long."""
        return self.blocks[number * size : (number + 1) * size]


@dataclass
class Index:
    """All that shardstore.json says. Tensors are numbered in the order of the state.

    `kinds[t]` is the number of tensor t's spec in `table`. `parts` holds the boxes of pieces that are not whole
    tensors, by file and position in its pieces. `aliases` maps a tied tensor to the one that is stored.
    """

    attempt: str
    time: str
    hash: str
    files: list[FileEntry]
    meta: int
    paths: list[str]
    table: list[TensorSpec]
    kinds: list[int]
    aliases: dict[int, int] = field(default_factory=dict)
    parts: dict[int, dict[int, Box]] = field(default_factory=dict)
    run: str | None = None
    step: int | None = None
    seq: int = 0
    parent: str | None = None
    owner: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    world: int = 1
    roots: int = 1
    block: int = BLOCK

    @functools.cached_property
    def specs(self) -> list[TensorSpec]:
        """The spec of every tensor, by number."""
        return list(map(self.table.__getitem__, self.kinds))

    @functools.cached_property
    def whole(self) -> list[Box]:
        """The box of a whole tensor, by kind."""
        return [Box.whole(spec.shape) for spec in self.table]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of every whole tensor, by number."""
        return list(map([spec.nbytes for spec in self.table].__getitem__, self.kinds))

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)

    def resolve(self, tensor: int) -> int:
        """The number of the tensor whose bytes are stored for this one."""
        return self.aliases.get(tensor, tensor)

    def extents(self, file: int) -> Iterator[tuple[int, int, int]]:
        """Tensor, offset in the file and bytes of every piece of a file, in order."""
        entry = self.files[file]
        sizes = self.piece_sizes(file)
        offsets = itertools.accumulate(sizes, initial=entry.start or 0)
        return zip(entry.pieces, offsets, sizes, strict=False)

    def piece_sizes(self, file: int) -> list[int]:
        """Bytes of every piece of a file, in order."""
        pieces = self.files[file].pieces
        sizes = list(map(self.sizes.__getitem__, pieces))
        if file in self.parts:
            widths = [DTYPES[spec.dtype].itemsize for spec in self.table]
            volumes: dict[int, int] = {}
            for position, box in self.parts[file].items():
                volume = volumes.get(id(box)) or volumes.setdefault(id(box), box.volume)
                sizes[position] = volume * widths[self.kinds[pieces[position]]]
        return sizes

    @functools.cached_property
    def located(self) -> dict[int, list[Piece]]:
        """All pieces of every stored tensor, by its number. For a few tensors of a large index use `extents`."""
        found: dict[int, list[Piece]] = {}
        for file in range(len(self.files)):
            parts = self.parts.get(file)
            for position, (tensor, offset, _) in enumerate(self.extents(file)):
                box = parts.get(position) if parts else None
                piece = Piece(file, offset, box or self.whole[self.kinds[tensor]])
                found.setdefault(tensor, []).append(piece)
        return found

    def tensors_in(self, file: int, blocks: Sequence[int]) -> list[str]:
        """Paths of the tensors that have bytes in these blocks of a file, tied ones included."""
        wanted = set(blocks)
        there = {
            tensor
            for tensor, offset, size in self.extents(file)
            if size and not wanted.isdisjoint(range(offset // self.block, (offset + size - 1) // self.block + 1))
        }
        there.update(alias for alias, target in self.aliases.items() if target in there)
        return [self.paths[tensor] for tensor in sorted(there)]
