"""Hypothesis strategies for whole states: every plain type, tensors of every dtype with odd strides, ties."""

from __future__ import annotations

import datetime as dt
import pathlib
import struct
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from shardstore.specs import DTYPES


def _shown(dtype: torch.dtype) -> bool:
    """Whether torch can print tensors of this dtype without a word, as Hypothesis wants to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return bool(
                repr(torch.ones(32, dtype=torch.uint8).view(dtype))
                and repr(torch.ones(dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(()))
            )
    except Exception:  # noqa: BLE001 - whatever it is, it can't
        return False


TENSOR_DTYPES = [d for name in DTYPES if name != "complex32" and (d := getattr(torch, name, None)) and _shown(d)]
_FLOATING = [d for d in TENSOR_DTYPES if d.is_floating_point and d.itemsize > 1]
_NUMPY = [*"?", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "c8", "c16"]
_NUMPY += [">i4", ">f8", ">c8", "M8[s]", "m8[D]"]
_DEVICES = ["cpu", "cuda", "cuda:3", "meta"]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.one_of(
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]),
)
integers = st.one_of(
    st.integers(-5, 5), st.integers(), st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**64]),
    st.integers(0, 2000).map(lambda bits: -(1 << bits)),
)  # fmt: skip
zones = st.one_of(
    st.none(), st.just(dt.UTC), st.integers(-1439, 1439).map(lambda m: dt.timezone(dt.timedelta(minutes=m)))
)
times = st.one_of(
    st.datetimes(timezones=st.none()), st.dates(), st.times(), st.timedeltas(),
    st.builds(lambda when, zone: when.replace(tzinfo=zone), st.datetimes(), zones),
    st.builds(lambda when, fold: when.replace(fold=fold), st.datetimes(), st.integers(0, 1)),
)  # fmt: skip
torch_values = st.one_of(
    st.sampled_from(TENSOR_DTYPES),
    st.sampled_from(_DEVICES).map(torch.device),
    st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size),
)
paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).map(pathlib.Path)


@st.composite
def numpy_scalars(draw: Any) -> np.generic:
    """A numpy scalar of any type that is stored."""
    dtype = np.dtype(draw(st.sampled_from([name for name in _NUMPY if name[0] != ">"])))
    if dtype.kind == "b":
        return np.bool_(draw(st.booleans()))
    data = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    return np.frombuffer(data, dtype)[0]


@st.composite
def numpy_arrays(draw: Any) -> np.ndarray[Any, Any]:
    """A small array of any dtype, order and stride."""
    dtype = np.dtype(draw(st.sampled_from(_NUMPY)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype.kind == "b":
        data = bytes(byte % 2 for byte in data)
    array = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return draw(
        st.sampled_from([lambda a: a, lambda a: a.T, lambda a: a[..., ::-1] if a.ndim else a, np.asfortranarray])
    )(array)


plain = st.one_of(
    st.none(), st.booleans(), integers, floats, st.builds(complex, floats, floats), texts, st.binary(max_size=12),
    st.binary(max_size=6).map(bytearray), times, torch_values, paths, numpy_scalars(), numpy_arrays(),
)  # fmt: skip
keys = st.recursive(
    st.one_of(texts, integers, st.booleans(), st.none(), floats, st.binary(max_size=4), texts.map(lambda t: "$" + t)),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=3,
)
section_names = st.one_of(
    st.sampled_from(["model", "optimizer", "alpha", "beta.gamma", "x/y", "%2F", "", "__metadata__", "$t"]),
    texts,
    st.integers(0, 9),
)


def _conjugate(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj() if tensor.dtype in {torch.complex64, torch.complex128} else tensor


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t,
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t.permute(tuple(reversed(range(t.dim())))),
    lambda t: t[..., ::2] if t.dim() else t,
    lambda t: t[1:] if t.dim() else t,
    lambda t: t.unsqueeze(0).expand(2, *t.shape),
    lambda t: t[:, :1] if t.dim() > 1 else t,
    lambda t: t.reshape(-1)[-1:].reshape(()) if t.numel() and t.is_contiguous() else t,
    _conjugate,
]


@st.composite
def bases(draw: Any) -> torch.Tensor:
    """A contiguous tensor of any dtype with any bits, at any offset of its storage."""
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    lead = draw(st.integers(0, 3))
    count = int(np.prod(shape, dtype=int))
    data = draw(st.binary(min_size=(count + lead) * dtype.itemsize, max_size=(count + lead) * dtype.itemsize))
    if dtype is torch.bool:
        data = bytes(byte % 2 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat[lead:].reshape(shape)


def _sparse(tensor: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dense = tensor if tensor.dim() == 2 else torch.arange(6.0).view(2, 3)
        return dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()


@st.composite
def tensors(draw: Any, pool: list[torch.Tensor]) -> torch.Tensor:
    """A tensor: one of the pool (a tie), a view, a new one, a Parameter, one that needs gradients, a sparse one."""
    kind = draw(st.sampled_from(["pool", "pool", "view", "view", "new", "parameter", "grad", "sparse"]))
    base = pool[draw(st.integers(0, len(pool) - 1))]
    if kind == "new":
        return draw(bases())
    if kind in {"pool", "view"}:
        return base if kind == "pool" else draw(st.sampled_from(VIEWS))(base)
    floating = draw(st.sampled_from(_FLOATING))
    own = torch.tensor(draw(st.lists(st.floats(-9, 9), max_size=4)), dtype=floating)
    if kind == "parameter":
        return nn.Parameter(own, requires_grad=draw(st.booleans()))
    if kind == "grad":
        return own.requires_grad_()
    values = torch.tensor(draw(st.lists(st.integers(-1, 1), min_size=6, max_size=6)), dtype=torch.float32).view(2, 3)
    return _sparse(values, draw(st.sampled_from([torch.sparse_coo, torch.sparse_csr])))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple), pairs.map(dict), pairs.map(OrderedDict),
        st.dictionaries(texts, inner, max_size=4), st.sets(keys, max_size=3), st.frozensets(keys, max_size=3),
        st.lists(keys, max_size=4).map(Counter),
    )  # fmt: skip


@st.composite
def states(draw: Any) -> dict[Any, Any]:
    """A whole state: a dict of sections, or a flat dict of tensors."""
    pool = draw(st.lists(bases(), min_size=1, max_size=4))
    if draw(st.integers(0, 5)) == 0:
        return draw(st.dictionaries(texts, tensors(pool), min_size=1, max_size=5))
    leaves = st.one_of(plain, tensors(pool), tensors(pool))
    values = st.recursive(leaves, _containers, max_leaves=12)
    return draw(st.dictionaries(section_names, values, min_size=1, max_size=5))
