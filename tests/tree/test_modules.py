"""Modules as leaves: names without wrappers, in place and through their own methods."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from shardstore.errors import Mismatch, UnsupportedState
from shardstore.tree import flatten
from tests.tree.loader import Saved, bits, same


class Net(nn.Module):
    """A user's model with a submodule that happens to be called `module`, and a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.norm(self.module(x))


class Tied(nn.Module):
    """The smallest GPT with tied embedding and head."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.wte.weight


class Extra(nn.Module):
    """A module with state of its own that is no tensor."""

    def __init__(self, value=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


class DataParallel(nn.Module):
    """Stands for the real wrappers, which want devices or a process group: they are known by name."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def compiled(module):
    """What torch.compile makes of a module, without compiling anything."""
    return torch.compile(module, backend="eager")


NAMES = [
    "module.weight",
    "module.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        DataParallel,
        nn.DataParallel,
        compiled,
        lambda m: DataParallel(compiled(m)),
        lambda m: compiled(DataParallel(m)),
        lambda m: compiled(DataParallel(compiled(m))),
    ],
    ids=["bare", "own", "dp", "compiled", "dp(compiled)", "compiled(dp)", "three"],
)
def test_K08_wrappers_leave_no_trace_in_names_and_a_users_module_survives(wrap):
    """Wrapped in any order, a model has the same paths and versions, and loads into any other wrapping."""
    torch.manual_seed(0)
    source = Net()
    source(torch.randn(4, 3))
    saved = Saved({"model": wrap(source), "step": 1})
    assert saved.paths == [f"model/{name}" for name in NAMES]
    assert list(saved.fresh()["model"]._metadata) == ["", "module", "norm"]
    for rewrap in (lambda m: m, DataParallel, compiled):
        target = Net()
        saved.into({"model": rewrap(target)})
        assert all(
            bits(a) == bits(b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
        )


def test_K08_a_compiled_part_and_a_shared_part_are_named_canonically():
    """`net._orig_mod.w` becomes `net.w`; a module that stands under two names keeps both, tied."""
    part = nn.Linear(2, 2)
    saved = Saved({"m": nn.ModuleDict({"net": compiled(part), "again": part}), "n": 1})
    assert saved.paths == ["m/net.weight", "m/net.bias", "m/again.weight", "m/again.bias"]
    assert saved.aliases == {2: 0, 3: 1}


def test_K08_names_that_collide_without_their_wrappers_are_refused():
    """Two tensors that would get one name: refused with both names."""
    outer = DataParallel(nn.Linear(2, 2))
    outer.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedState, match=r"'weight' and 'module\.weight'"):
        flatten({"m": outer})


def test_K08_a_plain_state_dict_is_data_and_fits_the_wrapper_it_came_from():
    """Keys of a dict stay as they are; a mismatch of wrappers is listed whole, and rename= puts it right."""
    wrapped = DataParallel(Net())
    saved = Saved({"model": wrapped.state_dict(), "n": 1})
    assert saved.paths[0] == "model/module.module.weight"
    assert list(saved.fresh()["model"]) == list(wrapped.state_dict())
    other = DataParallel(Net())
    saved.into({"model": other})
    assert bits(other.module.module.weight) == bits(wrapped.module.module.weight)
    with pytest.raises(Mismatch) as caught:
        saved.bind({"model": Net()})
    assert len(caught.value.missing) == 7
    assert "model/norm.running_mean" in caught.value.missing
    assert "model/module.norm.running_mean" in caught.value.unexpected
    assert "rename=" in str(caught.value)
    bare = Net()
    saved.into({"model": bare}, rename=lambda path: path.replace("model/module.", "model/", 1))
    assert bits(bare.norm.running_mean) == bits(wrapped.module.norm.running_mean)


def test_a_bare_module_is_flat_and_comes_back_as_a_dict_with_versions():
    """A Module alone is the section model; fresh, its OrderedDict has the versions that torch's hooks want."""
    source = Net()
    saved = Saved(source)
    back = saved.fresh()
    assert type(back) is OrderedDict
    assert back._metadata["norm"] == {"version": 2}
    assert Net().load_state_dict(back)
    assert same(back, OrderedDict(source.state_dict()))
    target = Net()
    assert saved.into(target) is target
    assert bits(target.module.weight) == bits(source.module.weight)
    again = {"model": Net()}
    assert saved.into(again) is again


