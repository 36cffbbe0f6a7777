"""A training goes on as if it had never stopped: models, optimizers and schedulers in fresh objects, bit for bit."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardstore
from shardstore.errors import Mismatch
from tests.kit.damage import index_of, shards_of
from tests.kit.same import assert_same

STEPS = 20


class Net(nn.Module):
    """A net with what trips optimizers up: equal shapes, buffers, dropout, an unused and a frozen parameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.third = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.drop(self.norm(self.second(self.first(x).relu())))) * self.scale + self.frozen


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[float]:
    """Train some steps, each with data and dropout of its own number; returns the losses."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(
                *([loss.item()] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
            )
        losses.append(loss.item())
    return losses


def groups(model: nn.Module, order: str) -> list[dict[str, Any]]:
    """The parameters of a model in two groups, in one of several orders within them."""
    named = list(model.named_parameters())
    decay = [parameter for name, parameter in named if parameter.dim() > 1]
    rest = [parameter for name, parameter in named if parameter.dim() <= 1]
    if order == "reversed":
        decay, rest = decay[::-1], rest[::-1]
    elif order == "rotated":
        decay, rest = decay[1:] + decay[:1], rest[2:] + rest[:2]
    return [{"params": decay, "weight_decay": 0.1, "name": "decay"}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]


optim, lr = torch.optim, torch.optim.lr_scheduler
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adadelta": optim.Adadelta,
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "cosine": lambda o: lr.CosineAnnealingLR(o, 30),
    "lambda": lambda o: lr.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (e + 1)]),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.05, total_steps=60),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 5), lr.ExponentialLR(o, 0.9)], [5]),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "multi step": lambda o: lr.MultiStepLR(o, [3, 9, 15]),
}


def build(optimizer: str, scheduler: str, order: str = "as defined", seed: int = 0) -> dict[str, Any]:
    """Fresh objects."""
    torch.manual_seed(seed)
    model = Net()
    made = OPTIMIZERS[optimizer](groups(model, order))
    return {"model": model, "optimizer": made, "scheduler": SCHEDULERS[scheduler](made)}


def same_end(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Whether both have the same parameters, buffers, optimizer state by parameter, and learning rates."""
    assert_same(dict(one["model"].state_dict()), dict(two["model"].state_dict()))
    names = [{id(p): name for name, p in o["model"].named_parameters()} for o in (one, two)]
    states = [{names[n][id(p)]: s for p, s in o["optimizer"].state.items()} for n, o in enumerate((one, two))]
    assert states[0].keys() == states[1].keys()
    for name, state in states[0].items():
        assert_same({k: state[k] for k in sorted(state)}, {k: states[1][name][k] for k in sorted(state)}, name)
    rest = [[{k: v for k, v in g.items() if k != "params"} for g in o["optimizer"].param_groups] for o in (one, two)]
    assert rest[0] == rest[1]


