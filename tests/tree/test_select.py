"""Partial loads into fresh memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardstore.errors import Mismatch
from shardstore.tree import matches, select
from tests.tree.loader import Saved, same


@pytest.mark.parametrize(
    ("pattern", "path", "answer"),
    [
        ("model/*.weight", "model/h.0.attn.weight", True),
        ("model/*.weight", "model/a/b.weight", False),
        ("**.weight", "model/a/b.weight", True),
        ("model/h.?.w", "model/h.1.w", True),
        ("model/h.?.w", "model/h.12.w", False),
        ("model?w", "model/w", False),
        ("model", "model/anything", True),
        ("mod", "model/anything", False),
        ("model/w[0]", "model/w[0]", True),
        ("model/w[0]", "model/w0", False),
        ("model/w", "model/wte", False),
        ("rng/", "rng/", True),
        ("*", "rng/", False),
        ("**", "rng/a\nb", True),
        ("a.b/c", "aXb/c", False),
    ],
)
def test_patterns(pattern, path, answer):
    """`*` stops at slashes only, `**` nowhere, `?` is one character, nothing else is special."""
    assert matches(pattern, path) is answer


STATE = {
    "model": {"wte.weight": torch.ones(2), "h.0.weight": torch.ones(1), "h.0.bias": torch.zeros(1)},
    "cfg": {"depth": 3, "name": "x", "deep": {"a": 1, "b": [1, 2]}, 5: "five"},
    "rng": torch.arange(3),
    "step": 7,
    "list": [torch.ones(1), {"k": torch.ones(2)}, "x"],
    "none": None,
    "empty": {},
}


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        ("step", {"step": 7}),
        ("model/*.weight", {"model": {"wte.weight": torch.ones(2), "h.0.weight": torch.ones(1)}}),
        (["rng", "cfg/deep.*"], {"cfg": {"deep": {"a": 1, "b": [1, 2]}}, "rng": torch.arange(3)}),
        ("cfg/deep.b.1", {"cfg": {"deep": {"b": [1, 2]}}}),
        ("cfg/5", {"cfg": {5: "five"}}),
        ("list/1.k", {"list": STATE["list"]}),
        ("**", STATE),
        (["none", "empty"], {"none": None, "empty": {}}),
        ([], {}),
    ],
)
def test_only_keeps_entries_of_dicts_and_whole_lists(only, kept):
    """What is selected comes with its place in the structure; only its tensors are asked for."""
    saved = Saved(STATE)
    chosen = select(saved.meta, saved.paths, only)
    assert same(saved.fresh(only), kept)

    def count(value):
        if isinstance(value, torch.Tensor):
            return 1
        return sum(map(count, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))

    assert len(chosen.numbers) == count(kept)


def test_a_pattern_that_matches_nothing_is_an_error_with_near_names():
    """A typo never gives an empty load; each idle pattern is named, beside others that match."""
    saved = Saved(STATE)
    with pytest.raises(Mismatch, match=r"model/wte\.wieght.*did you mean 'model/wte\.weight'") as caught:
        saved.fresh(["step", "model/wte.wieght", "nothing*"])
    assert caught.value.missing == ("model/wte.wieght", "nothing*")
    with pytest.raises(Mismatch, match="section/name"):
        saved.fresh("*.weight")


def test_partial_loads_of_flat_states_modules_and_objects():
    """A flat dict comes back flat and smaller, an object that loads its own state whole, an optimizer by entries."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert list(Saved(net.state_dict()).fresh("model/bias")) == ["bias"]
    assert list(Saved(net).fresh("model/w*")) == ["weight"]
    saved = Saved({"m": net, "o": optimizer, "s": scheduler})
    part = saved.fresh(["m/bias", "s/step_size", "o/param_groups**"])
    assert list(part["m"]) == ["bias"]
    assert part["m"]._metadata == {"": {"version": 1}}
    assert part["s"]["gamma"] == 0.1
    assert list(part["o"]) == ["param_groups"]
    one = Saved({"$a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}).fresh(["model/$a", "model/b"])
    assert list(one) == ["$a", "b"]


def test_ties_survive_a_partial_load():
    """A selected alias whose first leaf isn't selected is loaded; two selected ones are one tensor."""
    w = torch.ones(2)
    saved = Saved({"a": w, "b": w, "c": w})
    assert same(saved.fresh("model/b"), {"b": w})
    pair = saved.fresh(["model/b", "model/c"])
    assert pair["b"] is pair["c"]