def test_modules_are_filled_in_place_and_keep_their_own_flags():
    """Parameters stay the same objects with their requires_grad, and buffers with None gradients."""
    saved = Saved({"m": Net(), "n": 0})
    target = Net()
    target.module.weight.requires_grad_(False)
    ids = [id(value) for value in target.state_dict(keep_vars=True).values()]
    binding = saved.bind({"m": target})
    assert binding.fresh == {}
    assert not any(fill.tensor.requires_grad for fill in binding.fills)
    saved.into({"m": target})
    assert [id(value) for value in target.state_dict(keep_vars=True).values()] == ids
    assert not target.module.weight.requires_grad
    assert target.module.bias.requires_grad


def test_T01_a_tied_model_is_stored_once_and_loads_into_tied_and_untied_ones():
    """One leaf and an alias; a tied target stays tied, an untied one gets both, shared memory for two is refused."""
    source = Tied()
    saved = Saved({"model": source, "n": 1})
    assert saved.aliases == {1: 0}
    target = Tied()
    saved.into({"model": target})
    assert target.head.weight is target.wte.weight
    assert bits(target.head.weight) == bits(source.wte.weight)
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 4))
    saved.into({"model": untied})
    assert bits(untied.head.weight) == bits(untied.wte.weight) == bits(source.wte.weight)
    untied.head.weight.data.fill_(3)
    with pytest.raises(Mismatch, match=r"model/(head|wte)\.weight.*shares memory.*model/(head|wte)\.weight"):
        Saved({"model": untied, "n": 1}).bind({"model": Tied()})


def test_overlapping_targets_are_found_wherever_they_begin():
    """Targets that overlap in part would overwrite each other: refused; disjoint views of one buffer are fine."""
    saved = Saved({"a": torch.ones(4), "b": torch.zeros(4)})
    buffer = torch.empty(8)
    saved.into({"a": buffer[:4], "b": buffer[4:]})
    assert buffer.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(Mismatch, match="shares memory"):
        saved.bind({"a": buffer[:4], "b": buffer[3:7]})
    grid = torch.empty(4, 2)
    saved.into({"a": grid[:, 0], "b": grid[:, 1]})
    assert grid.t().tolist() == [[1] * 4, [0] * 4]
    tied = Saved({"a": buffer[:4], "b": buffer[:4]})
    tied.into({"a": grid[:, 0], "b": grid[:, 0]})


def test_extra_state_is_data_and_goes_through_set_extra_state():
    """get_extra_state is stored with the tensors (None and tensors too) and put back, also below the top."""
    for value in ({"n": (1, 2), "t": torch.ones(2)}, None, torch.full((3,), 2.0), "text"):
        source = nn.ModuleDict({"a": Extra(value), "b": nn.Linear(1, 1)})
        saved = Saved({"m": source, "n": 1})
        target = nn.ModuleDict({"a": Extra(), "b": nn.Linear(1, 1)})
        saved.into({"m": target})
        assert same(target["a"].value, value)
        assert same(saved.fresh()["m"]["a._extra_state"], value)
    plain = Saved({"m": nn.Linear(1, 1), "n": 1})
    with pytest.raises(Mismatch) as caught:
        Saved({"m": Extra(), "n": 1}).bind({"m": {"weight": torch.zeros(2)}})
    assert caught.value.unexpected == ("m/_extra_state",)
    with pytest.raises(Mismatch, match=r"m/_extra_state"):
        plain.bind({"m": Extra()})


def test_T16_modules_on_the_meta_device_are_refused_with_the_remedy():
    """Copying into meta tensors would be a silent no-op: refused; after to_empty it works."""
    source = Net()
    saved = Saved(source)
    target = Net().to("meta")
    with pytest.raises(Mismatch, match="to_empty") as caught:
        saved.bind(target)
    assert len(caught.value.different) == 7
    target.to_empty(device="cpu")
    saved.into(target)
    assert bits(target.module.weight) == bits(source.module.weight)
    with pytest.raises(Mismatch, match="to_empty"):
        Saved({"a": torch.ones(2), "n": 1}).bind({"a": torch.empty(2, device="meta")})


