"""Arbitrary states go round: loaded anew, into a target, mapped, in part, opened; and they stay as they are."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardstore
from shardstore.loading import LazyTensor
from shardstore.storage import memory
from tests.kit.same import assert_same, raw, shown, tensors_in, ties
from tests.kit.states import bases, states

_NUMBERS = itertools.count()
OPTIONS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["balanced", "round_robin", "by_group"]),
        "hash": st.sampled_from(["xxh3_128", "sha256"]),
        "shards": st.one_of(st.none(), st.integers(1, 6)),
        "threads": st.integers(1, 3),
    }
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder for all examples of a test."""
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as made:
        yield Path(made)


def place() -> str:
    """A new place in memory."""
    memory.reset()
    return f"memory://roundtrip/{next(_NUMBERS)}"


def snapshot(value: Any) -> Any:
    """All that a save must not change: identity, memory, strides, versions, bits, plain values, structure."""
    if isinstance(value, torch.Tensor):
        memory_of = (value.data_ptr(), value.stride(), raw(value)) if value.layout is torch.strided else ()
        return id(value), value._version, value.requires_grad, value.is_leaf, value.shape, memory_of
    if isinstance(value, np.ndarray):
        return id(value), value.__array_interface__["data"], value.strides, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return id(value), type(value), [(shown(key), snapshot(item)) for key, item in value.items()]
    if type(value) in {list, tuple}:
        return id(value), type(value), [snapshot(item) for item in value]
    if isinstance(value, set | frozenset):
        return id(value), sorted(map(shown, value))
    return shown(value)


def blank(value: Any) -> Any:
    """A target like a state: tensors of zeros, None for plain values."""
    if isinstance(value, torch.Tensor):
        return _blank_tensor(value)
    if isinstance(value, Counter):
        return None
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(blank(item) for item in value)
    return None


def _blank_tensor(value: torch.Tensor) -> torch.Tensor:
    if value.layout is not torch.strided:
        return torch.zeros(value.shape, dtype=value.dtype).to_sparse(layout=value.layout)
    nbytes = value.numel() * value.itemsize
    made = torch.zeros(nbytes, dtype=torch.uint8).view(value.dtype) if nbytes else torch.empty(0, dtype=value.dtype)
    made = made.reshape(value.shape)
    if type(value) is nn.Parameter:
        return nn.Parameter(made, requires_grad=value.requires_grad)
    return made.requires_grad_(value.requires_grad)


@given(states(), OPTIONS)
@settings(max_examples=120)
def test_any_state_comes_back_and_stays_as_it_was(state: dict, options: dict):
    """Type, structure, order, dtype, shape, bits and ties are the same after a load; the state is not touched."""
    url = place()
    before = snapshot(state)
    shardstore.save(state, url, **options)
    assert snapshot(state) == before
    loaded = shardstore.load(url, threads=options["threads"])
    assert_same(loaded, state)
    assert ties(loaded) == ties(state)
    assert shardstore.verify(url).ok
    again = place()
    shardstore.save(loaded, again, **options)
    assert_same(shardstore.load(again), state)


@given(states(), OPTIONS)
@settings(max_examples=60)
def test_any_state_is_loaded_into_a_target_like_it(state: dict, options: dict):
    """Filled in place: the target's own tensors are kept, plain values are what was saved."""
    url = place()
    shardstore.save(state, url, **options)
    target = blank(state)
    own = {path: (id(tensor), tensor.data_ptr()) for path, tensor in tensors_in(target)}
    assert shardstore.load(url, into=target) is target
    assert_same(target, state)
    assert {path: (id(tensor), tensor.data_ptr()) for path, tensor in tensors_in(target) if path in own} == own


@given(states(), OPTIONS)
@settings(max_examples=60)
def test_any_state_comes_back_from_a_folder_copied_and_mapped(folder: Path, state: dict, options: dict):
    """The same through files; mapped tensors may be written to without a change of the file."""
    url = folder / str(next(_NUMBERS))
    shardstore.save(state, url, **options)
    mapped = shardstore.load(url, mode="map")
    assert_same(mapped, state)
    assert ties(mapped) == ties(state)
    with torch.no_grad():
        for _, tensor in tensors_in(mapped):
            if tensor.dtype in {torch.float32, torch.int64, torch.uint8}:
                tensor.zero_()
    assert_same(shardstore.load(url), state)
    assert shardstore.verify(url).ok


