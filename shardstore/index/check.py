"""Whether an index that was parsed makes sense: everything in range, every byte of every tensor exactly once."""

from __future__ import annotations

import math
from typing import NoReturn

from shardstore.errors import Damaged, InvalidArgument
from shardstore.header import ALIGN, MAX_HEADER
from shardstore.index.model import HF_NAME, NAME, FileEntry, Index
from shardstore.specs import Box, Shape, covers
from shardstore.storage.port import check_key

MAX_DIMS = 64


def check(index: Index, where: str) -> None:
    """Raise Damaged, naming what is wrong, unless the index is consistent in itself."""
    _check_files(index, where)
    _check_tensors(index, where)
    _check_pieces(index, where)


def _check_files(index: Index, where: str) -> None:
    seen = set()
    for file in index.files:
        try:
            check_key(file.path)
        except InvalidArgument as error:
            raise Damaged(f"{where}: {error}", file=where) from None
        if file.root >= index.roots or file.path in {NAME, HF_NAME}:
            _bad(where, f"the file {file.path!r} can't be one of a checkpoint's data files")
        if (file.root, file.path) in seen:
            _bad(where, f"the file {file.path!r} stands in it twice")
        seen.add((file.root, file.path))
        if file.pieces and max(file.pieces) >= len(index.paths):
            _bad(where, f"{file.path!r} holds an unknown tensor")
    if index.meta >= len(index.files) or _is_shard(index.files[index.meta]):
        _bad(where, "it does not say which file is the meta")


def _is_shard(file: FileEntry) -> bool:
    return file.start is not None or bool(file.pieces)


def _check_tensors(index: Index, where: str) -> None:
    count = len(index.paths)
    if len(index.kinds) != count or (count and max(index.kinds) >= len(index.table)):
        _bad(where, "its columns of tensors do not fit together")
    if len(set(index.paths)) != count:
        _bad(where, "a path stands in it twice")
    if any("/" not in path for path in index.paths):
        _bad(where, "a path has no section")
    for spec in index.table:
        if len(spec.shape) > MAX_DIMS or math.prod(spec.shape) >= 2**60:
            _bad(where, f"the shape {list(spec.shape)[:8]} is too large")
    for alias, target in index.aliases.items():
        if max(alias, target) >= count or target in index.aliases or index.kinds[alias] != index.kinds[target]:
            _bad(where, f"the alias of tensor {alias} makes no sense")


def _check_pieces(index: Index, where: str) -> None:
    """Each file is filled exactly by its pieces, and each stored tensor exactly by its pieces."""
    whole = bytearray(len(index.paths))
    boxes: dict[int, list[Box]] = {}
    for number, file in enumerate(index.files):
        if number != index.meta:
            _check_shard(index, number, where)
        parts = index.parts.get(number, {})
        for position, box in parts.items():
            boxes.setdefault(file.pieces[position], []).append(box)
        _count(whole, [tensor for at, tensor in enumerate(file.pieces) if at not in parts] if parts else file.pieces)
    for tensor, path in enumerate(index.paths):
        if whole[tensor] + (tensor in index.aliases) + (tensor in boxes) != 1:
            _bad(where, f"{path!r} is not stored exactly once")
    good: set[tuple[Shape, tuple[int, ...]]] = set()  # many tensors are cut alike, into the very same boxes
    for tensor, pieces in boxes.items():
        cut = index.specs[tensor].shape, tuple(map(id, pieces))
        if cut not in good and not covers(index.specs[tensor].shape, pieces):
            _bad(where, f"the pieces of {index.paths[tensor]!r} overlap or leave a hole")
        good.add(cut)


def _count(whole: bytearray, pieces: list[int]) -> None:
    """Count the whole pieces of tensors; two are as wrong as many."""
    for tensor in pieces:
        whole[tensor] = 1 + (whole[tensor] > 0)


def _check_shard(index: Index, number: int, where: str) -> None:
    file = index.files[number]
    if file.start is None:
        _bad(where, f"{file.path!r} has no start of data")
    end = file.start + sum(index.piece_sizes(number))
    if end != file.nbytes or file.start % ALIGN or not ALIGN <= file.start <= MAX_HEADER + ALIGN:
        _bad(where, f"the tensors of {file.path!r} end at byte {end}, the file at {file.nbytes}")


def _bad(where: str, why: str) -> NoReturn:
    raise Damaged(f"{where} is no valid index: {why}", file=where)