def test_lazy_modules_are_refused_at_save_and_initialised_by_a_load():
    """A lazy module has no values to save; as a target it gets its shapes from the checkpoint, never another dtype."""
    with pytest.raises(UnsupportedState, match="forward"):
        flatten({"m": nn.LazyLinear(3)})
    source = nn.Linear(4, 3)
    saved = Saved({"m": source, "n": 1})
    target = nn.LazyLinear(3)
    saved.into({"m": target})
    assert bits(target.weight) == bits(source.weight)
    with pytest.raises(Mismatch, match="float32"):
        saved.bind({"m": nn.LazyLinear(3, dtype=torch.float64)})


def test_modules_that_do_more_at_a_load_get_their_own_load_state_dict():
    """Load hooks and load_state_dict of the user's run, with saved versions; dtypes and shapes were checked before."""
    calls = []

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_load_state_dict_post_hook(lambda module, keys: calls.append("post"))

        def _load_from_state_dict(self, state, prefix, local, *args):
            calls.append(local.get("version"))
            super()._load_from_state_dict(state, prefix, local, *args)

    source = nn.Sequential(Own())
    source[0].w.data.fill_(4)
    saved = Saved({"m": source, "n": 1})
    target = nn.Sequential(Own())
    saved.into({"m": compiled(target)})
    assert calls == [1, "post"]
    assert target[0].w.tolist() == [4, 4]
    target[0].w = nn.Parameter(torch.zeros(3))
    with pytest.raises(Mismatch, match=r"m/0\.w.*\(2,\).*\(3,\)"):
        saved.bind({"m": target})


def test_parametrized_modules_are_filled_in_place():
    """weight_norm's originals are the parameters: names and values survive."""
    torch.manual_seed(0)
    source = parametrizations.weight_norm(nn.Linear(3, 2))
    saved = Saved({"m": source, "n": 1})
    target = parametrizations.weight_norm(nn.Linear(3, 2))
    saved.into({"m": target})
    x = torch.randn(5, 3)
    assert bits(source(x)) == bits(target(x))


def test_a_module_whose_state_is_not_its_own_tensors_is_never_filled_in_vain():
    """A state_dict of temporary tensors: filling those would do nothing, so the module's own load gets the values."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.zeros(3, dtype=torch.int8)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}packed"] = self.q.to(torch.int16)

        def _load_from_state_dict(self, state, prefix, *args):
            self.q = state[f"{prefix}packed"].to(torch.int8)

    source = Packed()
    source.q += 5
    target = Packed()
    Saved({"m": source, "n": 1}).into({"m": target})
    assert target.q.tolist() == [5, 5, 5]


def test_a_state_dict_that_fails_is_a_typed_error():
    """What a user's state_dict raises is told with the path, at the save and at the load."""

    class Broken(nn.Linear):
        def state_dict(self, *args, **kwargs):
            raise RuntimeError("not now")

    with pytest.raises(UnsupportedState, match=r"m/: .*not now"):
        flatten({"m": Broken(1, 1)})
    with pytest.raises(Mismatch, match=r"m/: .*not now"):
        Saved({"m": nn.Linear(1, 1), "n": 1}).bind({"m": Broken(1, 1)})


def test_modules_and_dicts_of_tensors_load_into_each_other():
    """A Module's state fills a dict of tensors, and a saved state_dict fills a Module."""
    source = Net()
    tensors = {name: torch.zeros_like(value) for name, value in source.state_dict().items()}
    Saved({"m": source, "n": 1}).into({"m": tensors})
    assert same(tensors, dict(source.state_dict()))
    target = Net()
    Saved({"m": tensors, "n": 1}).into({"m": target})
    assert same(dict(target.state_dict()), tensors)
    with pytest.raises(Mismatch, match="a Module"):
        Saved({"m": [1], "n": 1}).bind({"m": target})
