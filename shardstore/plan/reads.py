"""Which bytes of which file go where: pure. Reads are sorted, and each block of a file is read at most once.

A segment is `(offset in the file, address in memory, bytes)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shardstore.errors import Damaged
from shardstore.index import Index
from shardstore.specs import DTYPES, Box

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
    if boxed:
        _add_boxed(index, boxed, reads)
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


class _Hit(NamedTuple):
    """What a piece shares with a want. `at`: the place of the piece in its file; `held`: its box."""

    at: int
    want: int
    held: Box
    shared: Box


def _add_boxed(index: Index, wants: Sequence[Want], reads: Sequence[FileRead]) -> None:
    """Add what pieces share with the boxes that are wanted."""
    boxes = _boxes(index, wants)
    of_tensor: dict[int, list[int]] = {}
    for number, want in enumerate(wants):
        of_tensor.setdefault(want.tensor, []).append(number)
    left = [box.volume for box in boxes]
    overlaps: dict[tuple[int, int], Box | None] = {}
    for read in reads:
        hits = list(_hits(index, read.file, of_tensor, boxes, overlaps))
        offsets = [offset for _, offset, _ in index.extents(read.file)] if hits else []
        for hit in hits:
            left[hit.want] -= hit.shared.volume
            read.segments += _segments(index, wants[hit.want], boxes[hit.want], hit, offsets[hit.at])
    for want, missing in zip(wants, left, strict=True):
        if missing:
            path = index.paths[want.tensor]
            raise Damaged(f"the index has no bytes for all of {path!r}", tensors=(path,))


def _boxes(index: Index, wants: Sequence[Want]) -> list[Box]:
    """The box of each want; equal ones are one object. Raises Damaged for one that leaves its tensor."""
    known: dict[Box, Box] = {}
    boxes = []
    for want in wants:
        shape, path = index.specs[want.tensor].shape, index.paths[want.tensor]
        box = want.box or Box.whole(shape)
        if not box.inside(shape):
            raise Damaged(f"the index has no bytes for all of {path!r}", tensors=(path,))
        boxes.append(known.setdefault(box, box))
    return boxes


def _hits(
    index: Index, file: int, of_tensor: Mapping[int, Sequence[int]], boxes: Sequence[Box],
    overlaps: dict[tuple[int, int], Box | None],
) -> Iterator[_Hit]:  # fmt: skip
    """The pieces of a file that share something with a want.

    A thousand ranks have a million pieces, cut into few boxes: `overlaps` keeps what two boxes share, by their ids.
    """
    parts = index.parts.get(file, {})
    for at, tensor in enumerate(index.files[file].pieces):
        for want in of_tensor.get(tensor, ()):
            held = parts.get(at) or index.whole[index.kinds[tensor]]
            pair = id(held), id(boxes[want])
            if pair not in overlaps:
                overlaps[pair] = held.intersect(boxes[want])
            shared = overlaps[pair]
            if shared:
                yield _Hit(at, want, held, shared)


def _segments(index: Index, want: Want, wanted: Box, hit: _Hit, offset: int) -> list[Segment]:
    itemsize = DTYPES[index.specs[want.tensor].dtype].itemsize
    return [
        (offset + run.src, want.address + run.dst, run.nbytes) for run in hit.shared.runs(hit.held, wanted, itemsize)
    ]
