"""Loading into plain data: in place, all differences at once, nothing touched before."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from shardstore.errors import InvalidArgument, Mismatch
from tests.tree.loader import Saved, bits, same


def test_K02_a_template_never_shortens_what_was_saved():
    """Slots (subtrees without tensors) take whatever was saved, of any length and type; containers stay."""
    state = {"k": [{"a": 1}, {"b": 2}], "d": {"x": 1, "y": [2]}, "n": 5, "t": torch.ones(2), "s": {1}}
    saved = Saved(state)
    lists, dicts = [], {"old": 1}
    into = {"k": lists, "d": dicts, "n": None, "t": None, "s": "anything"}
    back = saved.into(into)
    assert back is into
    assert same(back, state)
    assert back["k"] is lists
    assert back["d"] is dicts
    assert same(saved.fresh(), state)
    assert saved.into({"k": None})["k"] == state["k"]


def test_sections_that_into_does_not_name_are_not_compared():
    """Strict covers the named sections only; the rest of the checkpoint is no one's business here."""
    saved = Saved({"model": {"w": torch.ones(2), "b": torch.ones(1)}, "step": 3, "rng": torch.ones(4)})
    into = {"step": 0}
    assert saved.into(into) == {"step": 3}
    into = {"model": {"w": torch.zeros(2), "b": torch.zeros(1)}}
    saved.into(into)
    assert same(into["model"], {"w": torch.ones(2), "b": torch.ones(1)})
    rng = torch.zeros(4)
    saved.into({"rng": rng})
    assert rng.sum() == 4


def test_K09_missing_and_unexpected_come_together_and_partial_is_reported():
    """One Mismatch with both lists and near names; permitted by pattern or strict=False, the report has the rest."""
    saved = Saved({"model": {"a": torch.ones(2), "z": torch.ones(3), "weigth": torch.ones(1)}, "n": 1})
    target = {"a": torch.zeros(2), "b": torch.full((2,), 7.0), "weight": torch.zeros(1)}
    with pytest.raises(Mismatch) as caught:
        saved.into({"model": target})
    error = caught.value
    assert error.missing == ("model/b", "model/weight")
    assert error.unexpected == ("model/z", "model/weigth")
    assert "'model/weigth' is 'model/weight'" in str(error)
    assert isinstance(error, (ValueError, KeyError))
    assert pickle.loads(pickle.dumps(error)).missing == error.missing
    assert target["a"].sum() == 0
    with pytest.raises(Mismatch) as caught:
        saved.bind({"model": target}, allow_missing="model/b", allow_unexpected=["model/z"])
    assert (caught.value.missing, caught.value.unexpected) == (("model/weight",), ("model/weigth",))
    for options in ({"strict": False}, {"allow_missing": ["model/b", "model/w*"], "allow_unexpected": "model"}):
        report = saved.bind({"model": target}, **options).report
        assert report == (("model/b", "model/weight"), ("model/z", "model/weigth"))
    saved.into({"model": target}, strict=False)
    assert target["a"].sum() == 2
    assert target["b"].tolist() == [7, 7]


def test_K14_other_shapes_and_dtypes_are_never_filled_nor_broadcast():
    """Both specs in one error for all of them, and no target touched; also hidden in a large dict, and for scalars."""
    saved = Saved({"m": {"w": torch.ones(8), "x": torch.ones(2), "s": torch.tensor(1.0), "k": 3}, "n": 1})
    targets = [
        torch.zeros(4),
        torch.zeros(16),
        torch.zeros(2, 4),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(1, 8),
    ]
    for target in targets:
        into = {"m": {"w": target, "x": torch.zeros(2), "s": torch.zeros(1), "k": torch.zeros(())}}
        with pytest.raises(Mismatch) as caught:
            saved.into(into)
        assert len(caught.value.different) == 3
        assert "float32 (8,)" in str(caught.value)
        assert f"{str(target.dtype)[6:]} {tuple(target.shape)}" in str(caught.value)
        assert "the checkpoint has a int" in str(caught.value)
        assert into["m"]["x"].sum() == 0
    many = Saved({f"w{number}": torch.ones(2) for number in range(100)})
    into = {f"w{number}": torch.zeros(2 + (number == 50)) for number in range(100)}
    with pytest.raises(Mismatch, match=r"model/w50: .*\(2,\).*\(3,\)"):
        many.bind(into)


