"""`diff`: how two checkpoints differ, whatever their formats. Holds a tensor of each at most, and mostly a window.

Tensors of two stores whose blocks have the same digests are equal without being read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardstore.errors import Damaged, brief
from shardstore.events import Listener
from shardstore.formats.plain import Tensor, bytes_of, spec_of
from shardstore.formats.port import Options
from shardstore.formats.store import StoredTensor
from shardstore.formats.table import read
from shardstore.hashing import DIGEST_BYTES
from shardstore.index import Index, Piece
from shardstore.memory import owned, torch_dtype
from shardstore.specs import DTYPES, TensorSpec
from shardstore.tree import PerRank
from shardstore.tree.arrays import layout_of, sparse_parts
from shardstore.tree.flatten import is_flat
from shardstore.tree.registry import BY_CLASS

_ELEMENTS = 512 * 1024
"""Compared at once; as float64 they take 4 MiB."""


@dataclass(frozen=True, slots=True)
class Different:
    """One thing that differs: `a` and `b` say for people what it is on each side; None where it is missing."""

    path: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor whose bytes differ. `b` compared with `a`.

    `changed`: elements whose bytes differ, of `elements`. `max_abs`, `mean_abs`: of the differences, where both are
    finite. `relative`: norm of the difference by the norm of `a` (inf where that is 0). These three are None where the
    type has no numbers. `nans` and `infs`: how many each side has.
    """

    path: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    elements: int
    changed: int
    max_abs: float | None
    mean_abs: float | None
    relative: float | None
    nans: tuple[int, int]
    infs: tuple[int, int]


@dataclass(slots=True)
class Comparison:
    """What `diff` found. `tensors`: the most changed ones first.

    `equal`: tensors that are bit-equal, `unread` of them by digests alone. `ties`: paths that share one tensor on one
    side only, which makes no difference to the values.
    """

    a: str
    b: str
    formats: tuple[str, str]
    structure: list[Different] = field(default_factory=list)
    values: list[Different] = field(default_factory=list)
    tensors: list[Change] = field(default_factory=list)
    ties: list[Different] = field(default_factory=list)
    equal: int = 0
    unread: int = 0

    @property
    def same(self) -> bool:
        """Whether both hold the same: structure, values, types and bits."""
        return not (self.structure or self.values or self.tensors)


def diff(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, listener: Listener | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Comparison:  # fmt: skip
    """Compare two checkpoints of any format, or RUN@STEP.

    Kinds of dicts, and whether the weights stand alone or in a section `model`, make no difference. A NaN is equal to
    one of the same bits. Raises what reading them raises: CheckpointNotFound, Damaged, UnsupportedState, StoreError.
    """
    options = Options(listener=listener, storage_options=storage_options)
    with ExitStack() as stack:
        one, two = (stack.enter_context(read(url, options=options)) for url in (a, b))
        found = Comparison(one.url, two.url, (one.format, two.format))
        sides = _leaves(one.state), _leaves(two.state)
        _compare(sides[0], sides[1], found)
        _compare_ties(sides[0], sides[1], found)
    found.tensors.sort(key=_importance)
    return found


def _importance(change: Change) -> tuple[float, str]:
    relative = math.inf if change.relative is None or math.isnan(change.relative) else change.relative
    return -relative, change.path


# ------------------------------------------------------------------------------------------------ structure


class _Empty:
    """Stands for a container without anything in it, or beside what is in it for its kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _leaves(state: Any) -> dict[tuple[Any, ...], Any]:
    """Every tensor, value and container of a state by its keys; dicts are all of one kind."""
    found: dict[tuple[Any, ...], Any] = {}
    _walk({"model": state} if isinstance(state, dict) and is_flat(state) else state, (), found)
    return found


def _walk(value: Any, at: tuple[Any, ...], found: dict[tuple[Any, ...], Any]) -> None:
    opened = _opened(value)
    if opened is None:
        found[at] = value
        return
    found[at], items = opened
    for key, item in items:
        _walk(item, _at(at, key, found), found)


def _opened(value: Any) -> tuple[_Empty, Iterable[tuple[Any, Any]]] | None:
    """What stands for a container, and what is in it; None for anything else."""
    if isinstance(value, dict):
        return _Empty("dict"), value.items()
    if type(value) in (list, tuple):
        return _Empty(type(value).__name__), enumerate(value)
    if isinstance(value, PerRank):
        return _Empty("PerRank"), enumerate(value.values)
    if isinstance(value, torch.Tensor) and (parts := sparse_parts(value)):
        return _Empty(f"{layout_of(value)} {list(value.shape)}"), parts.items()
    codec = BY_CLASS.get(type(value))
    return (_Empty(codec.name), [("value", codec.encode(value))]) if codec else None


def _at(at: tuple[Any, ...], key: Any, found: dict[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    """The place of a key: keys of different types or bits are different ones, and every NaN is like any other."""
    made = (*at, key if type(key) in (str, int) else _Key(_text(key)))
    while made in found:
        made = (*at, _Key(f"{made[-1]}'"))
    return made


@dataclass(frozen=True, slots=True)
class _Key:
    """A key that is neither text nor a whole number."""

    text: str

    def __str__(self) -> str:
        return self.text


def _text(value: Any) -> str:
    """A text for a value that is the same for equal ones, whatever their order in memory."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(map(_text, value))})"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))})"
    return f"{value:#x}" if type(value) is int else repr(value)