@pytest.mark.parametrize("order", ["as defined", "reversed", "rotated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, optimizer: str, order: str):
    """20 steps after a load into freshly built objects equal those without, also over parameters in another order."""
    state = build(optimizer, "cosine")
    train(**state, steps=range(7))
    shardstore.save(state, tmp_path / "c", step=7, shards=3)
    wanted = train(**state, steps=range(7, 7 + STEPS))
    fresh = build(optimizer, "cosine", order, seed=9)
    assert shardstore.load(tmp_path / "c", into=fresh) is fresh
    assert train(**fresh, steps=range(7, 7 + STEPS)) == wanted
    same_end(fresh, state)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_goes_on(tmp_path: Path, scheduler: str):
    """Learning rates and losses of 20 further steps, with each kind of scheduler; also into used ones."""
    state = build("adamw", scheduler)
    train(**state, steps=range(7))
    shardstore.save({k: v for k, v in state.items() if v is not None}, tmp_path / "c")
    wanted = train(**state, steps=range(7, 7 + STEPS))
    for used in (0, 3):
        fresh = build("adamw", scheduler, "reversed", seed=5)
        train(**fresh, steps=range(50, 50 + used))
        shardstore.load(tmp_path / "c", into={k: v for k, v in fresh.items() if v is not None})
        assert train(**fresh, steps=range(7, 7 + STEPS)) == wanted
        same_end(fresh, state)


def test_saving_in_the_midst_changes_nothing_of_the_training(tmp_path: Path):
    """A run that saves after every step ends exactly as one that never does."""
    one, two = build("adamw", "cosine"), build("adamw", "cosine")
    losses = train(**one, steps=range(12))
    seen = []
    for step in range(12):
        seen += train(**two, steps=range(step, step + 1))
        shardstore.save(two, tmp_path / "c", step=step, overwrite=True)
    assert seen == losses
    same_end(two, one)


def test_P01_layers_of_one_shape_never_swap_their_moments(tmp_path: Path):
    """Two parameters of the same shape, the new optimizer built over them the other way round: matched by name."""
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"a": a, "b": b})
    optimizer = torch.optim.Adam([a.weight, b.weight], lr=0.1)
    (a.weight.sum() * 3 - b.weight.sum()).backward()
    optimizer.step()
    shardstore.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other = copy.deepcopy(model)
    fresh = torch.optim.Adam([other["b"].weight, other["a"].weight], lr=0.1)
    shardstore.load(tmp_path / "c", into={"model": other, "optimizer": fresh})
    for name in "ab":
        assert_same(fresh.state[other[name].weight]["exp_avg"], optimizer.state[model[name].weight]["exp_avg"])
    assert not torch.equal(fresh.state[other["a"].weight]["exp_avg"], fresh.state[other["b"].weight]["exp_avg"])


def test_groups_of_other_parameters_are_refused(tmp_path: Path):
    """A parameter fewer, one more, or in another group: refused by name, nothing touched; the model still loads."""
    state = build("adamw", "none")
    train(**state, steps=range(2))
    shardstore.save({"model": state["model"], "optimizer": state["optimizer"]}, tmp_path / "c")
    model = Net()
    first, second = groups(model, "as defined")
    extra = nn.Parameter(torch.ones(2))
    wrong = [
        [{**first, "params": first["params"][1:]}, second],
        [first, {**second, "params": [*second["params"], extra]}],
        [{**first, "params": first["params"][1:]}, {**second, "params": [*second["params"], first["params"][0]]}],
        [{"params": [*first["params"], *second["params"]]}],
    ]
    model.register_parameter("extra", extra)
    for made in wrong:
        optimizer = torch.optim.AdamW(made)
        before = copy.deepcopy(optimizer.state_dict())
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(Mismatch, match="optimizer"):
            shardstore.load(tmp_path / "c", into={"model": model, "optimizer": optimizer}, allow_missing="model/extra")
        assert optimizer.state_dict() == before
        assert_same(dict(model.state_dict()), weights)
    shardstore.load(tmp_path / "c", into={"model": model}, allow_missing="model/extra")
    assert_same(model.first.weight, state["model"].first.weight)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_without_a_step(tmp_path: Path, optimizer: str):
    """Saved before the first step: nothing moves, and three later steps equal those of never having saved."""
    untouched, state = build(optimizer, "cosine"), build(optimizer, "cosine")
    shardstore.save(state, tmp_path / "c")
    fresh = build(optimizer, "cosine", "reversed", seed=3)
    shardstore.load(tmp_path / "c", into=fresh)
    wanted = train(**untouched, steps=range(3))
    assert train(**state, steps=range(3)) == wanted
    assert train(**fresh, steps=range(3)) == wanted
    same_end(state, untouched)
    same_end(fresh, untouched)


def test_a_used_optimizer_takes_the_state_of_an_unused_one(tmp_path: Path):
    """Loading "no state yet" into an optimizer that has stepped leaves it without state, too."""
    fresh, used = build("adamw", "none"), build("adamw", "none", seed=4)
    shardstore.save({"model": fresh["model"], "optimizer": fresh["optimizer"]}, tmp_path / "c")
    train(**used, steps=range(3))
    shardstore.load(tmp_path / "c", into={"model": used["model"], "optimizer": used["optimizer"]})
    assert train(**used, steps=range(3)) == train(**fresh, steps=range(3))
    same_end(used, fresh)


