"""Tensors as leaves: which are stored, which are refused, and which are tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardstore.errors import UnsupportedState
from shardstore.specs import DTYPES
from shardstore.tree import flatten, register_type
from tests.tree.loader import Saved, bits, roundtrip, same


class Wrapper(torch.Tensor):
    """A quantised weight: int8 data and a scale, behind a float32 face without a storage."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].data8, args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(func)


class Special(nn.Parameter):
    pass


class Plain(torch.Tensor):
    pass


def every_dtype():
    """Two elements of each dtype of the table that this torch has."""
    made = {}
    for name in DTYPES:
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            made[name] = torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_T09_every_dtype_that_can_be_stored_is_taken_by_its_name():
    """Each dtype of the table round-trips bit for bit; what isn't in the table is refused by name."""
    state = every_dtype()
    saved = Saved(state)
    assert [spec.dtype for spec in saved.specs] == list(state)
    assert same(saved.fresh(), state)


def test_T01_tied_tensors_are_one_leaf_with_an_alias():
    """The same bytes under two names are aliased, load as one, and stay tied; the flat dict comes back flat."""
    w = torch.randn(8, 4)
    saved = Saved({"emb.weight": w, "head.weight": w, "twin": w.view(8, 4), "other": w.clone()})
    assert saved.aliases == {1: 0, 2: 0}
    assert saved.meta.flat
    assert saved.paths[0] == "model/emb.weight"
    back = saved.fresh()
    back["emb.weight"][0, 0] = 7
    assert back["head.weight"][0, 0] == back["twin"][0, 0] == 7
    assert back["other"][0, 0] != 7


def test_T04_views_that_overlap_or_differ_are_no_aliases():
    """Disjoint parts, overlapping parts, another shape, stride, dtype, conj or neg view of one memory: each its own."""
    f = torch.arange(16.0)
    c = torch.randn(4, dtype=torch.complex64)
    views = [
        f[:8], f[8:], f[4:12], f.view(4, 4), f.view(4, 4).t(), f.view(torch.int32), f[::2], c, c.conj(), c.real,
        c.conj().imag, c.imag,
    ]  # fmt: skip
    saved = Saved({"v": views, "step": 1})
    assert saved.aliases == {}
    back = saved.fresh()["v"]
    assert all(torch.equal(a, b) for a, b in zip(back, views, strict=True))
    back[0].fill_(5)
    assert torch.equal(back[3], f.view(4, 4))
    again = Saved({"v": [*views, *views], "n": 0})
    assert again.aliases == {number + len(views): number for number in range(len(views))}


def test_T07_T08_odd_strides_are_taken_as_they_are():
    """channels_last, transposed and stride-0 tensors become leaves with logical shapes; the caller's stay untouched."""
    state = {
        "k": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "t": torch.randn(4, 6).t(),
        "e": torch.ones(1).expand(300, 300),
        "row": torch.arange(4.0).expand(3, 4),
    }
    before = {name: value.stride() for name, value in state.items()}
    saved = Saved(state)
    assert saved.specs[2].shape == (300, 300)
    assert {name: value.stride() for name, value in state.items()} == before
    back = saved.fresh()
    assert same(back, state)
    back["e"][0, 0] = 3
    assert back["e"].sum() == 300 * 300 + 2


def test_T11_empty_tensors_are_never_tied():
    """Empty tensors share an address (none) but nothing else; 0-dim tensors keep their shape."""
    empty = torch.empty(0)
    state = {"a": empty, "b": torch.zeros(0, 5), "c": torch.zeros(3, 0, 2, dtype=torch.int64), "s": torch.tensor(3.0),
             "t": torch.tensor(True), "again": empty, "slice": torch.ones(3)[:0]}  # fmt: skip
    saved = Saved(state)
    assert saved.aliases == {}
    assert same(saved.fresh(), state)


def test_T16_meta_tensors_are_refused_by_name():
    """A tensor without values is refused, in a dict and in a Module, before anything is written."""
    with pytest.raises(UnsupportedState, match=r"model/w.*to_empty") as caught:
        flatten({"w": torch.empty(4, device="meta"), "v": torch.ones(1)})
    assert caught.value.path == "model/w"
    with pytest.raises(UnsupportedState, match="m/weight"):
        flatten({"m": nn.Linear(2, 2, device="meta")})


