"""Which bytes of which file go where: pure. Reads are sorted, and each block of a file is read at most once.

A segment is `(offset in the file, address in memory, bytes)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shardstore.errors import Damaged
from shardstore.index import Index
from shardstore.specs import DTYPES, Box, covered

Segment: TypeAlias = tuple[int, int, int]


class Want(NamedTuple):
    """The part `box` of a stored tensor (all of it: None), wanted row-major at `address`."""

    tensor: int
    address: int
    box: Box | None = None


@dataclass(slots=True)
class FileRead:
    """What is read of one file: the segments, by offset, without overlap.

    `before`: so many blocks from the start of the file are verified, too, though no segment lies in them.
    """

    file: int
    segments: list[Segment] = field(default_factory=list)
    before: int = 0

    def blocks(self, block: int) -> list[int]:
        """Numbers of the blocks that are read, in order."""
        found = list(range(self.before))
        for offset, _, nbytes in self.segments:
            first, last = offset // block, (offset + nbytes - 1) // block
            if found and first <= found[-1]:
                first = found[-1] + 1
            found.extend(range(first, last + 1))
        return found


def plan_reads(index: Index, wants: Iterable[Want]) -> list[FileRead]:
    """The reads that fill all wants. `wants` name stored tensors (no aliases), each byte of memory once.

    Raises Damaged where the pieces of the index leave a hole in what is wanted.
    """
    reads = [FileRead(file) for file in range(len(index.files))]
    whole, boxed = _sort_out(index, wants)
    if whole:
        for read in reads:
            for tensor, offset, size in index.extents(read.file):
                address = whole.get(tensor)
                if address is not None and size:
                    read.segments.append((offset, address, size))
    for want in boxed:
        _add_pieces(index, want, reads)
    for read in reads if boxed else ():
        read.segments.sort()
    return [read for read in reads if read.segments]


def _sort_out(index: Index, wants: Iterable[Want]) -> tuple[dict[int, int], list[Want]]:
    """Whole tensors in one piece, by number, and all that needs arithmetic on boxes."""
    in_pieces = {index.files[file].pieces[at] for file, boxes in index.parts.items() for at in boxes}
    whole: dict[int, int] = {}
    boxed: list[Want] = []
    for want in wants:
        if want.box is None and want.tensor not in in_pieces and want.tensor not in whole:
            whole[want.tensor] = want.address
        else:
            boxed.append(want)
    return whole, boxed


def _add_pieces(index: Index, want: Want, reads: Sequence[FileRead]) -> None:
    spec = index.specs[want.tensor]
    wanted = want.box or Box.whole(spec.shape)
    pieces = index.located.get(want.tensor, [])
    if not wanted.inside(spec.shape) or not covered(wanted, [piece.box for piece in pieces]):
        path = index.paths[want.tensor]
        raise Damaged(f"the index has no bytes for all of {path!r}", tensors=(path,))
    itemsize = DTYPES[spec.dtype].itemsize
    for piece in pieces:
        shared = wanted.intersect(piece.box)
        if shared:
            reads[piece.file].segments += [
                (piece.offset + run.src, want.address + run.dst, run.nbytes)
                for run in shared.runs(piece.box, wanted, itemsize)
            ]
