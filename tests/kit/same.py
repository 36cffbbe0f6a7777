"""Whether two states are the same: types, structure, order of keys, dtypes, shapes and every bit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> bytes:
    """The value of a strided tensor as row-major bytes, also of dtypes that torch can't compute with."""
    bare = tensor.detach().resolve_conj().resolve_neg()
    if bare.itemsize == 16:
        return bare.contiguous().numpy().tobytes()
    return bare.view(_BITS[bare.itemsize]).contiguous().numpy().tobytes()


def assert_same(one: Any, two: Any, where: str = "state") -> None:
    """Raise AssertionError, saying where, unless both are the same."""
    assert type(one) is type(two), f"{where}: {type(one)} and {type(two)}"
    if isinstance(one, torch.Tensor):
        _same_tensors(one, two, where)
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == two.dtype, f"{where}: {one.dtype!r} and {two.dtype!r}"
        assert one.dtype.str == two.dtype.str, where
        assert np.shape(one) == np.shape(two), f"{where}: {np.shape(one)} and {np.shape(two)}"
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), f"{where}: {one!r} and {two!r}"
    elif isinstance(one, dict):
        assert len(one) == len(two), f"{where}: keys {list(one)} and {list(two)}"
        for number, (key, other) in enumerate(zip(one, two, strict=True)):
            assert_same(key, other, f"{where}: key {number}")
            assert_same(one[key], two[other], f"{where}[{shown(key)[:80]}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), f"{where}: {len(one)} and {len(two)} items"
        for number, (item, other) in enumerate(zip(one, two, strict=True)):
            assert_same(item, other, f"{where}[{number}]")
    elif isinstance(one, set | frozenset):
        assert len(one) == len(two), where
        assert sorted(map(shown, one)) == sorted(map(shown, two)), f"{where}: {one} and {two}"
    else:
        assert shown(one) == shown(two), f"{where}: {one!r} and {two!r}"


def shown(value: Any) -> str:
    """A text that is equal for equal plain values only: it tells 1 from True and 1.0, and -0.0 and NaNs apart."""
    for kind, show in _SHOWN:
        if isinstance(value, kind) and type(value) is not bool:
            return show(value)
    return f"{type(value).__name__} {value!r}"


_SHOWN: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (np.generic, lambda value: f"{value.dtype!r} {value.tobytes().hex()}"),
    (int, lambda value: f"int {value:x}"),  # decimal digits are limited to some thousands
    (float, lambda value: f"float {struct.pack('>d', value).hex()}"),
    (complex, lambda value: f"complex {shown(value.real)} {shown(value.imag)}"),
    (torch.Size, repr),
    (tuple, lambda value: f"tuple ({', '.join(map(shown, value))})"),
    (frozenset, lambda value: f"frozenset ({', '.join(sorted(map(shown, value)))})"),
)


def _same_tensors(one: torch.Tensor, two: torch.Tensor, where: str) -> None:
    assert one.dtype == two.dtype, f"{where}: {one.dtype} and {two.dtype}"
    assert one.shape == two.shape, f"{where}: {one.shape} and {two.shape}"
    assert one.layout == two.layout, f"{where}: {one.layout} and {two.layout}"
    assert one.requires_grad == two.requires_grad, f"{where}: requires_grad"
    if one.layout is torch.strided:
        assert raw(one) == raw(two), f"{where}: {one} and {two}"
    else:
        _same_sparse(one.detach(), two.detach(), where)


def _same_sparse(one: torch.Tensor, two: torch.Tensor, where: str) -> None:
    names = {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    }[one.layout]
    for name in names:
        assert_same(getattr(one, name)(), getattr(two, name)(), f"{where}.{name}")
    if one.layout is torch.sparse_coo:
        assert one.is_coalesced() == two.is_coalesced(), where


def tensors_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every strided tensor of a plain state, with the keys that lead to it."""
    if isinstance(state, torch.Tensor):
        if state.layout is torch.strided:
            yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from tensors_in(value, (*path, number))


def ties(state: Any) -> set[frozenset[tuple[Any, ...]]]:
    """Groups of two and more non-empty tensors that show the same memory in the same way."""
    groups: dict[Any, set[tuple[Any, ...]]] = {}
    for path, tensor in tensors_in(state):
        if tensor.numel():
            how = tensor.shape, tensor.dtype, tensor.stride(), tensor.is_conj(), tensor.is_neg()
            groups.setdefault((tensor.data_ptr(), how), set()).add(path)
    return {frozenset(group) for group in groups.values() if len(group) > 1}
