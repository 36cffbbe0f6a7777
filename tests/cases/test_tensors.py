"""Odd tensors: ties, views, strides, every dtype, empty ones, and those that can't be stored."""

from __future__ import annotations

import gc
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import shardstore
from shardstore.errors import InvalidArgument, Mismatch, StoreError, UnsupportedState
from shardstore.events import Progress, Started
from shardstore.header import ALIGN
from tests.kit.damage import files_of, index_of, parts_of, shards_of
from tests.kit.same import assert_same, raw, ties
from tests.kit.syscalls import short, trouble, watched

MIB = 1 << 20
DTYPES = {str(value)[6:]: value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def data_bytes(folder: Path) -> int:
    """Bytes of tensor data in all shards of a checkpoint."""
    return sum(len(parts_of((folder / path).read_bytes())[1]) for path in shards_of(folder))


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype with every bit pattern of a byte in turn; valid booleans."""
    count = int(np.prod(shape, dtype=int)) * torch.empty(0, dtype=dtype).itemsize
    data = torch.arange(count, dtype=torch.int64) * 37 % (2 if dtype is torch.bool else 256)
    return data.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros of any dtype."""
    count = int(np.prod(shape, dtype=int)) * torch.empty(0, dtype=dtype).itemsize
    return (
        torch.zeros(count, dtype=torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    )


# ------------------------------------------------------------------------------------------------ T01: ties


def test_T01_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path):
    """Two names of one tensor: saved once, both load bit-equal, share memory again, and the index knows the alias."""
    w = torch.randn(8, 4)
    shardstore.save({"emb.weight": w, "head.weight": w}, tmp_path / "c")
    assert data_bytes(tmp_path / "c") == w.nbytes
    assert index_of(tmp_path / "c")["tensors"]["aliases"] == [[1, 0]]
    loaded = shardstore.load(tmp_path / "c")
    assert_same(loaded, {"emb.weight": w, "head.weight": w})
    loaded["emb.weight"][3, 1] = 77
    assert loaded["head.weight"][3, 1] == 77


@pytest.mark.parametrize("options", [{}, {"mode": "map"}, {"threads": 1}], ids=["copy", "map", "one thread"])
def test_T01_ties_hold_across_sections_depths_and_kinds(tmp_path: Path, options: dict):
    """Ties between sections, inside lists, of Parameters, of 0-dim and strided tensors come back, and no others."""
    w, s, t = torch.randn(30, 20), torch.tensor(3.0), torch.randn(6, 5).t()
    state = {
        "model": {"a": w, "b": torch.randn(30, 20), "c": w, "s": s, "t": t},
        "optimizer": {"deep": [1, {"x": (w, s)}], "same values": w.clone(), "t": t},
    }
    shardstore.save(state, tmp_path / "c", shards=4)
    loaded = shardstore.load(tmp_path / "c", **options)
    assert_same(loaded, state)
    assert ties(loaded) == ties(state)
    assert len(ties(state)) == 3
    assert data_bytes(tmp_path / "c") == 3 * w.nbytes + s.nbytes + t.nbytes


def test_T01_a_tied_model_saves_and_loads_into_a_tied_model(tmp_path: Path):
    """A Module with a tied head goes through `save` and `load(into=)` as it is, and stays tied."""

    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({"emb": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
        model["head"].weight = model["emb"].weight
        return model

    one, two = build(), build()
    assert not torch.equal(one["emb"].weight, two["emb"].weight)
    shardstore.save({"model": one}, tmp_path / "c")
    shardstore.load(tmp_path / "c", into={"model": two})
    assert two["head"].weight is two["emb"].weight
    assert_same(two.state_dict(), one.state_dict())
    assert data_bytes(tmp_path / "c") == one["emb"].weight.nbytes


def test_T01_an_alias_can_be_loaded_alone(tmp_path: Path):
    """The name that is not stored itself is readable alone: by `only`, by `open`, and into a target with just it."""
    w = torch.randn(8, 4)
    shardstore.save({"model": {"emb": w, "head": w}}, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c", only="model/head"), {"model": {"head": w}})
    with shardstore.open(tmp_path / "c") as ckpt:
        assert_same(ckpt["model/head"][2:5], w[2:5])
    into = {"model": {"head": torch.zeros(8, 4)}}
    shardstore.load(tmp_path / "c", into=into, allow_unexpected="model/emb")
    assert_same(into, {"model": {"head": w}})


def test_T01_a_tied_checkpoint_fills_an_untied_target(tmp_path: Path):
    """Both of two separate tensors are filled from the one that is stored."""
    w = torch.randn(8, 4)
    shardstore.save({"a": w, "b": w}, tmp_path / "c")
    into = {"a": torch.zeros(8, 4), "b": torch.zeros(4, 8).t()}
    shardstore.load(tmp_path / "c", into=into)
    assert torch.equal(into["a"], w)
    assert torch.equal(into["b"], w)
    assert into["b"].stride() == (1, 8)


def test_T01_other_views_of_the_same_memory_are_no_ties(tmp_path: Path):
    """Same address but another shape, stride, dtype or conjugation: every one is stored as what it shows."""
    w = torch.randn(6, 6)
    c = torch.randn(4, dtype=torch.complex64)
    state = {"w": w, "t": w.t(), "flat": w.view(36), "part": w[:2], "bits": w.view(torch.int32), "c": c, "cc": c.conj()}
    shardstore.save(state, tmp_path / "c")
    assert index_of(tmp_path / "c")["tensors"]["aliases"] == []
    loaded = shardstore.load(tmp_path / "c")
    assert_same({k: v.resolve_conj() for k, v in state.items()}, loaded)
    assert ties(loaded) == set()


# ------------------------------------------------------------------------------------------------ views


def test_T03_slices_of_a_big_buffer_write_only_themselves(tmp_path: Path):
    """Four slices of ten elements cost 160 bytes, not four million each."""
    big = torch.zeros(10**6)
    big[:40] = torch.arange(40.0)
    state = {f"c{i}": big[10 * i : 10 * i + 10] for i in range(4)}
    saved = shardstore.save(state, tmp_path / "c")
    assert data_bytes(tmp_path / "c") == 160
    assert saved.nbytes < 4096
    assert_same(shardstore.load(tmp_path / "c"), state)


@pytest.mark.parametrize("options", [{}, {"mode": "map"}], ids=["copy", "map"])
def test_T04_parts_of_a_flat_buffer_are_no_aliases(tmp_path: Path, options: dict):
    """Views of one flat buffer that don't overlap are saved once each, and are independent after the load."""
    f = torch.arange(100.0)
    state = {"a": f[:40].view(8, 5), "b": f[40:]}
    shardstore.save(state, tmp_path / "c")
    assert data_bytes(tmp_path / "c") == 400
    assert index_of(tmp_path / "c")["tensors"]["aliases"] == []
    loaded = shardstore.load(tmp_path / "c", **options)
    assert_same(loaded, state)
    loaded["a"].fill_(-1)
    assert torch.equal(loaded["b"], f[40:])


def test_T04_overlapping_views_are_stored_as_what_they_show(tmp_path: Path):
    """Views that do overlap are neither refused nor cut; afterwards each has memory of its own."""
    f = torch.arange(100.0)
    state = {"a": f[:60], "b": f[40:], "all": f, "tail": f[99:], "head": f[:1]}
    shardstore.save(state, tmp_path / "c")
    loaded = shardstore.load(tmp_path / "c")
    assert_same(loaded, state)
    loaded["all"].zero_()
    assert_same({k: v for k, v in loaded.items() if k != "all"}, {k: v for k, v in state.items() if k != "all"})


STRIDED = {
    "channels_last": lambda n: torch.randn(2, 3, n, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda n: torch.randn(2, 3, 4, n, 5).to(memory_format=torch.channels_last_3d),
    "transposed": lambda n: torch.randn(4, 6 * n).t(),
    "permuted": lambda n: torch.randn(3, n, 4).permute(1, 2, 0),
    "every second": lambda n: torch.randn(7, 4 * n)[:, ::2],
    "narrowed": lambda n: torch.randn(n, 9)[:, 2:7],
    "unfolded": lambda n: torch.arange(3.0 * n).unfold(0, 3, 1),
    "diagonal": lambda n: torch.randn(n, 3, 3).diagonal(dim1=1, dim2=2),
    "conjugated": lambda n: torch.randn(5, n, dtype=torch.complex64).conj(),
    "conjugated transposed": lambda n: torch.randn(5, n, dtype=torch.complex128).mH,
    "imaginary of a conjugate": lambda n: torch.randn(5, n, dtype=torch.complex64).conj().imag,
    "one wide": lambda n: torch.randn(n, 6).t()[:1],
}


@pytest.mark.parametrize("size", [4, 9_000, 120_000], ids=["small", "medium", "larger than a window"])
@pytest.mark.parametrize("name", STRIDED)
def test_T07_any_strides_are_saved_and_the_tensor_stays_as_it_is(shm_path: Path, name: str, size: int):
    """Values are equal, the result is row-major (as the format says), and the caller's tensor is not modified."""
    tensor = STRIDED[name](size)
    before = (tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), raw(tensor))
    shardstore.save({"k": tensor, "l": torch.ones(3)}, shm_path / "c")
    assert before == (tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), raw(tensor))
    loaded = shardstore.load(shm_path / "c")["k"]
    assert_same(loaded, tensor.resolve_conj().resolve_neg())
    assert loaded.is_contiguous()


@pytest.mark.parametrize("size", [4, 9_000], ids=["small", "medium"])
@pytest.mark.parametrize("name", [name for name in STRIDED if name != "unfolded"])
def test_T07_targets_of_any_strides_are_filled_in_place(shm_path: Path, name: str, size: int):
    """`load(into=)` writes the values through the target's own strides, conjugation included, and around its gaps."""
    target = STRIDED[name](size)
    value = torch.randn(target.shape).to(target.dtype) if not target.is_complex() else torch.randn_like(target)
    value = value.contiguous().resolve_conj()
    shardstore.save({"k": value}, shm_path / "c")
    before = (target.data_ptr(), target.stride(), target.is_conj(), target.is_neg())
    shardstore.load(shm_path / "c", into={"k": target})
    assert before == (target.data_ptr(), target.stride(), target.is_conj(), target.is_neg())
    assert raw(target) == raw(value)


def test_T07_gaps_of_a_strided_target_stay_untouched(tmp_path: Path):
    """What lies between the elements of a view that is filled is somebody else's memory."""
    base = torch.full((6, 10), -5.0)
    shardstore.save({"k": torch.arange(24.0).view(6, 4)}, tmp_path / "c")
    shardstore.load(tmp_path / "c", into={"k": base[:, 1:9:2]})
    assert torch.equal(base[:, 1:9:2], torch.arange(24.0).view(6, 4))
    assert (base[:, 0::2] == -5).all()
    assert (base[:, 9] == -5).all()


def test_progress_is_told_in_small_steps_however_large_a_tensor_is(tmp_path: Path):
    """No step is above a block of 4 MiB, and they add up to the bytes that were announced."""
    seen = []
    saved = shardstore.save({"w": torch.zeros(3 * 2**20 + 1)}, tmp_path / "c", listener=seen.append)
    steps = [event.nbytes for event in seen if isinstance(event, Progress)]
    assert max(steps) == 2**22
    assert sum(steps) == saved.nbytes


@pytest.mark.parametrize("options", [{}, {"mode": "map"}], ids=["copy", "map"])
def test_T08_expanded_tensors_are_saved_by_their_logical_values(tmp_path: Path, options: dict):
    """Stride 0: logical values are stored, sizes are logical, and the result is writable element by element."""
    state = {
        "e": torch.ones(1).expand(300, 300),
        "row": torch.arange(4.0).expand(3, 4),
        "s": torch.tensor(2.0).expand(5),
    }
    seen = []
    saved = shardstore.save(state, tmp_path / "c", listener=seen.append)
    logical = 4 * (300 * 300 + 12 + 5)
    assert data_bytes(tmp_path / "c") == logical
    assert saved.nbytes > logical
    assert next(event for event in seen if isinstance(event, Started)).nbytes == saved.nbytes
    loaded = shardstore.load(tmp_path / "c", **options)
    assert_same(loaded, state)
    loaded["row"][0, 1] = 50
    assert loaded["row"].tolist() == [[0, 50, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_T08_a_target_that_overlaps_itself_is_refused(tmp_path: Path):
    """Into an expanded target different values can't go: an error of ours, before anything is touched."""
    shardstore.save({"a": torch.ones(4), "row": torch.arange(12.0).view(3, 4)}, tmp_path / "c")
    base = torch.full((4,), 7.0)
    other = torch.full((4,), 7.0)
    with pytest.raises((Mismatch, InvalidArgument), match="row"):
        shardstore.load(tmp_path / "c", into={"a": other, "row": base.expand(3, 4)})
    assert base.tolist() == other.tolist() == [7, 7, 7, 7]
    shardstore.save({"windows": torch.arange(12.0).view(4, 3)}, tmp_path / "d")
    base = torch.full((6,), 7.0)
    with pytest.raises((Mismatch, InvalidArgument), match="windows"):
        shardstore.load(tmp_path / "d", into={"windows": base.unfold(0, 3, 1)})
    assert (base == 7).all()


# ------------------------------------------------------------------------------------------------ dtypes


QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [name for name in DTYPES if name not in QUANTIZED])
def test_T09_every_dtype_round_trips(tmp_path: Path, name: str):
    """Every dtype that torch has, in all shapes: bit-equal loaded fresh, mapped, and into targets of any strides."""
    dtype = DTYPES[name]
    state = {
        "odd": filled(dtype, 3, 5), "zero-dim": filled(dtype), "empty": filled(dtype, 0, 4),
        "large": filled(dtype, 50, 3000), "transposed": filled(dtype, 4, 6).t(), "sliced": filled(dtype, 9, 8)[::2, 1:],
    }  # fmt: skip
    shardstore.save({"deep": [state]}, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), {"deep": [state]})
    assert_same(shardstore.load(tmp_path / "c", mode="map"), {"deep": [state]})
    into = {key: zeros(dtype, *value.shape) for key, value in state.items()}
    into["odd"] = zeros(dtype, 5, 3).t()
    into["large"] = zeros(dtype, 3000, 50).t()
    shardstore.load(tmp_path / "c", into={"deep": [into]})
    assert_same(into, state)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_T09_quantized_dtypes_are_refused_by_name(tmp_path: Path, name: str):
    """What has a scale beside its bytes is refused before a byte is written, with path and dtype or remedy."""
    real = torch._empty_affine_quantized([2, 2], scale=1.0, zero_point=0, dtype=DTYPES[name])
    bare = torch.zeros(8, dtype=torch.uint8).view(DTYPES[name])
    for value, remedy in ((real, "int_repr|view or convert"), (bare, "int_repr|view or convert")):
        with pytest.raises(UnsupportedState, match=remedy) as caught:
            shardstore.save({"model": {"a": torch.ones(1)}, "deep": [{"odd": value}]}, tmp_path / "c")
        assert caught.value.path == "deep/0.odd"
        assert not (tmp_path / "c").exists()


def test_T09_our_table_of_dtypes_knows_all_of_this_torch():
    """A torch with a dtype that the table lacks fails here, not at somebody's first save."""
    from shardstore.specs import DTYPES as KNOWN

    aliases = {"half", "float", "double", "short", "int", "long", "cfloat", "cdouble", "chalf"}
    assert set(DTYPES) - QUANTIZED - aliases == set(KNOWN)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_T09_one_unsupported_tensor_refuses_the_whole_save_in_place(tmp_path: Path):
    """Among many good tensors a bad one is found before the first write, and what was there before stays."""
    good = {f"w{i}": torch.randn(100) for i in range(20)}
    shardstore.save(good, tmp_path / "c")
    before = files_of(tmp_path / "c")
    bad = {**good, "q": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)}
    with pytest.raises(UnsupportedState, match="q"):
        shardstore.save(bad, tmp_path / "c", overwrite=True)
    assert files_of(tmp_path / "c") == before


@pytest.mark.parametrize("options", [{}, {"mode": "map"}], ids=["copy", "map"])
def test_T11_empty_tensors_keep_their_shapes_and_are_no_aliases(tmp_path: Path, options: dict):
    """Zero elements or zero dimensions: shapes and dtypes come back, and equal null pointers tie nothing."""
    state = {
        "a": torch.tensor([]), "b": torch.zeros(0, 5), "c": torch.zeros(3, 0, 2, dtype=torch.int64),
        "s": torch.tensor(3.0), "t": torch.tensor(True), "u": torch.zeros(0, dtype=torch.bfloat16),
        "v": torch.randn(4, 4)[:, :0], "p": nn.Parameter(torch.empty(0, 2)),
    }  # fmt: skip
    shardstore.save(state, tmp_path / "c", shards=3)
    assert index_of(tmp_path / "c")["tensors"]["aliases"] == []
    assert_same(shardstore.load(tmp_path / "c", **options), state)
    into = {key: torch.empty_like(value, requires_grad=False) for key, value in state.items()}
    shardstore.load(tmp_path / "c", into=into)
    assert into["s"].item() == 3
    for path in shards_of(tmp_path / "c"):
        assert safetensors.torch.load_file(tmp_path / "c" / path)


def test_T11_a_checkpoint_of_empty_tensors_only(tmp_path: Path):
    """No byte of data at all is a checkpoint like any other."""
    state = {"model": {"a": torch.zeros(0), "b": torch.zeros(2, 0)}}
    shardstore.save(state, tmp_path / "c", shards=2)
    assert shardstore.verify(tmp_path / "c").ok
    assert_same(shardstore.load(tmp_path / "c"), state)


# ------------------------------------------------------------------------------------------------ writing and reading


@pytest.mark.parametrize("limit", [1, 64 * 1024])
def test_T13_short_writes_and_reads_are_continued(tmp_path: Path, limit: int):
    """No system call moves more than a little: every byte is written and read all the same, and digests agree."""
    state = {"w": torch.randn(MIB // 4 if limit > 1 else 200), "t": torch.randn(40, 30 if limit > 1 else 2).t()}
    with watched(short(limit), lambda: True):
        shardstore.save(state, tmp_path / "c")
        assert_same(shardstore.load(tmp_path / "c"), state)
    assert_same(shardstore.load(tmp_path / "c"), state)
    assert shardstore.verify(tmp_path / "c").ok


def test_T13_a_write_that_takes_nothing_is_an_error(tmp_path: Path):
    """A system that says "0 bytes written" ends in an error, not in an endless loop or a file with a hole."""

    def nothing(name, real, args, kwargs):
        return 0 if name == "write" and len(args[1]) < 5000 else real(*args, **kwargs)

    with watched(nothing, lambda: True), pytest.raises(StoreError):
        shardstore.save({"w": torch.randn(1000)}, tmp_path / "c", threads=1)
    with pytest.raises(shardstore.CheckpointNotFound):
        shardstore.load(tmp_path / "c")


# ------------------------------------------------------------------------------------------------ meta and subclasses


def test_T16_meta_tensors_are_refused_by_name(tmp_path: Path):
    """A tensor without values can't be saved: plainly, in a Module, as a Parameter, deep in a list."""
    meta = torch.empty(4, device="meta")
    for state in (
        {"w": meta},
        {"model": {"ok": torch.ones(1), "w": meta}},
        {"model": nn.Linear(2, 3, device="meta")},
        {"x": [1, (2, {"w": nn.Parameter(meta)})]},
    ):
        with pytest.raises(UnsupportedState, match=r"w.*meta") as caught:
            shardstore.save(state, tmp_path / "c")
        assert caught.value.path.endswith(("w", "weight"))
        assert not (tmp_path / "c").exists()


def test_T16_a_model_on_meta_is_filled_or_refused_never_skipped(tmp_path: Path):
    """Loading into a model that was built on meta gives it the values, or says that it can't."""
    source = nn.Linear(4, 3)
    shardstore.save({"model": source}, tmp_path / "c")
    target = nn.Linear(4, 3, device="meta")
    try:
        shardstore.load(tmp_path / "c", into={"model": target})
    except (Mismatch, InvalidArgument) as error:
        said = str(error)
    else:
        said = "weight, no longer on meta"
        assert_same(target.state_dict(), source.state_dict())
    assert "weight" in said
    assert "meta" in said


class Wrapped(torch.Tensor):
    """A wrapper subclass: a dummy without storage of its own, over int8 data and a scale."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data8, self.scale = data, scale

    def __repr__(self) -> str:
        return "Wrapped"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].data8, args[0].scale)
        raise NotImplementedError(str(func))


class OwnTensor(torch.Tensor):
    """A subclass that adds nothing."""


class OwnParameter(nn.Parameter):
    """A subclass of Parameter that adds nothing."""


def test_T17_tensor_subclasses_are_refused_by_class(tmp_path: Path):
    """A subclass may hide its bytes anywhere: it is refused with its class, path and the remedy, before writing."""
    wrapped = Wrapped(torch.ones(2, 2, dtype=torch.int8), torch.tensor(0.5))
    for value in (
        wrapped,
        nn.Parameter(wrapped, requires_grad=False),
        torch.ones(2, 2).as_subclass(OwnTensor),
        OwnParameter(torch.ones(2, 2)),
        nn.parameter.Buffer(torch.ones(2, 2).as_subclass(OwnTensor)),
    ):
        if type(value) in {torch.Tensor, nn.Parameter}:
            continue
        with pytest.raises(UnsupportedState, match=r"layer\.q.*(Wrapped|Own).*register_type") as caught:
            shardstore.save({"model": {"layer.q": value, "ok": torch.ones(1)}}, tmp_path / "c")
        assert caught.value.path == "model/layer.q"
        assert not (tmp_path / "c").exists()


def test_T17_parameters_and_buffers_are_fine(tmp_path: Path):
    """nn.Parameter (frozen or not) and nn.Buffer are plain tensors to us, and a Parameter comes back as one."""
    state = {
        "p": nn.Parameter(torch.randn(3)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "integer": nn.Parameter(torch.arange(3), requires_grad=False),
        "leaf": torch.randn(3, requires_grad=True),
        "result": torch.randn(3, requires_grad=True) * 2,
    }
    shardstore.save(state, tmp_path / "c")
    loaded = shardstore.load(tmp_path / "c")
    assert_same(loaded, state)
    assert all(tensor.is_leaf for tensor in loaded.values())
    buffer = nn.parameter.Buffer(torch.randn(3))
    shardstore.save({"b": buffer}, tmp_path / "b")
    assert torch.equal(shardstore.load(tmp_path / "b")["b"], buffer)


def test_T17_a_registered_subclass_goes_through_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With `register_type` a quantised weight is stored as what it is made of, and made again at load."""
    from shardstore.tree import registry

    monkeypatch.setattr(registry, "BY_CLASS", registry.BY_CLASS)
    by_class, by_name = dict(registry.BY_CLASS), dict(registry.BY_NAME)
    shardstore.register_type(
        Wrapped,
        "tests.wrapped",
        lambda t: {"data": t.data8, "scale": t.scale},
        lambda d: Wrapped(d["data"], d["scale"]),
    )
    try:
        data, scale = torch.arange(-4, 4, dtype=torch.int8).view(2, 4), torch.tensor(0.25)
        shardstore.save({"model": {"q": Wrapped(data, scale), "w": torch.ones(2)}}, tmp_path / "c")
        loaded = shardstore.load(tmp_path / "c")["model"]["q"]
        assert type(loaded) is Wrapped
        assert_same([loaded.data8, loaded.scale], [data, scale])
    finally:
        for table, before in ((registry.BY_CLASS, by_class), (registry.BY_NAME, by_name)):
            table.clear()
            table.update(before)
    with pytest.raises(shardstore.ShardstoreError, match=r"tests\.wrapped"):
        shardstore.load(tmp_path / "c")


# ------------------------------------------------------------------------------------------------ bytes


LITTLE = {
    "f64": (torch.tensor([1.0, -2.5], dtype=torch.float64), struct.pack("<2d", 1.0, -2.5)),
    "i64": (torch.tensor([1, -2]), struct.pack("<2q", 1, -2)),
    "c128": (torch.tensor([1.5 - 2j], dtype=torch.complex128), struct.pack("<2d", 1.5, -2.0)),
    "c64": (torch.tensor([1.5 - 2j], dtype=torch.complex64), struct.pack("<2f", 1.5, -2.0)),
    "f32": (torch.tensor([1.5, -0.0]), struct.pack("<2f", 1.5, -0.0)),
    "u32": (torch.tensor([0x01020304], dtype=torch.uint32), b"\x04\x03\x02\x01"),
    "f16": (torch.tensor([1.5, -2.0], dtype=torch.float16), struct.pack("<2e", 1.5, -2.0)),
    "bf16": (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), b"\xc0\x3f\x00\xc0"),
    "i16": (torch.tensor([0x0102, -2], dtype=torch.int16), b"\x02\x01\xfe\xff"),
    "u8": (torch.tensor([1, 254], dtype=torch.uint8), b"\x01\xfe"),
    "bool": (torch.tensor([True, False]), b"\x01\x00"),
}


def test_T19_bytes_are_little_endian(tmp_path: Path):
    """Each dtype's bytes in the shard are little-endian, written down here by hand; so is the header's length."""
    shardstore.save({key: tensor for key, (tensor, _) in LITTLE.items()}, tmp_path / "c", shards=1)
    (path,) = shards_of(tmp_path / "c")
    blob = (tmp_path / "c" / path).read_bytes()
    header, data = parts_of(blob)
    assert struct.unpack("<Q", blob[:8])[0] + 8 == len(blob) - len(data)
    assert (len(blob) - len(data)) % ALIGN == 0
    for key, (_, wanted) in LITTLE.items():
        begin, end = header[key]["data_offsets"]
        assert data[begin:end] == wanted, key


def test_T19_the_byte_order_of_the_machine_is_never_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With `sys.byteorder` patched to "big" the same bytes are written, and the same values read."""
    state = {key: tensor for key, (tensor, _) in LITTLE.items()}
    shardstore.save(state, tmp_path / "a", shards=1)
    monkeypatch.setattr(sys, "byteorder", "big")
    shardstore.save(state, tmp_path / "b", shards=1)
    one, two = (list(files_of(tmp_path / name).items()) for name in "ab")
    assert [data for path, data in one if path.endswith("tensors")] == [d for p, d in two if p.endswith("tensors")]
    assert_same(shardstore.load(tmp_path / "a"), state)
    assert_same(shardstore.load(tmp_path / "b", mode="map"), state)


def test_T19_big_endian_arrays_are_stored_little_endian_and_come_back_big(tmp_path: Path):
    """A numpy array of the other byte order keeps its values and its dtype; its bytes on disk are little-endian."""
    arrays = {f"{kind}{size}": np.arange(1, 5).astype(f">{kind}{size}") for kind in "iuf" for size in (2, 4, 8)}
    arrays["c8"] = np.array([1 + 2j], ">c8")
    arrays["M8"] = np.array(["2024-01-02T03:04:05"], ">M8[s]")
    arrays["native"] = np.arange(6, dtype="<i4").reshape(2, 3).T
    shardstore.save({"arrays": arrays}, tmp_path / "c")
    loaded = shardstore.load(tmp_path / "c")["arrays"]
    for key, array in arrays.items():
        assert loaded[key].dtype == array.dtype
        assert loaded[key].dtype.str == array.dtype.str, key
        assert np.array_equal(loaded[key], array), key
    (path,) = shards_of(tmp_path / "c")
    header, data = parts_of((tmp_path / "c" / path).read_bytes())
    begin, end = header["arrays/i2"]["data_offsets"]
    assert data[begin:end] == struct.pack("<4h", 1, 2, 3, 4)


@pytest.mark.parametrize("mode", ["copy", "map"])
def test_T20_saving_over_the_place_that_was_loaded_from(tmp_path: Path, mode: str):
    """Load, change, save to the same place: the new file is right, and so are the old tensors in memory."""
    first = {"x": torch.randn(300_000), "y": torch.arange(50_000), "z": torch.ones(5)}
    shardstore.save(first, tmp_path / "c", step=5)
    old = shardstore.load(tmp_path / "c", mode=mode)
    second = {**old, "x": old["x"] * 2}
    shardstore.save(second, tmp_path / "c", step=6, overwrite=True)
    assert_same(old, first)
    assert_same(shardstore.load(tmp_path / "c"), {**first, "x": first["x"] * 2})
    shardstore.save({"tiny": torch.zeros(1)}, tmp_path / "c", overwrite=True)
    gc.collect()
    assert_same(old, first)
    assert_same(second["y"], first["y"])


def test_T20_no_file_of_a_checkpoint_is_ever_opened_for_writing_again(tmp_path: Path):
    """An overwrite makes new files and renames; it truncates, writes to and renames onto none but the index."""
    shardstore.save({"x": torch.randn(1000), "n": 1}, tmp_path / "c")
    before = files_of(tmp_path / "c")
    with trouble() as spy:
        shardstore.save({"x": torch.randn(1000), "n": 2}, tmp_path / "c", overwrite=True, threads=1)
    named = {Path(name).name for name in before if name.endswith((".safetensors",)) or "meta" in name}
    assert not {call.split(" ", 1)[1] for call in spy.seen("open", "write", "rename", "unlink")} & named
    after = files_of(tmp_path / "c")
    assert {name: after[name] for name in before if Path(name).name in named} == {
        name: data for name, data in before.items() if Path(name).name in named
    }


_PEAK = """
import gc, json, re, sys
import torch, shardstore

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def peak(work):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    made = work()
    return status("VmHWM") - before, made

folder, threads = sys.argv[1], 2
shardstore.save({"w": torch.ones(1000), "t": torch.ones(40, 50).t()}, f"{folder}/warm", threads=threads)
shardstore.load(f"{folder}/warm", into={"w": torch.zeros(1000), "t": torch.zeros(50, 40)}, threads=threads)
state = {f"w{i}": torch.full((4 << 20,), float(i)) for i in range(8)}          # 128 MiB in 16 MiB tensors
state |= {"big": torch.full((8 << 20, ), 9.0), "t": torch.full((4096, 4096), 3.0).t()}   # 32 MiB, 64 MiB strided
state |= {f"s{i}": torch.full((256,), float(i)) for i in range(32 << 10)}      # 32 MiB in small ones
figures = {}
figures["save"], _ = peak(lambda: shardstore.save(state, f"{folder}/c", threads=threads))
figures["into"], _ = peak(lambda: shardstore.load(f"{folder}/c", into=state, threads=threads))
figures["state"] = sum(t.nbytes for t in state.values())
print(json.dumps(figures))
"""


@pytest.mark.slow
def test_T21_a_save_needs_little_memory_beside_the_state(shm_path: Path):
    """Saving 256 MiB, and loading into place, takes at most 64 MiB and 8 MiB for each thread more, as the docs say."""
    made = subprocess.run(
        [sys.executable, "-c", _PEAK, str(shm_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert made.returncode == 0, made.stderr
    figures = json.loads(made.stdout)
    limit = (64 + 2 * 8) * MIB
    assert figures["state"] == 256 * MIB
    assert figures["save"] <= limit, f"{figures['save'] / MIB:.0f} MiB"
    assert figures["into"] <= limit, f"{figures['into'] / MIB:.0f} MiB"


def test_load_on_another_device_is_the_same(tmp_path: Path):
    """`device=` moves what was verified: on the meta device shapes and dtypes are all that is left."""
    shardstore.save({"w": torch.randn(3), "n": 4}, tmp_path / "c")
    loaded = shardstore.load(tmp_path / "c", device="meta")
    assert loaded["w"].is_meta
    assert loaded["w"].shape == (3,)
    assert os.path.exists(tmp_path / "c")