@pytest.mark.filterwarnings("ignore::UserWarning")
def odd_tensors():
    """Tensors that can't be stored, each with a word of its remedy."""
    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return {
        "wrapper": (Wrapper(torch.ones(2, dtype=torch.int8), 2.0), "register_type"),
        "plain subclass": (torch.ones(2).as_subclass(Plain), "register_type"),
        "parameter subclass": (Special(torch.ones(2)), "register_type"),
        "fake": (fake, "FakeTensor"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
        "jagged": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
        "quantized": (torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=torch.quint8), "int_repr"),
        "lazy": (nn.parameter.UninitializedParameter(), "forward"),
        "lazy buffer": (nn.parameter.UninitializedBuffer(), "forward"),
        "freed": (freed, "freed"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_T17_tensors_of_other_kinds_are_refused_with_class_and_remedy():
    """Subclasses, nested, quantized, uninitialised, fake and freed tensors never reach a writer of raw memory."""
    for name, (tensor, remedy) in odd_tensors().items():
        for state in ({"a": torch.ones(1), "x": tensor}, {"deep": [{"x": tensor}], "n": 1}):
            with pytest.raises(UnsupportedState, match=remedy) as caught:
                flatten(state)
            assert caught.value.path in ("model/x", "deep/0.x"), name


def test_T17_parameters_and_buffers_are_fine_and_a_module_may_have_subclassed_ones():
    """nn.Parameter keeps its class and requires_grad; a Module's Parameter subclass is stored by value."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    state = {
        "p": nn.Parameter(torch.ones(2)),
        "f": frozen,
        "b": nn.Buffer(torch.ones(1)),
        "g": torch.ones(2, requires_grad=True),
    }
    back = roundtrip(state)
    assert same(back, state)
    module = nn.Linear(2, 2)
    module.weight = Special(torch.full((2, 2), 3.0))
    saved = Saved(module)
    fresh = nn.Linear(2, 2)
    fresh.weight = Special(torch.zeros(2, 2))
    saved.into(fresh)
    assert type(fresh.weight) is Special
    assert torch.equal(fresh.weight, module.weight)


def test_T17_a_registered_subclass_is_stored_by_parts(own_registry):
    """register_type works for a wrapper subclass; its parts are tensors of the checkpoint."""
    register_type(
        Wrapper, "w8", lambda w: {"data": w.data8, "scale": w.scale}, lambda d: Wrapper(d["data"], d["scale"])
    )
    saved = Saved({"q": Wrapper(torch.arange(3, dtype=torch.int8), 2.0), "n": 1})
    assert saved.paths == ["q/data"]
    back = saved.fresh()["q"]
    assert type(back) is Wrapper
    assert back.scale == 2.0
    assert torch.equal(back.data8, torch.arange(3, dtype=torch.int8))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_stored_by_their_parts():
    """COO (coalesced or not, hybrid, empty) and the compressed layouts come back with layout, shape and values."""
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    twice = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2))
    state = {
        "coo": dense.to_sparse(), "twice": twice, "hybrid": torch.ones(2, 3).to_sparse(1),
        "none": torch.zeros(2, 2).to_sparse(),
        "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc(), "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "bsc": torch.eye(4).to_sparse_bsc((2, 2)), "param": nn.Parameter(dense.to_sparse()), "n": 1,
    }  # fmt: skip
    saved = Saved(state)
    assert "coo/indices" in saved.paths
    back = saved.fresh()
    for name, value in state.items():
        if name != "n":
            assert back[name].layout == value.layout
            assert back[name].requires_grad == value.requires_grad
            assert bits(back[name].detach().to_dense()) == bits(value.detach().to_dense())
    assert not back["twice"].is_coalesced()
    assert back["coo"].is_coalesced()
    into = {"coo": torch.zeros(2, 2).to_sparse()}
    saved.into(into)
    assert bits(into["coo"].to_dense()) == bits(dense)


def test_names_that_are_no_unicode_are_refused():
    """A lone surrogate in a tensor's name can't be written into a header: refused, shown escaped."""
    for state in (
        {"a\ud800": torch.ones(1)},
        {"a\ud800": torch.ones(1), "b": torch.ones(1)},
        {"s": {"\ud800": torch.ones(1)}, "n": 1},
    ):
        with pytest.raises(UnsupportedState, match=r"ud800.*Unicode"):
            flatten(state)


def test_a_flat_state_is_the_section_model():
    """Only tensors under str keys, or a bare Module or its state_dict: flat; one plain value, or other keys: not."""
    assert flatten({"w": torch.ones(1)}).flat
    assert flatten(nn.Linear(2, 2)).leaves[0].path == "model/weight"
    assert flatten(nn.Linear(2, 2).state_dict()).flat
    for state in ({"w": torch.ones(1), "n": 1}, {0: torch.ones(1)}, {}, {"m": {"w": torch.ones(1)}}):
        assert not flatten(state).flat
    assert flatten({"rng": torch.ones(1), "n": 1}).leaves[0].path == "rng/"


def test_a_dict_of_many_tensors_costs_one_node():
    """100,000 tensors take a few bytes of skeleton, tied and empty ones included."""
    w = torch.ones(4)
    state = {f"layer.{number}": w if number % 3 else torch.empty(0) for number in range(1000)}
    saved = Saved(state)
    assert len(saved.data) < 250
    assert same(saved.fresh(), state)
