"""Another structure of the state than at the save: migrations bring it into live objects, or the resume is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardstore.errors import InvalidArgument, Mismatch
from shardstore.events import Noticed
from shardstore.training import Checkpointer
from tests.kit.same import assert_same
from tests.training.kit import small, train, trained


class Wrapped(nn.Module):
    """What `small` trains, one level deeper, and with one parameter more."""

    def __init__(self, *, scaled=False):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        if scaled:
            self.scale = nn.Parameter(torch.full((1,), 5.0))

    def forward(self, x):
        return self.inner(x)


def deeper(scaled=False):
    """The state of a training of `Wrapped`, with a scheduler whose function nobody can store."""
    model = Wrapped(scaled=scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return {"net": model, "optimizer": optimizer, "scheduler": scheduler, "count": {"seen": 0}}


def to_two(state):
    """From `small` to `deeper`: the model has another name and other names in it."""
    state["net"] = {f"inner.{name}": tensor for name, tensor in state.pop("model").items()}
    optimizer = state["optimizer"]
    optimizer["state"] = {f"inner.{name}": moments for name, moments in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [f"inner.{name}" for name in group["params"]]
        group["initial_lr"] = 0.1
    scheduler = {"base_lrs": [0.1], "last_epoch": 4, "_step_count": 5, "_last_lr": [0.02], "lr_lambdas": [None]}
    return {**state, "scheduler": scheduler, "count": {"seen": 3}}


def to_three(state):
    """One parameter more."""
    state["net"]["scale"] = torch.tensor([2.5])
    state["optimizer"]["param_groups"][0]["params"].append("scale")
    return state


def check_two(state, old):
    """That a new state has what the old one had."""
    inner = state["net"].inner
    assert_same(dict(inner.state_dict()), dict(old["model"].state_dict()))
    for name in ("weight", "bias"):
        moments = [
            one["optimizer"].state[p] for one, p in [(state, getattr(inner, name)), (old, getattr(old["model"], name))]
        ]
        assert_same(*[dict(each) for each in moments])
    assert state["count"] == {"seen": 3}
    assert (state["scheduler"].last_epoch, state["scheduler"].get_last_lr()) == (4, [0.02])
    assert state["scheduler"].lr_lambdas[0](1) == 0.5


def test_a_migration_fills_the_live_objects(tmp_path):
    """Weights, moments by name, a scheduler and plain values: the result of the function goes where it belongs."""
    old = trained(tmp_path / "run", 3, schema="mine.v1")
    told, state = [], deeper()
    with Checkpointer(
        tmp_path / "run", state, schema="mine.v2", migrations={"mine.v1": to_two}, listener=told.append
    ) as ckpt:
        assert ckpt.resume() == 3
        check_two(state, old)
        assert state["optimizer"].param_groups[0]["lr"] == 0.1
        ckpt.step(loss=1.0)
    assert any("from the schema 'mine.v1' to 'mine.v2'" in event.what for event in told if isinstance(event, Noticed))
    again = deeper()
    with Checkpointer(tmp_path / "run", again, schema="mine.v2") as ckpt:
        assert ckpt.resume() == 4
        check_two(again, old)


def test_migrations_are_chained_by_their_schemas(tmp_path):
    """From the first over the second to the third, from the second to the third, and from what has no name."""
    for number, schema in enumerate(["mine.v1", None]):
        folder = tmp_path / f"run-{number}"
        old = trained(folder, 2, schema=schema)
        state = deeper(scaled=True)
        steps = {schema: to_two, "mine.v2": to_three}
        with Checkpointer(folder, state, schema="mine.v3", migrations=steps) as ckpt:
            assert ckpt.resume() == 2
        check_two(state, old)
        assert state["net"].scale.item() == 2.5
        assert state["net"].scale not in state["optimizer"].state
    trained(tmp_path / "two", 2, state={**small(), "more": 1}, schema="mine.v2")
    state = {**small(5), "more": 0}
    calls = {"mine.v1": pytest.fail, "mine.v2": lambda state: {**state, "more": state["more"] + 1}}
    with Checkpointer(tmp_path / "two", state, schema="mine.v3", migrations=calls) as ckpt:
        ckpt.resume()
    assert state["more"] == 2


def test_training_goes_on_bit_for_bit_after_a_migration(tmp_path):
    """A migration that changes no number changes nothing of what follows."""
    expected = trained(tmp_path / "whole", 6)
    trained(tmp_path / "run", 3, schema="mine.v1")
    state = small(9)
    with Checkpointer(tmp_path / "run", state, schema="mine.v2", migrations={"mine.v1": lambda state: state}) as ckpt:
        for _ in range(ckpt.resume(), 6):
            ckpt.step(loss=train(state))
    assert_same(dict(state["model"].state_dict()), dict(expected["model"].state_dict()))


def test_no_chain_is_an_error_that_says_what_is_missing(tmp_path):
    """No migrations, others, or a newer schema than is known here: nothing is touched, and nothing marked."""
    trained(tmp_path / "run", 2, schema="mine.v1")
    for how, words in [
        ({"schema": "mine.v2"}, r"no migrations.*give migrations={'mine.v1': function}"),
        ({"schema": "mine.v3", "migrations": {"mine.v2": to_three}}, "begins at 'mine.v2'"),
        ({}, "'mine.v1', this training None"),
    ]:
        with Checkpointer(tmp_path / "run", small(), **how) as ckpt, pytest.raises(Mismatch, match=words):
            ckpt.resume()
    with Checkpointer(tmp_path / "run", small(), schema="mine.v1") as ckpt:
        assert ckpt.resume() == 2


def test_a_migration_that_fails_or_does_not_fit_is_an_error(tmp_path):
    """What it raises is named with its schema; what it returns is compared before anything is touched."""
    old = trained(tmp_path / "run", 2, schema="mine.v1")
    for migrate, words in [
        (lambda state: 1 / 0, "from the schema 'mine.v1' failed: ZeroDivisionError"),
        (lambda state: None, "must return the state"),
        (lambda state: {**state, "model": {"weight": torch.zeros(7)}}, "1 missing.*model/bias"),
    ]:
        state = small(9)
        before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
        how = {"schema": "mine.v2", "migrations": {"mine.v1": migrate}}
        with Checkpointer(tmp_path / "run", state, **how) as ckpt, pytest.raises(Mismatch, match=r"(?s)" + words):
            ckpt.resume()
        assert_same(dict(state["model"].state_dict()), before)
    with Checkpointer(tmp_path / "run", (state := small(9)), schema="mine.v1") as ckpt:
        assert ckpt.resume() == 2
    assert_same(dict(state["model"].state_dict()), dict(old["model"].state_dict()))


def test_sections_that_are_reset_are_not_touched_by_a_migration(tmp_path):
    """The function gets all that was saved; what is reset stays as it was built."""
    trained(tmp_path / "run", 2, state={**small(), "sampler": {"at": 5}}, schema="mine.v1")
    state = {**small(9), "sampler": {"at": 0}}
    seen = []
    how = {"schema": "mine.v2", "migrations": {"mine.v1": lambda state: seen.append(sorted(state)) or state}}
    with Checkpointer(tmp_path / "run", state, **how) as ckpt:
        ckpt.resume(reset=["sampler"])
    assert seen == [["model", "optimizer", "sampler"]]
    assert state["sampler"] == {"at": 0}


@pytest.mark.parametrize(
    "how",
    [
        {"schema": ""}, {"schema": 2}, {"migrations": {"mine.v1": to_two}}, {"schema": "v2", "migrations": [to_two]},
        {"schema": "v2", "migrations": {"v2": to_two}}, {"schema": "v2", "migrations": {"v1": 3}},
        {"schema": "v2", "migrations": {1: to_two}},
    ],
)  # fmt: skip
def test_senseless_schemas_are_refused_at_construction(tmp_path, how):
    """And no run is made."""
    with pytest.raises(InvalidArgument):
        Checkpointer(tmp_path / "run", small(), **how)
    assert not (tmp_path / "run").exists()