@pytest.mark.parametrize(("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
                                                  (torch.float32, torch.float64)])  # fmt: skip
def test_P04_moments_keep_their_own_dtype(tmp_path: Path, weights: torch.dtype, moments: torch.dtype):
    """State of another dtype than its parameter is not cast, in either direction, down to the last bit."""
    model = nn.Linear(3, 3).to(weights)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=weights)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = (torch.randn(state["exp_avg"].shape, dtype=torch.float64) / 3).to(moments)
        state["note"] = ("kept", 1)
    shardstore.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other = nn.Linear(3, 3).to(weights)
    fresh = torch.optim.AdamW(other.parameters())
    shardstore.load(tmp_path / "c", into={"model": other, "optimizer": fresh})
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert two["exp_avg"].dtype == moments
        assert_same(dict(two), dict(one))


def test_wrapped_models_and_plain_state_dicts_mix(tmp_path: Path):
    """Saved from objects and loaded as data: names, not numbers; such data, saved again, fills a wrapped model."""
    state = build("adamw", "none")
    train(**state, steps=range(3))
    shardstore.save({"model": state["model"], "optimizer": state["optimizer"]}, tmp_path / "c")
    plain = shardstore.load(tmp_path / "c")
    assert_same(plain["model"], state["model"].state_dict())
    stepped = {name for name, p in state["model"].named_parameters() if p in state["optimizer"].state}
    assert set(plain["optimizer"]["state"]) == stepped
    fresh = build("adamw", "none", "rotated", seed=8)
    wrapped = {"model": nn.DataParallel(fresh["model"]), "optimizer": fresh["optimizer"]}
    shardstore.save(plain, tmp_path / "d")
    numbered = {"model": plain["model"], "optimizer": state["optimizer"].state_dict()}
    shardstore.save(numbered, tmp_path / "e")
    with pytest.raises(Mismatch, match="optimizer"):
        shardstore.load(tmp_path / "e", into=wrapped)
    shardstore.load(tmp_path / "d", into=wrapped)
    assert_same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))
    moments = [state["optimizer"].state[p] for p in state["model"].parameters() if p in state["optimizer"].state]
    loaded = [fresh["optimizer"].state[p] for p in fresh["model"].parameters() if p in fresh["optimizer"].state]
    assert_same(list(map(dict, loaded)), list(map(dict, moments)))
    shardstore.load(tmp_path / "c", into=wrapped)
    assert train(**fresh, steps=range(3, 9)) == train(**state, steps=range(3, 9))


# ------------------------------------------------------------------------------------------------ other tools


def gpt2(seed: int) -> Any:
    """A tiny GPT-2 with random weights and its tie."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("shards", [2, 5])
def test_a_tied_gpt2_and_the_tools_that_read_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int):
    """A tied GPT-2 with its AdamW: restored here; its shards open in safetensors, its folder in transformers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place = tmp_path / "c"
    model = gpt2(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(12).view(1, 12) % 60
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    with torch.no_grad():
        wanted = model(tokens).logits
    shardstore.save({"model": model, "optimizer": optimizer, "step": 1}, place, shards=shards, step=1)

    stored = {name for name in model.state_dict() if name != "lm_head.weight"}
    assert index_of(place)["tensors"]["aliases"]
    for pattern in ("*.safetensors", "model*.safetensors"):
        found = [name for path in sorted(place.glob(pattern)) for name in safetensors.torch.load_file(path)]
        assert len(found) == len(set(found))
        assert set(found) == stored
    for path in shards_of(place):
        for name, tensor in safetensors.torch.load_file(place / path).items():
            if "/" not in path:
                assert_same(tensor, model.state_dict()[name].detach())

    fresh = gpt2(2)
    other = torch.optim.AdamW(list(fresh.parameters())[::-1], lr=5.0)
    shardstore.load(place, into={"model": fresh, "optimizer": other})
    assert fresh.lm_head.weight is fresh.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(fresh(tokens).logits, wanted)
    for m, o in ((model, optimizer), (fresh, other)):
        o.zero_grad()
        m(tokens, labels=tokens).loss.backward()
        o.step()
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))

    from transformers import GPT2LMHeadModel

    model.config.save_pretrained(place)
    again, info = GPT2LMHeadModel.from_pretrained(place, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.lm_head.weight is again.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, wanted)
    assert shardstore.verify(place).checkpoints[0].foreign == ["config.json"]