def _path(at: tuple[Any, ...]) -> str:
    """`section/name.name`, as in the index; keys that are no text as Python writes them."""
    parts = list(map(str, at))
    return "/".join(filter(None, [parts[0] if parts else "", ".".join(parts[1:])]))


def _compare(one: dict[tuple[Any, ...], Any], two: dict[tuple[Any, ...], Any], found: Comparison) -> None:
    for at in [*one, *(at for at in two if at not in one)]:
        if at not in one or at not in two:
            if at[:-1] in one and at[:-1] in two:  # else a container around it says so
                found.structure.append(Different(_path(at), _missing(one, at), _missing(two, at)))
        else:
            _compare_at(at, one[at], two[at], found)


def _missing(side: dict[tuple[Any, ...], Any], at: tuple[Any, ...]) -> str | None:
    return _shown(side[at]) if at in side else None


def _compare_at(at: tuple[Any, ...], a: Any, b: Any, found: Comparison) -> None:
    if isinstance(a, _Empty) or isinstance(b, _Empty):
        if not (isinstance(a, _Empty) and isinstance(b, _Empty) and a.kind == b.kind):
            found.structure.append(Different(_path(at), _shown(a), _shown(b)))
    elif isinstance(a, Tensor) != isinstance(b, Tensor):
        found.structure.append(Different(_path(at), _shown(a), _shown(b)))
    elif isinstance(a, Tensor):
        _compare_tensors(_path(at), a, b, found)
    elif not _equal(a, b):
        found.values.append(Different(_path(at), _shown(a), _shown(b)))