@given(states(), st.data())
@settings(max_examples=60)
def test_any_section_can_be_loaded_alone(state: dict, data: Any):
    """`only` with a section's name gives that section whole, and the rest is not there."""
    named = {key: value for key, value in state.items() if isinstance(key, str) and key.replace(".", "").isalnum()}
    state = {**state, "zulu": {"w": torch.ones(2), "n": (1,)}}
    chosen = data.draw(st.sets(st.sampled_from([*named, "zulu"]), min_size=1))
    url = place()
    shardstore.save(state, url)
    wanted = {key: value for key, value in state.items() if str(key) in chosen}  # the sections 6 and "6" have one label
    assert_same(shardstore.load(url, only=sorted(chosen)), wanted)
    assert_same(shardstore.load(url, only="**"), state)


@given(states())
@settings(max_examples=60)
def test_an_opened_checkpoint_shows_the_same(state: dict):
    """Lazy tensors have dtype, shape and bits of what was saved, and `plain()` the same structure."""
    url = place()
    shardstore.save(state, url)
    wanted = [tensor for _, tensor in tensors_in(state)]
    with shardstore.open(url) as ckpt:
        found = {path: lazy.load() for path, lazy in ckpt.items()}
        assert len(found) >= len(wanted)
        bits = [(t.dtype, t.shape, raw(t)) for t in found.values()]
        assert all((t.dtype, t.shape, raw(t)) in bits for t in wanted)
        assert all((lazy.dtype, lazy.shape) == (found[path].dtype, found[path].shape) for path, lazy in ckpt.items())
        same_structure(ckpt.plain(), state)


def same_structure(lazy: Any, state: Any) -> None:
    """Whether a structure is that of a state, with lazy tensors where tensors and arrays are."""
    if isinstance(lazy, LazyTensor):
        assert isinstance(state, torch.Tensor | np.ndarray)
        assert tuple(lazy.shape) == tuple(state.shape)
        return
    if isinstance(state, torch.Tensor):
        assert state.layout is not torch.strided
        return
    assert type(lazy) is type(state)
    if isinstance(state, dict):
        assert list(map(shown, lazy)) == list(map(shown, state))
        for one, two in zip(lazy.values(), state.values(), strict=True):
            same_structure(one, two)
    elif isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        for one, two in zip(lazy, state, strict=True):
            same_structure(one, two)
    else:
        assert_same(lazy, state)


indices = st.one_of(
    st.integers(-5, 5),
    st.builds(slice, st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6), st.none() | st.integers(1, 4)),
)


@given(bases(), st.lists(indices, max_size=4), st.booleans(), st.data())
@settings(max_examples=150)
def test_any_slice_is_as_torch_slices(tensor: torch.Tensor, key: list, dots: bool, data: Any):
    """Whole numbers, slices with steps, ellipses: the same part as of the tensor itself, or an IndexError as there."""
    if dots:
        key.insert(data.draw(st.integers(0, len(key))), ...)
    url = place()
    shardstore.save({"model": {"t": tensor, "u": torch.ones(3)}}, url)
    bits = tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.itemsize]
    )
    with shardstore.open(url) as ckpt:
        lazy = ckpt["model/t"]
        try:
            wanted = bits[tuple(key)]
        except IndexError:
            with pytest.raises(IndexError):
                lazy[tuple(key)]
        else:
            part = lazy[tuple(key)]
            assert part.shape == wanted.shape
            assert part.dtype == tensor.dtype
            assert raw(part) == raw(wanted)


def test_a_large_state_of_every_dtype(folder: Path):
    """Sizes around the limits at which tensors are gathered, copied in windows, and read straight, all in one state."""
    sizes = [
        1,
        63,
        64 * 1024 - 4,
        64 * 1024,
        64 * 1024 + 4,
        1024 * 1024 - 4,
        1024 * 1024,
        4 * 1024 * 1024,
        4 * 1024 * 1024 + 4,
        9_000_000,
    ]
    made = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {"model": {}, "other": []}
    for number, size in enumerate(sizes):
        tensor = torch.randint(0, 256, (size // 4 * 4 or 4,), dtype=torch.uint8, generator=made)
        state["model"][f"a{number}"] = tensor
        state["model"][f"f{number}"] = tensor.view(torch.float32)
        state["other"].append(tensor.view(torch.int16).reshape(2, -1).t())
    for options in ({"shards": 1}, {"shards": 5, "layout": "round_robin"}, {"shard_bytes": 5_000_000}):
        url = folder / str(next(_NUMBERS))
        shardstore.save(state, url, **options)
        assert_same(shardstore.load(url), state)
        assert_same(shardstore.load(url, mode="map"), state)
        target = blank(state)
        target["other"] = [torch.zeros(tuple(reversed(t.shape)), dtype=t.dtype).t() for t in state["other"]]
        shardstore.load(url, into=target)
        assert_same(target, state)
        assert shardstore.verify(url).ok