def test_structures_that_differ_are_named():
    """A dict where a list was saved, a list of another length, an object's state in a tensor's place."""
    saved = Saved({"a": [torch.ones(1), 2], "b": {"x": torch.ones(1)}, "c": 5, "m": nn.Linear(1, 1)})
    one = torch.zeros(1)
    with pytest.raises(Mismatch) as caught:
        saved.bind({"a": {"x": one}, "b": [one], "c": {"x": one}, "m": one})
    assert [text.partition(":")[0] for text in caught.value.different] == ["a/", "b/", "c/", "m/"]
    with pytest.raises(Mismatch, match="3 items, the checkpoint 2"):
        saved.bind({"a": [one, 0, 0]})


def test_lists_and_tuples_are_filled_by_position():
    """Tensors in place, plain values replaced; a tuple is made anew only where it must be."""
    saved = Saved(
        {"l": [torch.ones(2), "x", {"k": 1}], "t": (torch.ones(1), 5), "tt": (torch.ones(1), (torch.ones(1),))}
    )
    tensors = [torch.zeros(2), torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    inner = {"k": 0, "gone": 1}
    row, pair = [tensors[0], "y", inner], (tensors[2], (tensors[3],))
    into = saved.into({"l": row, "t": (tensors[1], 0), "tt": pair})
    assert into["l"] is row
    assert row[1:] == ["x", {"k": 1}]
    assert row[2] is inner
    assert into["t"][1] == 5
    assert into["t"][0] is tensors[1]
    assert into["tt"] is pair
    assert all(tensor.sum() == tensor.numel() for tensor in tensors)


def test_any_strides_are_filled_but_expanded_memory_is_refused():
    """Transposed and strided targets are planned as they are; stride 0 would write several values to one place."""
    value = torch.arange(6.0).view(2, 3)
    saved = Saved({"a": value, "b": value, "n": 1})
    base, strided = torch.zeros(3, 2), torch.zeros(2, 6)
    saved.into({"a": base.t(), "b": strided[:, ::2]})
    assert torch.equal(base.t(), value)
    assert torch.equal(strided[:, ::2], value)
    assert strided[:, 1::2].sum() == 0
    with pytest.raises(Mismatch, match="expanded"):
        saved.bind({"a": torch.zeros(1).expand(2, 3)})
    freed = torch.zeros(2, 3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(Mismatch, match="freed"):
        saved.bind({"a": freed})


def test_targets_that_require_gradients_keep_their_flags_and_identity():
    """A Parameter in a dict is filled without autograd noticing."""
    saved = Saved({"p": nn.Parameter(torch.ones(2)), "q": torch.ones(2)})
    target = {"p": torch.zeros(2), "q": nn.Parameter(torch.zeros(2))}
    kept = target["q"]
    saved.into(target)
    assert target["q"] is kept
    assert kept.requires_grad
    assert kept.grad_fn is None
    assert not target["p"].requires_grad
    assert kept.detach().tolist() == [1, 1]


def test_flat_checkpoints_and_targets_meet_in_the_section_model():
    """A flat dict, {"model": dict} and a Module are all the section model; a flat target of sections is told apart."""
    net = nn.Linear(2, 2)
    flat, nested = Saved(net.state_dict()), Saved({"model": net.state_dict(), "step": 1})
    for saved in (flat, nested):
        for make in (lambda t: t, lambda t: {"model": t}):
            target = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
            saved.into(make(target))
            assert same(target, dict(net.state_dict()))
            other = nn.Linear(2, 2)
            saved.into(make(other))
            assert bits(other.weight) == bits(net.weight)
    sections = Saved({"rng": torch.ones(2), "w": torch.ones(1), "n": 1})
    into = {"rng": torch.zeros(2)}
    sections.into(into)
    assert into["rng"].sum() == 2
    with pytest.raises(Mismatch) as caught:
        sections.bind({"other": torch.zeros(2)})
    assert caught.value.missing == ("model/other",)


@pytest.mark.parametrize("into", [[], 5, None, "x", {}, (1,)])
def test_into_must_name_something(into):
    """A target that is no dict and no Module, or an empty dict, would load nothing in silence."""
    with pytest.raises(InvalidArgument, match="into"):
        Saved({"a": 1}).bind(into)


def test_a_target_that_contains_itself_is_refused():
    """A cycle in into ends in words, not in a RecursionError."""
    cycle = {"a": 1}
    cycle["b"] = [cycle]
    with pytest.raises(InvalidArgument, match="contains itself"):
        Saved({"x": 1}).bind({"x": cycle})


def test_missing_objects_and_slots_are_missing():
    """What the checkpoint lacks is listed: tensors one by one, objects and slots by their own path."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = Saved({"step": 1})
    with pytest.raises(Mismatch) as caught:
        saved.bind(
            {
                "model": net,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "step": 0,
                "cfg": {"a": 1},
                "l": [torch.ones(1)],
            }
        )
    assert caught.value.missing == ("model/weight", "model/bias", "optimizer/", "scheduler/", "cfg/", "l/0")
    into = {"model": net, "optimizer": optimizer, "step": 0, "cfg": {"a": 1}}
    saved.into(into, allow_missing=["model", "optimizer", "cfg"])
    assert into["cfg"] == {"a": 1}
    assert into["step"] == 1


def test_arrays_and_tensors_in_slots_come_fresh_on_the_wanted_device():
    """A slot's tensors go to `device`, its numpy arrays to the CPU."""
    saved = Saved({"x": {"a": np.arange(3), "t": torch.ones(2), "u": torch.ones(2)}, "n": 1})
    binding = saved.bind({"x": None}, device="meta")
    devices = {saved.paths[number]: device.type for number, device in binding.fresh.items()}
    assert devices == {"x/a": "cpu", "x/t": "meta", "x/u": "meta"}
    into = saved.into({"x": {"a": np.zeros(7)}})
    assert same(into["x"]["a"], np.arange(3))


def test_only_restricts_both_sides():
    """What isn't selected is neither loaded nor missed nor unexpected; a pattern without a match is an error."""
    saved = Saved({"model": {"wte.weight": torch.ones(2), "ln.bias": torch.ones(1), "extra": torch.ones(1)},
                   "cfg": {"a": 1, "b": {"c": 2, "d": 3}}, "step": 3, "l": [torch.ones(1), 7]})  # fmt: skip
    model = {
        "wte.weight": torch.zeros(2),
        "ln.bias": torch.zeros(1),
        "new.weight": torch.zeros(1),
        "new": torch.zeros(1),
    }
    into = {"model": model, "cfg": {"a": 0, "b": {"c": 0, "d": 0}, "mine": 1}, "step": 0, "l": [torch.zeros(1), 0]}
    with pytest.raises(Mismatch) as caught:
        saved.bind(into, only=["model/*.weight"])
    assert (caught.value.missing, caught.value.unexpected) == (("model/new.weight",), ())
    saved.into(into, only=["model/w*", "cfg/b.c", "step", "l/1"])
    assert model["wte.weight"].sum() == 2
    assert model["ln.bias"].sum() == 0
    assert into["cfg"] == {"a": 0, "b": {"c": 2, "d": 0}, "mine": 1}
    assert into["step"] == 3
    assert into["l"][0].item() == 1
    assert into["l"][1] == 7
    with pytest.raises(Mismatch, match=r"model/wte\.wieght.*did you mean 'model/wte\.weight'") as caught:
        saved.bind(into, only=["model/wte.wieght", "step"])
    assert caught.value.missing == ("model/wte.wieght",)


def test_only_takes_an_optimizer_whole():
    """Half an optimizer would be no optimizer: a pattern inside selects all of it."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = Saved({"model": net, "optimizer": optimizer})
    other = nn.Linear(2, 2)
    target = torch.optim.SGD(other.parameters(), lr=0.5)
    before = bits(other.weight)
    saved.into({"model": other, "optimizer": target}, only="optimizer/state.weight.*")
    assert target.param_groups[0]["lr"] == 0.1
    assert len(target.state) == 2
    assert bits(other.weight) == before


def test_rename_by_mapping_and_by_function():
    """Paths, whole sections, and functions; parameter names of the optimizer follow their parameters."""
    net = nn.ModuleDict({"old": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net["old"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = Saved({"net": net, "optimizer": optimizer, "cfg": {"a": 1, "b": [2]}, "step": 4})
    renames = [
        {"net/old.weight": "model/new.weight", "net/old.bias": "model/new.bias"},
        lambda path: path.replace("net/", "model/").replace("old.", "new."),
    ]
    for rename in renames:
        model = nn.ModuleDict({"new": nn.Linear(2, 2)})
        target = torch.optim.SGD(reversed(list(model.parameters())), lr=0.5)
        into = {"model": model, "optimizer": target, "cfg": {}, "step": 0}
        saved.into(into, rename=rename)
        assert bits(model["new"].weight) == bits(net["old"].weight)
        got, put = target.state[model["new"].bias], optimizer.state[net["old"].bias]
        assert bits(got["momentum_buffer"]) == bits(put["momentum_buffer"])
        assert into["cfg"] == {"a": 1, "b": [2]}
    into = saved.into(
        {"model": nn.ModuleDict({"old": nn.Linear(2, 2)}), "conf": None, "now": 0},
        rename={"net": "model", "cfg": "conf", "step/": "now/"},
    )
    assert into["conf"] == {"a": 1, "b": [2]}
    assert into["now"] == 4
    into = saved.into({"cfg": {"x": 0, "b": None}}, rename={"cfg/a": "cfg/x"})
    assert into["cfg"] == {"x": 1, "b": [2]}
    with pytest.raises(Mismatch, match=r"net/old\.wieght.*did you mean") as caught:
        saved.bind({"step": 0}, rename={"net/old.wieght": "net/x"})
    assert caught.value.missing == ("net/old.wieght",)
    with pytest.raises(InvalidArgument, match="same path"):
        saved.bind({"net": net}, rename={"net/old.weight": "net/x", "net/old.bias": "net/x"})
    with pytest.raises(InvalidArgument, match="section/name"):
        saved.bind({"step": 0}, rename=lambda path: "x")
    with pytest.raises(Mismatch) as caught:
        saved.bind({"net": net}, rename={"net/old.weight": "net/x"})
    assert (caught.value.missing, caught.value.unexpected) == (("net/old.weight",), ("net/x",))


def test_rename_lets_averaged_weights_take_the_models_place():
    """What is renamed on purpose replaces what stood there; tensors in lists and only= see the new names."""
    saved = Saved({"model": {"w": torch.zeros(2)}, "ema": {"w": torch.ones(2)}, "l": [torch.ones(1), torch.ones(1)]})
    target = {"w": torch.full((2,), 5.0)}
    saved.into({"model": target}, rename={"ema": "model"})
    assert target["w"].sum() == 2
    saved.into(
        {"model": target},
        rename={"ema": "x", "model/w": "model/v", "l": "y"},
        allow_missing="**",
        allow_unexpected="**",
    )
    fresh = {"v": torch.zeros(2)}
    saved.into({"best": fresh}, rename={"ema/w": "best/v"}, only="best/v")
    assert fresh["v"].sum() == 2


def test_aliases_are_resolved_in_the_plan():
    """A tied tensor is planned by its first number, for every target of it, and loaded once where it is fresh."""
    w = torch.ones(3)
    saved = Saved({"a": {"x": w, "y": w, "z": w}, "slot": {"u": w}, "n": 0})
    one, two, three = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    into = {"a": OrderedDict(x=one, y=two, z=three), "slot": {}}
    binding = saved.bind(into)
    assert [fill.number for fill in binding.fills] == [0, 0, 0]
    assert set(binding.fresh) == {0}
    saved.into(into)
    assert one.sum() == two.sum() == three.sum() == into["slot"]["u"].sum() == 3
    assert into["slot"]["u"] is not one


def test_a_bind_touches_nothing():
    """Planning alone leaves tensors, plain values, modules and optimizers as they are."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = Saved({"m": net, "o": optimizer, "d": {"a": 1}, "t": [torch.ones(1)]})
    other = nn.Linear(2, 2)
    target = torch.optim.SGD(other.parameters(), lr=0.7)
    into = {"m": other, "o": target, "d": {"a": 5}, "t": [torch.zeros(1)]}
    before = copy.deepcopy({"m": other.state_dict(), "o": target.state_dict(), "d": into["d"], "t": into["t"]})
    saved.bind(into)
    assert same({"m": other.state_dict(), "o": target.state_dict(), "d": into["d"], "t": into["t"]}, before)


def test_long_lists_are_short_in_the_message_and_whole_in_the_attributes():
    """10,000 missing names make a message of a few lines."""
    saved = Saved({f"a{number}": torch.ones(1) for number in range(10_000)})
    with pytest.raises(Mismatch) as caught:
        saved.bind({f"b{number}": torch.ones(1) for number in range(10_000)})
    assert len(caught.value.missing) == len(caught.value.unexpected) == 10_000
    assert len(str(caught.value)) < 2000
