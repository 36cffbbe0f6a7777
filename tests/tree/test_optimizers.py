"""Optimizers by parameter name, and schedulers and scalers beside them: training goes on bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardstore.errors import Mismatch, UnsupportedState
from shardstore.tree import flatten
from tests.tree.loader import Saved, bits, same

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


class Model(nn.Module):
    """Two layers of the same shape, with dropout's and batch norm's kinds of state."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one = nn.Linear(4, 4, dtype=dtype)
        self.two = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)

    def forward(self, x):
        return self.norm(self.two(torch.tanh(self.one(x))))


def model(seed=0):
    """A model with weights of its own."""
    torch.manual_seed(seed)
    return Model()


def steps(net, optimizers, schedulers=(), count=3, first=0):
    """Train; returns the losses."""
    losses = []
    for number in range(first, first + count):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))

        def closure(x=x):
            net.zero_grad()
            loss = (net(x) - x.roll(1, 1)).pow(2).mean()
            loss.backward()
            return loss

        losses.append(closure().item())
        for optimizer in optimizers:
            optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return losses


def weights(net):
    """The bits of all that a model has."""
    return [bits(value) for value in net.state_dict().values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_bit_for_bit(name):
    """Saved after three steps; a fresh pair, built over reversed parameters, makes the same three more."""
    build = OPTIMIZERS[name]
    net = model()
    optimizer = build(net.parameters())
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer})
    expected = steps(net, [optimizer], first=3)
    for used in (False, True):
        other = model(1)
        target = build(reversed(list(other.parameters())))
        if used:
            steps(other, [target], count=1)
        saved.into({"model": other, "optimizer": target})
        assert steps(other, [target], first=3) == expected
        assert weights(other) == weights(net)


def test_lbfgs_with_its_lists_of_tensors_goes_on():
    """State that is one dict with lists of tensors, under the first parameter."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer})
    expected = steps(net, [optimizer], first=3)
    other = model(1)
    target = torch.optim.LBFGS(other.parameters(), max_iter=3)
    saved.into({"model": other, "optimizer": target})
    assert steps(other, [target], first=3) == expected


def test_P01_moments_go_to_the_parameter_of_the_same_name():
    """Two layers of one shape, the target built in the other order, in two groups that are swapped: state isn't."""
    net = model()
    optimizer = torch.optim.Adam([{"params": [net.one.weight], "lr": 0.1}, {"params": [net.two.weight], "lr": 0.2}])
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer})
    assert "optimizer/state.one.weight.exp_avg" in saved.paths
    other = model(1)
    target = torch.optim.Adam([{"params": [other.two.weight]}, {"params": [other.one.weight]}])
    saved.into({"model": other, "optimizer": target})
    assert bits(target.state[other.one.weight]["exp_avg"]) == bits(optimizer.state[net.one.weight]["exp_avg"])
    assert [group["lr"] for group in target.param_groups] == [0.2, 0.1]
    assert list(saved.fresh()["optimizer"]["state"]) == ["one.weight", "two.weight"]


def test_P02_groups_that_differ_are_listed_with_their_names():
    """Other sizes, a frozen parameter fewer: one error with both groupings; the model alone still loads."""
    net = model()
    optimizer = torch.optim.SGD(net.one.parameters(), lr=0.1, momentum=0.9)
    steps(net, [optimizer], count=1)
    saved = Saved({"model": net, "optimizer": optimizer})
    other = model(1)
    split = torch.optim.SGD([{"params": [other.one.weight]}, {"params": [other.one.bias]}], lr=0.1)
    fewer = torch.optim.SGD([other.one.weight], lr=0.1)
    more = torch.optim.SGD(other.parameters(), lr=0.1)
    for target, text in ((split, r"\[2: 'one.bias', 'one.weight'\].*\[1: 'one.weight'\], \[1: 'one.bias'\]"),
                         (fewer, "only in the checkpoint"), (more, "only in the target: .*two.weight")):  # fmt: skip
        before = weights(other)
        with pytest.raises(Mismatch, match=text) as caught:
            saved.into({"model": other, "optimizer": target})
        assert len(caught.value.different) == 1
        assert weights(other) == before
    saved.into({"model": other, "optimizer": more}, only="model")
    assert weights(other) == weights(net)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": False}])
