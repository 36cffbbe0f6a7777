"""Any state there is: flatten, dump, parse, restore, and bind into a copy of itself."""

from __future__ import annotations

import copy
import datetime as dt
from collections import Counter, OrderedDict

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import Mismatch, UnsupportedState
from shardstore.specs import DTYPES
from shardstore.tree import flatten
from tests.tree.loader import Saved, same

TORCH = [
    getattr(torch, name) for name in ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn", "uint16")
]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """Small tensors of many dtypes, strides and kinds."""
    dtype = draw(st.sampled_from(TORCH))
    tensor = torch.randint(0, 2, draw(shapes)).to(dtype)
    match draw(st.integers(0, 4)):
        case 0 if tensor.dim() > 1:
            return tensor.transpose(0, 1)
        case 1 if tensor.is_floating_point():
            return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
        case 2 if dtype is torch.complex64:
            return tensor.conj()
        case 3:
            return tensor.expand(2, *tensor.shape)
    return tensor


texts = st.text(st.characters(exclude_categories=()), max_size=6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | texts
    | st.binary(max_size=5)
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
    | st.sampled_from([*TORCH, torch.device("cpu"), torch.Size([1, 2]), dt.UTC and dt.time(3, fold=1)])
    | st.floats(width=32).map(np.float32)
    | st.integers(-100, 100).map(np.int8)
    | st.lists(st.floats(width=16), max_size=3).map(lambda v: np.array(v, "f2"))
)
keys = (
    texts | st.integers(-5, 5) | st.booleans() | st.none() | st.tuples(st.integers(0, 3), texts) | st.binary(max_size=2)
)
plain_keys = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(plain_keys, inner, max_size=4)
        | st.dictionaries(plain_keys, tensors(), max_size=5)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(plain_keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(plain_keys, st.integers(), max_size=3).map(Counter)
        | st.sets(st.integers() | plain_keys, max_size=3)
        | st.frozensets(st.tuples(st.integers(), plain_keys), max_size=3)
    ),
    max_leaves=25,
)
states = st.dictionaries(plain_keys, trees, max_size=5)


def storable(state):
    """Whether the only possible refusal, a tensor whose path is no Unicode, doesn't apply."""
    try:
        flatten(state)
    except UnsupportedState as error:
        if "Unicode" in str(error):
            return False
        raise
    return True


@given(states)
def test_any_state_comes_back_as_it_was(state):
    """Types, order, structure and bits, twice over; paths are unique, specs are those of the tensors."""
    if not storable(state):
        return
    saved = Saved(state)
    back = saved.fresh()
    assert same(back, state)
    assert len(set(saved.paths)) == len(saved.paths)
    assert all(spec.dtype in DTYPES for spec in saved.specs)
    assert all(first < number and first not in saved.aliases for number, first in saved.aliases.items())
    again = Saved(back)
    assert again.paths == saved.paths
    assert again.meta.state == saved.meta.state


def emptied(value):
    """The same structure with other values in its tensors."""
    if isinstance(value, torch.Tensor):
        made = torch.zeros(value.shape, dtype=value.dtype)
        return (
            torch.nn.Parameter(made, requires_grad=value.requires_grad) if type(value) is torch.nn.Parameter else made
        )
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)((key, emptied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(emptied, value))
    return copy.deepcopy(value)


@given(states.filter(bool))
def test_any_state_loads_into_a_like_structure(state):
    """Every tensor in place, every plain value replaced; the planned tensors are those of the target itself."""
    if not storable(state):
        return
    saved = Saved(state)
    target = emptied(state)
    result = saved.into(target)
    assert result is target
    assert same(result, state)


@given(states, st.lists(st.sampled_from(["**", "*/", "*/a*", "**.0", "**0", "?/**"]), min_size=1, max_size=2))
def test_a_selection_is_a_part_of_the_state(state, patterns):
    """Selected leaves are bit-equal to those of the whole, and no others come along in dicts."""
    if not storable(state):
        return
    saved = Saved(state)
    try:
        part = saved.fresh(patterns)
    except Mismatch:
        return
    for key, value in part.items():
        assert type(value) is type(state[key])
    if "**" in patterns:
        assert same(part, state)