def test_the_derived_index_is_what_hugging_face_tools_expect(tmp_path: Path):
    """`weight_map` names each stored weight once with its shard, at the top; `total_size` counts their bytes."""
    state = {
        "model": {f"w{n}": torch.ones(10 + n) for n in range(7)} | {"tie": None},
        "optimizer": {"m": torch.ones(3)},
    }
    state["model"]["tie"] = state["model"]["w3"]
    shardstore.save(state, tmp_path / "c", shards=4)
    derived = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_bytes())
    assert set(derived["weight_map"]) == {f"w{n}" for n in range(7)}
    assert derived["metadata"]["total_size"] == sum(4 * (10 + n) for n in range(7))
    for name, file in derived["weight_map"].items():
        assert "/" not in file
        assert torch.equal(safetensors.torch.load_file(tmp_path / "c" / file)[name], state["model"][name])
    at_the_top = {name for name in os.listdir(tmp_path / "c") if name.endswith("safetensors")}
    assert at_the_top == set(derived["weight_map"].values())


@pytest.mark.parametrize("mode", ["copy", "map"])
@pytest.mark.parametrize("odd", [1, 3, 8, 13])
def test_R01_the_state_of_a_generator_can_be_set_as_it_comes_back(tmp_path: Path, mode: str, odd: int):
    """It is read from the start of its storage: it must not be a part of a larger one, whatever lies beside it.

    All small tensors begin at addresses that are aligned as an allocator's are.
    """
    noise = {"bytes": torch.zeros(odd, dtype=torch.uint8), "flags": torch.ones(odd, dtype=torch.bool)}
    halves = {"half": torch.randn(odd).half(), "float": torch.randn(odd)}
    torch.manual_seed(odd)
    torch.randn(odd)
    shardstore.save({"noise": noise, "rng": torch.get_rng_state(), "halves": halves}, tmp_path / "c")
    wanted = torch.randn(5)
    loaded = shardstore.load(tmp_path / "c", mode=mode)
    torch.set_rng_state(loaded["rng"])
    assert torch.equal(torch.randn(5), wanted)
    tensors = [*loaded["noise"].values(), *loaded["halves"].values(), loaded["rng"]]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


@pytest.mark.parametrize("mode", ["copy", "map"])
def test_R02_a_default_device_moves_nothing(tmp_path: Path, mode: str):
    """Under `torch.device("meta")` new memory is host memory all the same, for a save, a background save and a load."""
    state = {
        "bytes": torch.arange(9, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "t": torch.randn(40_000).view(200, -1),
    }
    state |= {"odd": state["t"].t(), "rng": torch.get_rng_state(), "one": torch.tensor(1.5)}
    with torch.device("meta"):
        shardstore.save(state, tmp_path / "a")
        handle = shardstore.save_async(state, tmp_path / "b")
        assert handle is not None
        handle.result()
        loaded = shardstore.load(tmp_path / "a", mode=mode)
        again = shardstore.load(tmp_path / "b", mode=mode)
        with shardstore.open(tmp_path / "a") as checkpoint:
            rows = checkpoint["model/t"][3:5]
    assert all(torch.equal(loaded[name], state[name]) and torch.equal(again[name], state[name]) for name in state)
    assert torch.equal(rows, state["t"][3:5])