def test_P03_the_step_tensor_keeps_its_dtype_and_place(options):
    """After a load into an optimizer without state, `step` is as torch would have made it, and the next step works."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, **options)
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer})
    other = model(1)
    target = torch.optim.Adam(other.parameters(), lr=0.1, **options)
    binding = saved.bind({"model": other, "optimizer": target})
    assert {str(device) for device in binding.fresh.values()} == {"cpu"}
    saved.into({"model": other, "optimizer": target})
    for param in other.parameters():
        assert same(target.state[param]["step"], torch.tensor(3.0))
    assert steps(other, [target], first=3) == steps(net, [optimizer], first=3)


def test_P03_fresh_state_is_planned_for_the_devices_torch_uses():
    """Moments go with the parameter, step to the CPU unless fused or capturable. Seen in the plan, for meta."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    steps(net, [optimizer], count=1)
    for flags, place in (({}, "cpu"), ({"capturable": True}, "meta")):
        for group in optimizer.param_groups:
            group.update(flags)
        saved = Saved(
            {"model": {name: value.detach() for name, value in net.named_parameters()}, "optimizer": optimizer}
        )
        there = Model().to("meta")
        target = torch.optim.Adam(there.named_parameters(), lr=0.1)
        binding = saved.bind({"optimizer": target})
        devices = {saved.paths[number].rpartition(".")[2]: device.type for number, device in binding.fresh.items()}
        assert devices == {"step": place, "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_P03_a_python_int_as_step_stays_accepted():
    """State of old torch versions has plain numbers as steps: they become tensors as at torch's own load."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    steps(net, [optimizer])
    expected = Saved({"model": net, "optimizer": optimizer})
    for state in optimizer.state.values():
        state["step"] = int(state["step"])
    saved = Saved({"model": net, "optimizer": optimizer})
    losses = []
    for source in (expected, saved):
        other = model(1)
        target = torch.optim.Adam(other.parameters(), lr=0.1)
        source.into({"model": other, "optimizer": target})
        losses.append(steps(other, [target], first=3))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("weight", "moment"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("hooked", [False, True])
def test_P04_state_is_never_cast_to_the_dtype_of_the_parameter(weight, moment, hooked):
    """bf16 parameters with f32 moments, and the other way round: bits as saved, also through torch's own load."""
    net = nn.Linear(4, 4, dtype=weight)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for param in net.parameters():
        state = optimizer.state[param]
        state["step"] = torch.tensor(3.0)
        state["exp_avg"] = (torch.rand(param.shape) / 3).to(moment)
        state["exp_avg_sq"] = (torch.rand(param.shape) / 7).to(moment)
    saved = Saved({"model": net, "optimizer": optimizer})
    other = nn.Linear(4, 4, dtype=weight)
    target = torch.optim.Adam(other.parameters(), lr=0.1)
    if hooked:
        target.register_load_state_dict_post_hook(lambda o: None)
    saved.into({"model": other, "optimizer": target})
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert same(target.state[two], optimizer.state[one])


def test_existing_state_is_filled_in_place_and_stale_state_goes():
    """State tensors keep their identity where they fit; entries that the checkpoint doesn't have are gone."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    empty = Saved({"model": net, "optimizer": optimizer})
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer})
    other = model(1)
    target = torch.optim.Adam(other.parameters(), lr=0.1)
    steps(other, [target], count=1)
    kept = target.state[other.one.weight]["exp_avg"]
    target.state[other.one.weight]["stale"] = 1
    states = target.state[other.one.weight]
    binding = saved.bind({"model": other, "optimizer": target})
    assert binding.fresh == {}
    saved.into({"model": other, "optimizer": target})
    assert target.state[other.one.weight] is states
    assert states["exp_avg"] is kept
    assert "stale" not in states
    empty.into({"model": other, "optimizer": target})
    assert dict(target.state) == {}


def test_state_tensors_that_are_shared_are_not_filled_in_place():
    """Two parameters whose states hold one tensor object: each gets its own saved value."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    steps(net, [optimizer])
    optimizer.state[net.two.bias]["step"] += 4
    saved = Saved({"model": net, "optimizer": optimizer})
    other = model(1)
    target = torch.optim.Adam(other.parameters(), lr=0.1)
    steps(other, [target], count=1)
    shared = torch.tensor(0.0)
    for state in target.state.values():
        state["step"] = shared
    saved.into({"model": other, "optimizer": target})
    assert [target.state[p]["step"].item() for p in (other.one.bias, other.two.bias)] == [3, 7]


@pytest.mark.parametrize("build", [OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
def test_N13_an_optimizer_without_state_is_saved_as_such(build):
    """No dummy step: parameters, gradients and the optimizer are bit-unchanged by save and load; training agrees."""
    net = model()
    optimizer = build(net.parameters())
    steps(net, [])
    before, grads = weights(net), [bits(param.grad) for param in net.parameters()]
    saved = Saved({"model": net, "optimizer": optimizer})
    assert saved.meta.state["optimizer"]["value"]["state"] == {}
    assert weights(net) == before
    assert [bits(param.grad) for param in net.parameters()] == grads
    assert len(optimizer.state) == 0
    other = model(1)
    target = build(other.parameters())
    saved.into({"model": other, "optimizer": target})
    assert weights(other) == before
    assert len(target.state) == 0
    assert steps(other, [target]) == steps(net, [optimizer])


def test_names_come_from_modules_tensors_or_the_optimizer_itself():
    """One Module: its names; several: with the section; a state_dict in the state does as well; then `param_names`."""
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    both = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    one = torch.optim.SGD(b.parameters(), lr=0.1)

    def names(state):
        node = flatten(state).state["o"]
        return [name for group in node["value"]["param_groups"] for name in group["params"]]

    assert names({"a": a, "b": b, "o": one}) == ["weight", "bias"]
    assert names({"o": one, "x": {"b": [b]}}) == ["weight", "bias"]
    assert names({"a": a, "b": b, "o": both}) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert names({"nets": {"g": a, "d": b}, "o": both}) == [
        "nets.g.weight",
        "nets.g.bias",
        "nets.d.weight",
        "nets.d.bias",
    ]
    assert names({"a": torch.compile(a, backend="eager"), "whole": nn.ModuleList([b, a]), "o": both})[0] == "1.weight"
    assert names({"b": b.state_dict(), "o": one}) == ["weight", "bias"]
    assert names({"b": [b.weight, b.bias], "o": one}) == ["0", "1"]
    assert names({"o": torch.optim.SGD(a.named_parameters(), lr=0.1)}) == ["weight", "bias"]


def test_a_parameter_that_nothing_names_is_refused_with_the_remedy():
    """Positions are never stored: a nameless parameter is an error at the save, and at the load."""
    net = model()
    optimizer = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(UnsupportedState, match=r"optimizer/: 1 of 7 .*\(3,\).*put the Module") as caught:
        flatten({"model": net, "optimizer": optimizer})
    assert caught.value.path == "optimizer/"
    good = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = Saved({"model": net, "optimizer": good})
    with pytest.raises(Mismatch, match="put the Module"):
        saved.bind({"optimizer": torch.optim.SGD(model(1).parameters(), lr=0.1)})


def test_an_optimizer_of_several_modules_and_one_saved_beside_a_state_dict():
    """Names with sections match again; tensors of a plain state_dict name parameters as their Module would."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, momentum=0.5)
    for param in (*a.parameters(), *b.parameters()):
        param.grad = torch.rand_like(param)
    optimizer.step()
    saved = Saved({"a": a, "b": b, "o": optimizer})
    c, d = nn.Linear(2, 2), nn.Linear(2, 2)
    target = torch.optim.SGD([*d.parameters(), *c.parameters()], lr=0.1)
    saved.into({"a": c, "b": d, "o": target})
    assert bits(target.state[d.bias]["momentum_buffer"]) == bits(optimizer.state[b.bias]["momentum_buffer"])
    single = torch.optim.SGD(a.parameters(), lr=0.3)
    by_tensors = Saved({"a": a.state_dict(), "o": single})
    fresh = torch.optim.SGD(c.parameters(), lr=0.1)
    by_tensors.into({"a": c, "o": fresh})
    assert fresh.param_groups[0]["lr"] == 0.3
    assert bits(c.weight) == bits(a.weight)


def test_a_tied_parameter_is_found_under_any_of_its_names():
    """Saved as the embedding's, in a target that names the head first."""

    class Tied(nn.Module):
        def __init__(self, first):
            super().__init__()
            shared = nn.Parameter(torch.rand(3, 2))
            for name in ("wte", "head") if first == "wte" else ("head", "wte"):
                layer = nn.Linear(2, 3, bias=False)
                layer.weight = shared
                setattr(self, name, layer)

    source, other = Tied("wte"), Tied("head")
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    source.wte.weight.grad = torch.rand(3, 2)
    optimizer.step()
    target = torch.optim.SGD(other.parameters(), lr=0.1)
    Saved({"m": source, "o": optimizer}).into({"m": other, "o": target})
    assert bits(target.state[other.head.weight]["momentum_buffer"]) == bits(
        optimizer.state[source.wte.weight]["momentum_buffer"]
    )


def test_an_optimizers_state_dict_is_data_and_not_put_into_an_optimizer():
    """A plain state_dict has only positions: data round-trips, but not into an Optimizer, and the remedy is told."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer.state_dict()})
    assert same(saved.fresh()["optimizer"], optimizer.state_dict())
    target = torch.optim.Adam(net.parameters(), lr=0.1)
    with pytest.raises(Mismatch, match=r"Save the optimizer itself.*load_state_dict"):
        saved.bind({"model": net, "optimizer": target})


def test_optimizers_with_a_load_of_their_own_get_it_and_lose_nothing():
    """An overridden load_state_dict with extra keys: called with the target's numbers; lists and dtypes stay."""

    class Own(torch.optim.SGD):
        extra = 0

        def state_dict(self):
            return {**super().state_dict(), "extra": self.extra}

        def load_state_dict(self, state_dict):
            self.extra = state_dict.pop("extra")
            super().load_state_dict(state_dict)

    net = model()
    optimizer = Own(
        [{"params": list(net.one.parameters()), "lr": 0.3}, {"params": list(net.two.parameters())}],
        lr=0.1,
        momentum=0.9,
    )
    optimizer.extra = 7
    steps(net, [optimizer])
    saved = Saved({"model": net, "optimizer": optimizer})
    other = model(1)
    target = Own(
        [{"params": list(other.two.parameters())}, {"params": [other.one.bias, other.one.weight]}], lr=0.5, momentum=0.9
    )
    groups, members = target.param_groups, list(target.param_groups)
    saved.into({"model": other, "optimizer": target})
    assert target.extra == 7
    assert target.param_groups is groups
    assert all(one is two for one, two in zip(target.param_groups, members, strict=True))
    assert [group["lr"] for group in groups] == [0.1, 0.3]
    assert steps(other, [target], first=3) == steps(net, [optimizer], first=3)


def test_a_load_hook_that_refuses_is_told_as_a_mismatch():
    """What an object raises at its load comes as our error, naming it and saying that tensors were filled."""
    net = model()
    saved = Saved({"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})
    target = torch.optim.SGD(net.parameters(), lr=0.1)

    def refuse(optimizer, state):
        raise ValueError("no, thanks")

    target.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(Mismatch, match=r"optimizer/.*no, thanks.*filled"):
        saved.into({"model": net, "optimizer": target})


# ------------------------------------------------------------------------------------------- schedulers

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, 20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.5, 3, scale_fn=lambda x: 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.LambdaLR(o, lambda e: 0.8**e)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_P07_P15_schedulers_go_on_and_change_the_lr_that_is_used(name, tensor):
    """In every order: lr, initial_lr and losses as saved; the next scheduler step reaches the groups."""

    def build(seed):
        net = model(seed)
        lr = torch.tensor(0.1) if tensor else 0.1
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        return {"model": net, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def go(objects, first):
        losses = steps(objects["model"], [objects["optimizer"]], [objects["scheduler"]], first=first)
        return losses, [float(group["lr"]) for group in objects["optimizer"].param_groups]

    source = build(0)
    go(source, 0)
    saved = Saved({**source, "n": 1})
    rates = [{key: float(group[key]) for key in ("lr", "initial_lr")} for group in source["optimizer"].param_groups]
    expected = go(source, 3)
    for order in itertools.permutations(source):
        target = build(1)
        groups = target["optimizer"].param_groups
        saved.into({key: target[key] for key in order})
        assert target["optimizer"].param_groups is groups
        assert [{key: float(group[key]) for key in ("lr", "initial_lr")} for group in groups] == rates
        assert go(target, 3) == expected


def test_P07_a_scheduler_whose_load_changes_rates_has_no_last_word():
    """An object that writes to the groups while it loads: afterwards the saved values stand, tensors too."""

    class Meddler:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def state_dict(self):
            return {"optimizer": self.optimizer, "n": 1}

        def load_state_dict(self, state):
            self.n = state["n"]
            for group in self.optimizer.param_groups:
                group["lr"].fill_(9)
                group["weight_decay"] = 9

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.25))
    saved = Saved({"m": net, "o": optimizer, "s": Meddler(optimizer)})
    assert saved.left == ["s/optimizer"]
    other = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5))
    rate = other.param_groups[0]["lr"]
    saved.into({"m": net, "s": Meddler(other), "o": other})
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert other.param_groups[0]["weight_decay"] == 0


def test_groups_in_another_order_and_a_scheduler_that_counts_them_are_refused():
    """A scheduler has a base rate for each group by number: with reordered groups it would swap them."""
    net = model()
    optimizer = torch.optim.SGD(
        [{"params": list(net.one.parameters()), "lr": 0.1}, {"params": list(net.two.parameters())}], lr=0.2
    )
    saved = Saved({"model": net, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 2)})
    other = model(1)
    target = torch.optim.SGD(
        [{"params": list(other.two.parameters())}, {"params": list(other.one.parameters())}], lr=0.2
    )
    scheduler = lr_scheduler.StepLR(target, 2)
    with pytest.raises(Mismatch, match=r"another order.*scheduler/"):
        saved.bind({"model": other, "optimizer": target, "scheduler": scheduler})
    saved.into({"model": other, "optimizer": target})
    assert [group["lr"] for group in target.param_groups] == [0.2, 0.1]


def test_N10_functions_are_left_to_the_target_and_listed():
    """Lambdas and bound methods don't stop a save, the file says what was left; callables with state are stored."""

    class Decay:
        def __init__(self, rate):
            self.rate = rate

        def __call__(self, epoch):
            return self.rate**epoch

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    one = lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)
    two = lr_scheduler.LambdaLR(optimizer, Decay(0.5))
    three = lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, scale_fn=lambda x: 1.0)
    saved = Saved({"model": net, "one": one, "two": two, "three": three})
    assert saved.left == ["one/lr_lambdas.0", "three/_scale_fn_custom"]
    assert saved.meta.left == saved.left
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    mine, decay = (lambda e: 0.1**e), Decay(0.7)
    targets = {"one": lr_scheduler.LambdaLR(other, mine), "two": lr_scheduler.LambdaLR(other, decay)}
    saved.into(targets)
    assert targets["one"].lr_lambdas == [mine]
    assert decay.rate == 0.5


