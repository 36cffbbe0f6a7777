"""The small vocabulary that all layers share: dtypes, tensor specs, boxes. No torch.

The dtype tags and their order come from the safetensors format (its README and `Dtype` enum); what safetensors can't
express is stored as another tag of the same bytes (`docs/format.md`, "Types").
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]

BLOCK = 4 * 1024 * 1024
"""Bytes of a block: the unit in which files are hashed, verified and fetched in part."""


@dataclass(frozen=True, slots=True)
class DType:
    """How one element is stored. `tail` is appended to the shape in a safetensors header; `packed`: two a byte."""

    name: str
    tag: str
    itemsize: int
    tail: Shape = ()
    packed: bool = False

    def stored_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape that a safetensors header shows for a tensor of `shape`."""
        if self.packed:
            return [*shape[:-1], shape[-1] * 2] if shape else [2]
        return [*shape, *self.tail]


def _table() -> dict[str, DType]:
    plain = {
        "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1),
        "uint16": ("U16", 2), "int16": ("I16", 2), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
        "uint32": ("U32", 4), "int32": ("I32", 4), "float32": ("F32", 4),
        "uint64": ("U64", 8), "int64": ("I64", 8), "float64": ("F64", 8), "complex64": ("C64", 8),
        "float8_e5m2": ("F8_E5M2", 1), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
        "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    }  # fmt: skip
    table = {name: DType(name, tag, size) for name, (tag, size) in plain.items()}
    table["float4_e2m1fn_x2"] = DType("float4_e2m1fn_x2", "F4", 1, packed=True)
    table["complex128"] = DType("complex128", "F64", 16, (2,))
    table["complex32"] = DType("complex32", "F16", 4, (2,))
    table["bits16"] = DType("bits16", "U16", 2)
    containers = [f"{kind}{bits}" for kind in ("uint", "int") for bits in range(1, 8)]
    for name in ["bits8", "bits1x8", "bits2x4", "bits4x2", *containers]:
        table[name] = DType(name, "U8", 1)
    return table


DTYPES: dict[str, DType] = _table()
"""Every dtype that can be stored, by the name that torch gives it (`float32`, not `torch.float32`)."""


class TensorSpec(NamedTuple):
    """What a tensor is, without its values. `dtype` is a key of DTYPES; `shape` is the logical, global one."""

    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, as stored."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class Lazy(ABC):
    """A tensor that is not in memory. It may stand in a state that is saved, wherever a tensor may.

    The same object in two places is a tie.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, as stored."""
        return self.spec.nbytes

    @abstractmethod
    def buffers(self) -> Iterable[memoryview]:
        """Its bytes, row-major, in slices of a few MiB, anew at each call; safe for threads.

        A buffer stays valid as long as it is referenced. Raises StoreError or Damaged where they can't be read.
        """


class Run(NamedTuple):
    """`nbytes` contiguous bytes: at `src` from the start of one tensor, at `dst` from the start of another."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor: `shape` elements from `origin` on, in each dimension."""

    origin: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What an array is indexed with to get this part of it."""
        return tuple(slice(at, at + size) for at, size in zip(self.origin, self.shape, strict=True))

    def inside(self, shape: Shape) -> bool:
        """Whether this box lies within a tensor of `shape`."""
        return len(self.origin) == len(self.shape) == len(shape) and all(
            0 <= at and 0 <= size and at + size <= limit
            for at, size, limit in zip(self.origin, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """What both cover, or None where that is empty."""
        origin = tuple(map(max, self.origin, other.origin))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.origin, self.shape, other.origin, other.shape, strict=True)
        )
        shape = tuple(end - at for end, at in zip(ends, origin, strict=True))
        return Box(origin, shape) if all(size > 0 for size in shape) else None

    def runs(self, src: Box, dst: Box, itemsize: int) -> Iterator[Run]:
        """The contiguous byte runs that carry this box from `src` to `dst`, row-major boxes that both contain it."""
        rank = len(self.shape)
        split = rank  # dimensions from `split` on are contiguous in both
        while split > 0 and self.shape[split:] == src.shape[split:] == dst.shape[split:]:
            split -= 1
        width = itemsize * math.prod(self.shape[split:])
        if not self.volume:
            return
        for outer in _counter(self.shape[:split]):
            at = tuple(a + b for a, b in zip(self.origin, (*outer, *(0,) * (rank - split)), strict=True))
            yield Run(src._offset(at) * itemsize, dst._offset(at) * itemsize, width)

    def _offset(self, at: Shape) -> int:
        """Elements before the global position `at`, in row-major order of this box."""
        offset = 0
        for position, origin, size in zip(at, self.origin, self.shape, strict=True):
            offset = offset * size + (position - origin)
        return offset


def _counter(shape: Shape) -> Iterator[Shape]:
    """Every index of `shape`, in row-major order; one empty index for no dimensions."""
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _counter(shape[1:]):
            yield (first, *rest)


def covers(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether the boxes cover a tensor of `shape` exactly: all inside, no overlap, no hole."""
    if any(not box.inside(shape) for box in boxes):
        return False
    parts = [box for box in boxes if box.volume]
    if sum(box.volume for box in parts) != math.prod(shape):
        return False
    return not _overlap(parts)


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes share an element: a sweep along the first dimension keeps the pairs few."""
    if boxes and not boxes[0].shape:
        return len(boxes) > 1
    live: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.origin):
        live = [b for b in live if b.origin[0] + b.shape[0] > box.origin[0]]
        if any(b.intersect(box) for b in live):
            return True
        live.append(box)
    return False