def _shown(value: Any) -> str:
    if isinstance(value, _Empty):
        return f"a {value.kind}"
    if isinstance(value, Tensor):
        spec = spec_of(value)
        return f"{spec.dtype} {list(spec.shape)}"
    return brief(value)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return _equal(a.real, b.real) and _equal(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return a == b if isinstance(a, str | bytes) else _text(a) == _text(b)


def _compare_ties(one: dict[tuple[Any, ...], Any], two: dict[tuple[Any, ...], Any], found: Comparison) -> None:
    first = _tied(one), _tied(two)
    for at in [*first[0], *(at for at in first[1] if at not in first[0])]:
        if at in one and at in two and first[0].get(at) != first[1].get(at):
            a, b = (f"= {_path(side[at])}" if at in side else "alone" for side in first)
            found.ties.append(Different(_path(at), a, b))


def _tied(side: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Where a tensor stands that stands elsewhere before."""
    first: dict[int, tuple[Any, ...]] = {}
    return {
        at: where
        for at, value in side.items()
        if isinstance(value, Tensor) and (where := first.setdefault(id(value), at)) != at
    }


# ------------------------------------------------------------------------------------------------ tensors


def _compare_tensors(path: str, a: Tensor, b: Tensor, found: Comparison) -> None:
    one, two = spec_of(a), spec_of(b)
    if one != two:
        found.structure.append(Different(path, _shown(a), _shown(b)))
        if one.shape != two.shape:
            return
    elif a is b or _same_digests(a, b):
        found.equal += 1
        found.unread += 1
        return
    change = _measured(path, a, b)
    if change is None:
        found.equal += one == two
    else:
        found.tensors.append(change)


def _same_digests(a: Tensor, b: Tensor) -> bool:
    """Whether the digests of all blocks that hold two stored tensors say that they are equal."""
    if not (isinstance(a, StoredTensor) and isinstance(b, StoredTensor)):
        return False
    one, two = a.source.index, b.source.index
    pieces = one.located[one.resolve(a.number)], two.located[two.resolve(b.number)]
    if (one.hash, one.block) != (two.hash, two.block) or [p.box for p in pieces[0]] != [p.box for p in pieces[1]]:
        return False
    itemsize = DTYPES[a.spec.dtype].itemsize
    return all(_same_blocks(one, p, two, q, p.box.volume * itemsize) for p, q in zip(*pieces, strict=True))


def _same_blocks(one: Index, p: Piece, two: Index, q: Piece, nbytes: int) -> bool:
    block, size = one.block, DIGEST_BYTES[one.hash]
    if p.offset % block != q.offset % block:
        return False
    count = -(-(p.offset % block + nbytes) // block)
    first = [(index.files[piece.file], piece.offset // block) for index, piece in ((one, p), (two, q))]
    a, b = (file.blocks[at * size : (at + count) * size] for file, at in first)
    return a == b


def _measured(path: str, a: Tensor, b: Tensor) -> Change | None:
    """How two tensors of one shape differ; None where they are bit-equal. NaN and infinities count apart."""
    specs = spec_of(a), spec_of(b)
    if specs[0] == specs[1] and all(map(torch.equal, _chunks(a, specs[0]), _chunks(b, specs[1]))):
        return None
    sums = _Sums()
    for one, two in zip(_chunks(a, specs[0]), _chunks(b, specs[1]), strict=True):
        sums.add(one, two, specs)
    elements = math.prod(specs[0].shape)
    return Change(path, (specs[0].dtype, specs[1].dtype), specs[0].shape, elements, sums.changed, *sums.result(),
                  (sums.nans[0], sums.nans[1]), (sums.infs[0], sums.infs[1]))  # fmt: skip


def _chunks(tensor: Tensor, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, in chunks of a number of elements that does not depend on how it is stored."""
    most = _ELEMENTS * DTYPES[spec.dtype].itemsize
    chunk = torch.empty(most, dtype=torch.uint8, device="cpu")
    room, used, left = owned(chunk), 0, spec.nbytes
    for buffer in bytes_of(tensor):
        at, left = 0, left - len(buffer)
        while at < len(buffer):
            part = buffer[at : at + most - used]
            room[used : used + len(part)] = part
            at, used = at + len(part), used + len(part)
            if used == most:
                yield chunk
                used = 0
    if left:
        raise Damaged(f"{spec.nbytes - left} bytes came of the {spec.nbytes} of a tensor")
    if used:
        yield chunk[:used]


class _Sums:
    """What is added up over the chunks of two tensors."""

    def __init__(self) -> None:
        self.changed = 0
        self.nans, self.infs = [0, 0], [0, 0]
        self._max = self._sum = self._squares = self._norm = 0.0
        self._finite = 0
        self._numbers = True

    def add(self, one: torch.Tensor, two: torch.Tensor, specs: tuple[TensorSpec, TensorSpec]) -> None:
        """Take two chunks of the same number of elements, as bytes."""
        alike = specs[0].dtype == specs[1].dtype
        if alike:
            width = DTYPES[specs[0].dtype].itemsize
            self.changed += int((one.view(-1, width) != two.view(-1, width)).any(1).sum())
        values = [_numbers(chunk, spec.dtype) for chunk, spec in zip((one, two), specs, strict=True)]
        a, b = values
        if a is None or b is None:
            self._numbers = False
            return
        finite = [torch.isfinite(chunk) for chunk in (a, b)]
        for side, chunk in enumerate((a, b)):
            nans = int(torch.isnan(chunk).sum())
            self.nans[side] += nans
            self.infs[side] += len(chunk) - int(finite[side].sum()) - nans
        self._measure(a, b, finite[0] & finite[1], alike=alike)

    def _measure(self, a: torch.Tensor, b: torch.Tensor, both: torch.Tensor, *, alike: bool) -> None:
        a, b = a[both], b[both]
        self._finite += len(a)
        self._norm += float(a.abs().square().sum())
        if not alike:
            self.changed += int((a != b).sum()) + len(both) - len(a)
        if len(a):
            away = (b - a).abs()
            self._max = max(self._max, float(away.max()))
            self._sum += float(away.sum())
            self._squares += float(away.square().sum())

    def result(self) -> tuple[float | None, float | None, float | None]:
        """Largest and mean absolute difference, and the relative norm of the change."""
        if not self._numbers:
            return None, None, None
        relative = math.sqrt(self._squares / self._norm) if self._norm else (math.inf if self._squares else 0.0)
        return self._max, self._sum / max(self._finite, 1), relative


def _numbers(chunk: torch.Tensor, dtype: str) -> torch.Tensor | None:
    """Bytes as float64 or complex128; None for types that stand for no numbers."""
    values = chunk.view(torch_dtype(dtype))
    try:
        return values.to(torch.complex128 if values.is_complex() else torch.float64)
    except NotImplementedError:  # packed floats, bare bits, ints of few bits: torch has no conversion for them
        return None