def test_N10_an_object_that_wants_its_functions_back_gets_its_own():
    """A strict load_state_dict finds every key: what was left out of the checkpoint comes from the target itself."""

    class Strict:
        def __init__(self, number, function):
            self.number, self.function, self.several = number, function, [1, function]

        def state_dict(self):
            return {"number": self.number, "function": self.function, "several": self.several, "call": self.state_dict}

        def load_state_dict(self, state):
            assert state.keys() == {"number", "function", "several", "call"}
            self.number, self.function, self.several = state["number"], state["function"], state["several"]

    saved = Saved({"s": Strict(5, len), "n": 1})
    assert saved.left == ["s/function", "s/several.1", "s/call"]
    target = Strict(0, max)
    saved.into({"s": target})
    assert (target.number, target.function, target.several) == (5, max, [1, max])
    assert saved.fresh()["s"] == {"number": 5, "several": [1, None]}


def test_N11_a_grad_scaler_is_restored_before_and_after_first_use():
    """Scale, interval and growth tracker equal the saved ones, also where the scale tensor is made later."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler.scale(torch.ones(1))
    scaler._growth_tracker.fill_(1)
    state = scaler.state_dict()
    saved = Saved({"scaler": scaler, "n": 1})
    early, late = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    late.scale(torch.ones(1))
    for target in (early, late):
        saved.into({"scaler": target})
        target.scale(torch.ones(1))
        assert target.state_dict() == state
        assert target.get_scale() == 1024.0
    assert scaler.state_dict() == state


def test_objects_with_tensors_get_them_whole_and_on_their_device():
    """A user's object with tensors in its state: loaded fresh, whatever shapes it has now, and ties of its own kept."""

    class Average:
        def __init__(self):
            self.shadow = {}

        def state_dict(self):
            return {"shadow": self.shadow, "n": (1, 2)}

        def load_state_dict(self, state):
            self.shadow = state["shadow"]

    average = Average()
    average.shadow = {"w": torch.ones(3), "v": torch.zeros(2)}
    saved = Saved({"ema": average, "n": 1})
    assert saved.paths == ["ema/shadow.w", "ema/shadow.v"]
    target = Average()
    target.shadow = {"w": torch.empty(1, device="meta")}
    assert {d.type for d in saved.bind({"ema": target}).fresh.values()} == {"meta", "cpu"}
    target.shadow = {}
    saved.into({"ema": target})
    assert same(target.shadow, average.shadow)
    with pytest.raises(Mismatch, match="Average"):
        Saved({"ema": model(), "n": 1}).bind({"ema": target})


def test_half_an_interface_and_a_failing_state_dict_are_refused():
    """state_dict without load_state_dict could be saved but never loaded; what state_dict raises is told."""

    class Half:
        def state_dict(self):
            return {}

    class Failing(Half):
        def state_dict(self):
            raise RuntimeError("not consolidated")

        def load_state_dict(self, state):
            pass

    with pytest.raises(UnsupportedState, match="both"):
        flatten({"h": Half()})
    with pytest.raises(UnsupportedState, match=r"f/.*not consolidated"):
        flatten({"f": Failing()})
