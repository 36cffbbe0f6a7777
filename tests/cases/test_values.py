"""Odd values that are no tensors: numbers, numpy, objects with state, and what can't be stored."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import json
import math
import pathlib
import pickle
import random
import struct
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardstore
from shardstore.errors import Damaged, Mismatch, ShardstoreError, UnsupportedState
from tests.kit.damage import edit_meta, files_of, meta_of
from tests.kit.same import assert_same


def meta_json(folder: Path) -> Any:
    """The meta of a checkpoint, parsed as strictly as possible."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return json.loads((folder / meta_of(folder)).read_bytes().decode("ascii"), parse_constant=refuse)


def round_trip(state: Any, folder: Path) -> Any:
    """What comes back of a state."""
    shardstore.save(state, folder)
    return shardstore.load(folder)


# ------------------------------------------------------------------------------------------------ N01: numpy

SCALARS = [
    np.float64(1e-3), np.int64(7), np.bool_(True), np.float16(0.1), np.float32(0.1), np.int8(-3), np.int16(-3),
    np.int32(-3), np.uint8(3), np.uint16(3), np.uint32(3), np.uint64(2**64 - 1), np.complex64(1 + 2j),
    np.complex128(1 - 0j), np.float64("nan"), np.float32("-inf"), np.float64(-0.0), np.str_("häß\n"),
    np.datetime64("2024-01-02T03:04:05.678", "ms"), np.datetime64("NaT"), np.timedelta64(5, "D"),
    np.datetime64("2024", "Y"), np.bytes_(b"a\x00b"),
    np.str_(""), np.bytes_(b""),
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=lambda v: f"{v.dtype} {v!r}")
def test_N01_numpy_scalars_keep_type_and_bits(tmp_path: Path, value: np.generic):
    """What `save` accepts, `load` gives back with its type: as a value, in a list, as a key, in a set."""
    state = {"v": value, "deep": [{"x": (value,)}]}
    if value == value:  # noqa: PLR0124 - NaN and NaT can't be found again as keys
        state |= {"keys": {value: 1}, "set": {value, "other"}}
    loaded = round_trip(state, tmp_path / "c")
    assert_same(loaded, state)


def test_N01_the_reported_state(tmp_path: Path):
    """The four scalars of the report, loaded anew and into a template."""
    state = {"lr": np.float64(1e-3), "n": np.int64(7), "b": np.bool_(True), "h": np.float16(0.1)}
    assert_same(round_trip(state, tmp_path / "c"), state)
    into = dict.fromkeys(state, 0)
    shardstore.load(tmp_path / "c", into=into)
    assert_same(into, state)


@pytest.mark.parametrize("dtype", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_N01_numpy_arrays_of_every_dtype_and_order(tmp_path: Path, dtype: str):
    """Arrays of any order, stride and shape, read-only ones too, come back with dtype, shape and bits."""
    base = np.arange(60).reshape(5, 12).astype(dtype)
    frozen = base.copy()
    frozen.flags.writeable = False
    state = {
        "a": base, "t": base.T, "f": np.asfortranarray(base), "s": base[::-1, ::5], "z": np.array(base[1, 1]),
        "e": base[:0], "b": np.broadcast_to(base[0], (3, 12)), "n": base[0, ::-1][:1], "m": base[:0][::-1],
        "r": frozen, "l": [base[0], {"x": base[1]}],
    }  # fmt: skip
    before = {key: value.copy() for key, value in state.items() if isinstance(value, np.ndarray)}
    loaded = round_trip({"arrays": state}, tmp_path / "c")["arrays"]
    assert_same(loaded, state)
    assert all(np.array_equal(state[key], value) for key, value in before.items())
    loaded["r"][0, 0] = 1
    loaded["b"][0, 0] = 1


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]), np.array(["a", "bc"]), np.array([b"x"]), np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
        np.zeros(2, dtype="V3"), np.longdouble(1) / 3, np.zeros(1, np.longdouble), np.ma.masked_array([1, 2], [0, 1]),
        np.zeros(1, dtype=[("a", "i4")])[0], np.zeros((1, 1)).view(np.recarray),
    ],
    ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}",
)  # fmt: skip
def test_N01_numpy_values_that_cannot_be_stored_are_refused_at_the_save(tmp_path: Path, value: Any):
    """Objects, text, structures, long doubles, masked arrays: refused with the place, before a byte is written."""
    with pytest.raises(UnsupportedState) as caught:
        shardstore.save({"a": {"b": [value]}}, tmp_path / "c")
    assert caught.value.path == "a/b.0"
    assert not (tmp_path / "c").exists()


# ------------------------------------------------------------------------------------------------ N03, N05: numbers


def bits(text: str) -> float:
    """A float from the 16 hexadecimal digits of its bits."""
    return struct.unpack(">d", bytes.fromhex(text))[0]


def test_N03_floats_that_json_has_not_are_bit_equal_and_the_json_is_strict(tmp_path: Path):
    """Infinities, NaN, -0.0 and denormals come back bit by bit; index and meta are JSON for the strictest reader."""
    state = {"best": math.inf, "l": math.nan, "z": -0.0, "e": 5e-324, "m": -math.inf, "d": 2.2250738585072014e-308,
             "big": 1.7976931348623157e308, "third": 1 / 3, "c": complex(math.nan, -0.0), "one": 1.0}  # fmt: skip
    assert_same(round_trip(state, tmp_path / "c"), state)
    meta_json(tmp_path / "c")
    for name in ("shardstore.json", meta_of(tmp_path / "c")):
        assert not {"NaN", "Infinity"} & set((tmp_path / "c" / name).read_text().replace('"', " ").split())


NANS = [
    "7ff8000000000000", "fff8000000000000", "7ff8dead0000beef", "fff0000000000001", "7fffffffffffffff",
    "7ff0000000000000", "fff0000000000000", "8000000000000000",
]  # fmt: skip


@pytest.mark.parametrize("text", NANS)
def test_N03_the_payload_of_a_nan_is_kept(tmp_path: Path, text: str):
    """The format says so: the bits of a NaN are stored, in floats, complex numbers, numpy scalars, and as keys."""
    value = bits(text)
    state = {
        "f": value,
        "c": complex(value, value),
        "np": np.float64(value),
        "key": {value: value},
        "t": torch.tensor(value, dtype=torch.float64),
    }
    loaded = round_trip(state, tmp_path / "c")
    assert_same(loaded, state)
    assert struct.pack(">d", loaded["f"]).hex() == text
    assert loaded["t"].view(torch.int64).item() & (2**64 - 1) == int(text, 16)


@pytest.mark.parametrize("step", [0, 1, 2**53 + 1, 2**63 - 1])
def test_N05_big_integers_are_exact(tmp_path: Path, step: int):
    """No integer passes through a float, 1.0 stays one, and a reader that knows doubles only sees exact text."""
    numbers = [2**63 + 1, 2**127 + 3, -(2**70), 2**53, 2**53 + 1, -(2**53) - 1, 160_000_000, 10**400, -(10**5000) + 1]
    state = {"tok": 2**63 + 1, "one": 1.0, "all": numbers, "keys": {n: float(n % 97) for n in numbers}, "f": 1.6e8}
    shardstore.save(state, tmp_path / "c", step=step)
    assert_same(shardstore.load(tmp_path / "c"), state)
    with shardstore.open(tmp_path / "c") as ckpt:
        assert ckpt.step == step
    seen: list[str] = []
    text = (tmp_path / "c" / meta_of(tmp_path / "c")).read_text()
    json.loads(text, parse_int=lambda digits: seen.append(digits) or 0)
    assert all(int(digits) == int(float(digits)) for digits in seen)
    assert str(2**127 + 3) in text


def test_N05_an_integer_without_end_is_refused(tmp_path: Path):
    """An integer of a million bits and more is no counter: refused with its place and a remedy."""
    with pytest.raises(UnsupportedState, match="bytes") as caught:
        shardstore.save({"a": [1 << 2_000_000]}, tmp_path / "c")
    assert caught.value.path == "a/0"
    assert not (tmp_path / "c").exists()


# ------------------------------------------------------------------------------------------------ N04, N07: refusals


class Mode(enum.Enum):
    """An enum."""

    A = 1


class Level(enum.IntEnum):
    """An enum that is an int, too."""

    LOW = 1


@dataclasses.dataclass
class Config:
    """A dataclass."""

    width: int = 3


Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - the old kind is what is tested


class Text(str):
    """A subclass of a plain type."""

    __slots__ = ()


class Numbers(list):
    """Another one."""


class Half:
    """Something with only one half of what it needs."""

    def state_dict(self) -> dict:
        return {}


class Key:
    """Hashable, but unknown."""


@dataclasses.dataclass
class Odd:
    """A value that is refused, and a word that the advice must have."""

    make: Any
    advice: str = ""


REFUSED = {
    "object": Odd(object),
    "dataclass": Odd(Config, "asdict"),
    "enum": Odd(lambda: Mode.A, "name"),
    "int enum": Odd(lambda: Level.LOW, "name"),
    "named tuple": Odd(lambda: Pair(1, 2), "asdict"),
    "function": Odd(lambda: max),
    "lambda": Odd(lambda: lambda: 0),
    "class": Odd(lambda: Config),
    "partial": Odd(lambda: functools.partial(max, 1)),
    "module": Odd(lambda: json),
    "str subclass": Odd(lambda: Text("x"), "plain"),
    "list subclass": Odd(lambda: Numbers([1]), "list"),
    "defaultdict": Odd(lambda: defaultdict(int), "dict"),
    "deque": Odd(lambda: deque([1]), "list"),
    "decimal": Odd(lambda: decimal.Decimal("1.5")),
    "generator": Odd(lambda: (i for i in [1])),
    "range": Odd(lambda: range(3)),
    "lock": Odd(threading.Lock),
    "file": Odd(lambda: sys.stdin),
    "torch generator": Odd(torch.Generator, "get_state"),
    "random": Odd(lambda: random.Random(1), "getstate"),
    "numpy generator": Odd(lambda: np.random.default_rng(1), "bit_generator"),
    "half an object": Odd(Half, "load_state_dict"),
    "weakref": Odd(lambda: weakref.ref(Config)),
    "memoryview": Odd(lambda: memoryview(b"x")),
    "slice": Odd(lambda: slice(1)),
    "ellipsis": Odd(lambda: ...),
    "exception": Odd(lambda: ValueError("x")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_N07_values_of_other_classes_are_refused_with_place_and_advice(tmp_path: Path, name: str):
    """A value that would tie the file to a package is refused before writing; the error has its path and a remedy."""
    odd = REFUSED[name]
    for state, path in (
        ({"cfg": odd.make(), "w": torch.ones(2)}, "cfg/"),
        ({"a": {"b": [1, (2, {"c": odd.make()})]}}, "a/b.1.1.c"),
    ):
        with pytest.raises(UnsupportedState, match=odd.advice or None) as caught:
            shardstore.save(state, tmp_path / "c")
        assert caught.value.path.rstrip("/") == path.rstrip("/")
        assert "register_type" in str(caught.value) or odd.advice
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("key", [Key(), Mode.A, Pair(1, 2), frozenset({Key()}), (1, Mode.A), Text("x"), torch.ones(1)])
def test_N07_keys_and_members_of_other_classes_are_refused(tmp_path: Path, key: Any):
    """The same for dict keys and members of sets."""
    for state in ({"a": {key: 1}}, {"a": {1: {key: torch.ones(1)}}}, {"a": {key}}):
        with pytest.raises(UnsupportedState) as caught:
            shardstore.save(state, tmp_path / "c")
        assert caught.value.path.startswith("a/")
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d \ude00"])
def test_N07_text_that_is_no_unicode_round_trips_or_is_refused(tmp_path: Path, text: str):
    """Half of a surrogate pair, as os.listdir may give it: as a value, a key, a tensor's name; never another text."""
    for state in ({"a": {"b": text}}, {"a": {text: 1}}, {"a": {text: torch.ones(1)}}, {text: 1}):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        try:
            shardstore.save(state, folder)
        except UnsupportedState:
            assert not folder.exists()
            folder.mkdir()
        else:
            assert_same(shardstore.load(folder), state)


def test_N04_a_refused_save_leaves_the_checkpoint_that_is_there(tmp_path: Path):
    """Overwriting with something that can't be stored: the error names the place, all files are as they were."""
    shardstore.save({"a": 1, "z": torch.ones(3)}, tmp_path / "c", step=1)
    before = files_of(tmp_path / "c")
    for bad in (object(), {"deep": [object()]}, torch.empty(1, device="meta"), {object()}):
        with pytest.raises(UnsupportedState, match="z"):
            shardstore.save({"a": 1, "z": bad}, tmp_path / "c", step=2, overwrite=True)
    assert files_of(tmp_path / "c") == before
    assert_same(shardstore.load(tmp_path / "c"), {"a": 1, "z": torch.ones(3)})


class Stateful:
    """Plain state behind the two methods; may fail."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_N04_an_object_whose_state_fails_refuses_the_save(tmp_path: Path):
    """An error in a user's `state_dict`, or something in it that can't be stored, ends before a byte is written."""
    for bad in (Stateful(ZeroDivisionError("boom")), Stateful({"x": object()}), Stateful(object())):
        with pytest.raises(UnsupportedState, match="thing"):
            shardstore.save({"w": torch.ones(2), "thing": bad}, tmp_path / "c")
        assert not (tmp_path / "c").exists()


def test_N07_the_name_of_a_class_in_a_checkpoint_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The class of an object is advice: whatever name stands there, nothing is imported, here or by anything else."""
    (tmp_path / "evil_module_of_a_checkpoint.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    shardstore.save({"thing": Stateful({"x": 1}), "w": torch.ones(2)}, tmp_path / "c")
    for name in ("evil_module_of_a_checkpoint.Evil", "os.system", "builtins.eval", ""):
        edit_meta(tmp_path / "c", lambda meta, name=name: meta["state"]["thing"].update({"class": name}))
        assert_same(shardstore.load(tmp_path / "c"), {"thing": {"x": 1}, "w": torch.ones(2)})
        target = Stateful({})
        shardstore.load(tmp_path / "c", into={"thing": target})
        assert target.state == {"x": 1}
        assert shardstore.verify(tmp_path / "c").ok
    assert "evil_module_of_a_checkpoint" not in sys.modules


@pytest.mark.parametrize("name", ["evil_module_of_a_checkpoint:Evil", "os.system", "Config", "tests.cases.Config"])
def test_N07_an_unregistered_type_is_an_error_that_names_it(tmp_path: Path, name: str):
    """A registered type of another program is refused by its name with the remedy, and nothing is looked up by it."""
    shardstore.save({"cfg": {"x": 1}, "w": torch.ones(2)}, tmp_path / "c")
    node = {"$": "custom", "name": name, "value": {"x": 1}}
    edit_meta(tmp_path / "c", lambda meta: meta["state"].update({"cfg": node}))
    with pytest.raises(ShardstoreError, match=r"register_type"):
        shardstore.load(tmp_path / "c")
    with pytest.raises(ShardstoreError, match=r"register_type"):
        shardstore.load(tmp_path / "c", into={"cfg": None})
    assert_same(shardstore.load(tmp_path / "c", only="w"), {"w": torch.ones(2)})


def test_N07_a_registered_type_goes_round(tmp_path: Path):
    """With `register_type` a dataclass, an enum, and a class with tensors are values like others; also as they nest."""
    from shardstore.tree import registry

    tables = [(table, dict(table)) for table in (registry.BY_CLASS, registry.BY_NAME)]
    try:
        shardstore.register_type(Config, "tests.config", dataclasses.asdict, lambda d: Config(**d))
        shardstore.register_type(Mode, "tests.mode", lambda m: m.name, lambda n: Mode[n])
        shardstore.register_type(Stateful, "tests.stateful", lambda s: s.state, Stateful)
        state = {"cfg": Config(7), "modes": [Mode.A, (Mode.A,)], "s": Stateful({"t": torch.arange(3), "c": Config(1)})}
        loaded = round_trip(state, tmp_path / "c")
        assert loaded["cfg"] == Config(7)
        assert loaded["modes"] == [Mode.A, (Mode.A,)]
        assert_same(loaded["s"].state["t"], torch.arange(3))
        assert loaded["s"].state["c"] == Config(1)
        shardstore.register_type(Config, "tests.config", dataclasses.asdict, lambda d: 1 / 0)
        with pytest.raises(ShardstoreError, match=r"tests\.config"):
            shardstore.load(tmp_path / "c")
        shardstore.register_type(Config, "tests.config", lambda c: 1 / 0, Config)
        with pytest.raises(UnsupportedState, match=r"tests\.config"):
            shardstore.save(state, tmp_path / "d")
        assert not (tmp_path / "d").exists()
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


# ------------------------------------------------------------------------------------------------ N08: structure

PLAIN = {
    "betas": (0.9, 0.95), "l": [1, 2], "n": ((1,), [()]), "empty": [[], (), {}, set(), frozenset(), "", b""],
    "set": {1, "a", (2, (3,)), None, frozenset({4})}, "bytes": b"\x00\xff", "array": bytearray(b"ab"),
    "bool": [True, False, 1, 0, 1.0], "none": None, "complex": 1 - 2j, "text": 'ä\u2028\U0001f600\x00"\\',
    "ordered": OrderedDict([("b", 1), ("a", (2,))]), "counter": Counter("aab"),
    "torch": [torch.float32, torch.device("cuda:3"), torch.Size([2, 3]), torch.device("cpu"), torch.complex128],
    "path": pathlib.Path("/a/../b c"), "relative": pathlib.Path("x"),
    "dates": [dt.datetime(2024, 1, 2, 3, 4, 5, 678),  # noqa: DTZ001 - naive ones are stored, too
              dt.datetime(2024, 1, 2, tzinfo=dt.UTC), dt.date(1, 1, 1),
              dt.time(1, 2, 3), dt.timedelta(days=-1, microseconds=1),
              dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=45)))],
    "$t": {"$t": 0, "$": "dict", "$tensors": {}}, "t": {"$": [{"$": "int", "text": "1"}]},
}  # fmt: skip


def test_N08_plain_types_keep_their_kind_at_every_depth(tmp_path: Path):
    """Tuples stay tuples, lists lists, sets sets, bool no int; also what looks like a tag of the format."""
    state = {**PLAIN, "all": [PLAIN, (PLAIN, [PLAIN])], "with tensors": (torch.ones(1), [torch.ones(2), (PLAIN,)])}
    assert_same(round_trip(state, tmp_path / "c"), state)
    into: dict[str, Any] = dict.fromkeys(state)
    shardstore.load(tmp_path / "c", into=into)
    assert_same(into, state)


def test_N08_betas_are_a_tuple_after_a_resume(tmp_path: Path):
    """Hyperparameters of an optimizer keep their types, when loaded as data and into an optimizer."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95))
    shardstore.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(other.parameters())
    shardstore.load(tmp_path / "c", into={"model": other, "optimizer": fresh})
    assert fresh.param_groups[0]["betas"] == (0.8, 0.95)
    assert type(fresh.param_groups[0]["betas"]) is tuple
    assert type(shardstore.load(tmp_path / "c")["optimizer"]["param_groups"][0]["betas"]) is tuple


# ------------------------------------------------------------------------------------------------ N10 to N13: objects


class Schedule:
    """A callable with state of its own."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, epoch: int) -> float:
        return self.base**epoch


def parts(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, an optimizer, and a scheduler that holds code."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    lr = torch.optim.lr_scheduler
    schedulers = {
        "lambda": lambda: lr.LambdaLR(optimizer, lambda e: 0.9**e),
        "lambdas": lambda: lr.LambdaLR(optimizer, [lambda e: 0.9**e]),
        "callable": lambda: lr.LambdaLR(optimizer, Schedule(0.5)),
        "multiplicative": lambda: lr.MultiplicativeLR(optimizer, lambda e: 0.9),
        "cyclic": lambda: lr.CyclicLR(optimizer, 0.1, 1.0, step_size_up=3, scale_fn=lambda x: 1.0),
        "cyclic mode": lambda: lr.CyclicLR(optimizer, 0.1, 1.0, step_size_up=3, mode="triangular2"),
        "plateau": lambda: lr.ReduceLROnPlateau(optimizer, patience=1),
        "sequential": lambda: lr.SequentialLR(
            optimizer, [lr.LambdaLR(optimizer, lambda e: 0.5), lr.CosineAnnealingLR(optimizer, 10)], milestones=[2]
        ),
        "chained": lambda: lr.ChainedScheduler([lr.LambdaLR(optimizer, lambda e: 0.9**e), lr.StepLR(optimizer, 2)]),
        "one cycle": lambda: lr.OneCycleLR(optimizer, 1.0, total_steps=30),
        "warm restarts": lambda: lr.CosineAnnealingWarmRestarts(optimizer, 4),
    }
    return model, optimizer, schedulers[kind]()


KINDS = ["lambda", "lambdas", "callable", "multiplicative", "cyclic", "cyclic mode", "plateau", "sequential", "chained",
         "one cycle", "warm restarts"]  # fmt: skip


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Train some steps; returns the learning rates."""
    rates = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((1, 2), float(step))).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step(*([loss.item()] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        rates += [group["lr"] for group in optimizer.param_groups]
    return rates


@pytest.mark.parametrize("kind", KINDS)
def test_N10_schedulers_that_hold_code_are_saved_without_it(tmp_path: Path, kind: str):
    """Plain state and callable objects' state are kept, functions stay the target's own; rates go on."""
    torch.manual_seed(3)
    model, optimizer, scheduler = parts(kind)
    advance(model, optimizer, scheduler, 5)
    shardstore.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "c")
    wanted = advance(model, optimizer, scheduler, 8)
    model2, optimizer2, scheduler2 = parts(kind)
    into = {"model": model2, "optimizer": optimizer2, "scheduler": scheduler2}
    shardstore.load(tmp_path / "c", into=into)
    assert advance(model2, optimizer2, scheduler2, 8) == wanted
    assert_same(dict(model2.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["lambda", "lambdas", "multiplicative", "cyclic", "sequential", "chained"])
def test_N10_the_checkpoint_says_which_functions_it_left_out(tmp_path: Path, kind: str, cli):
    """Bare functions are left to the user, and meta and `shardstore show` name the place; a callable object is none."""
    model, optimizer, scheduler = parts(kind)
    shardstore.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "c")
    left = meta_json(tmp_path / "c")["left"]
    assert left
    assert all(path.startswith("scheduler/") for path in left)
    shown = json.loads(cli("show", tmp_path / "c", "--json").output)
    assert shown["left"] == left
    model, optimizer, scheduler = parts("callable")
    shardstore.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "d")
    assert meta_json(tmp_path / "d")["left"] == []


def test_N10_the_state_of_a_callable_object_is_restored(tmp_path: Path):
    """What torch saves of a callable object goes into the target's own one."""
    model, optimizer, scheduler = parts("callable")
    shardstore.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "c")
    model2, optimizer2, _ = parts("callable")
    scheduler2 = torch.optim.lr_scheduler.LambdaLR(optimizer2, Schedule(0.1))
    shardstore.load(tmp_path / "c", into={"model": model2, "optimizer": optimizer2, "scheduler": scheduler2})
    assert scheduler2.lr_lambdas[0].base == 0.5


def test_N11_a_grad_scaler_is_restored_before_its_first_use(tmp_path: Path):
    """Scale and growth tracker equal the saved ones, in a scaler that has made its tensors and in one that has not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1
    shardstore.save({"model": model, "optimizer": optimizer, "scaler": scaler}, tmp_path / "c")
    lazy, used = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", init_scale=8.0)
    used.scale(torch.ones(1))
    for fresh in (lazy, used):
        shardstore.load(tmp_path / "c", into={"scaler": fresh})
        assert fresh.state_dict() == scaler.state_dict()
        scaled = fresh.scale(torch.ones(1))
        assert scaled.item() == 1024
        assert fresh._growth_tracker.item() == 1
    never = torch.amp.GradScaler("cpu", init_scale=4.0)
    shardstore.save({"scaler": never}, tmp_path / "d")
    shardstore.load(tmp_path / "d", into={"scaler": used})
    assert used.state_dict()["scale"] == 4.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    shardstore.save({"scaler": off}, tmp_path / "e")
    shardstore.load(tmp_path / "e", into={"scaler": torch.amp.GradScaler("cpu", enabled=False)})


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam capturable lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), weight_decay=0.1, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_N13_saving_and_loading_an_optimizer_changes_no_parameter(tmp_path: Path, name: str, steps: int):
    """No dummy step is ever run: parameters, gradients and counters are bit-unchanged by save and by load."""
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = OPTIMIZERS[name](model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    model(torch.ones(1, 3)).sum().backward()
    parameters = list(model.parameters())
    before = [(id(p), p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in parameters]
    counters = pickle.dumps(optimizer.state_dict())
    shardstore.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert pickle.dumps(optimizer.state_dict()) == counters
    shardstore.load(tmp_path / "c", into={"optimizer": optimizer, "model": model})
    for (number, value, grad), parameter in zip(before, model.parameters(), strict=True):
        assert id(parameter) == number
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, grad)
    assert len(optimizer.state) == (len(parameters) if steps or name == "adagrad" else 0)


# ------------------------------------------------------------------------------------------------ N14: depth and cycles


def cycles() -> dict[str, Any]:
    """States that contain themselves."""
    d: dict[str, Any] = {"a": 1}
    d["self"] = d
    items: list[Any] = [1]
    items.append((items,))
    left: dict[str, Any] = {}
    right = {"l": left}
    left["r"] = [right]
    thing = Stateful({})
    thing.state["me"] = thing
    return {"dict": d, "list": {"x": items}, "two": left, "object": {"t": thing}, "ordered": OrderedDict(x=d)}


@pytest.mark.parametrize("name", cycles())
def test_N14_a_state_that_contains_itself_is_refused(tmp_path: Path, name: str):
    """A cycle is found and named, before a byte is written; what merely occurs twice is none."""
    with pytest.raises(UnsupportedState, match="itself"):
        shardstore.save(cycles()[name], tmp_path / "c")
    assert not (tmp_path / "c").exists()
    shared: list[Any] = [1, {"x": (2,)}]
    state = {"a": shared, "b": {"c": shared, "d": [shared, shared]}}
    assert_same(round_trip(state, tmp_path / "d"), state)


def test_N14_depth_hidden_in_objects_and_registered_types_is_found(tmp_path: Path):
    """10,000 levels behind a `state_dict` are a typed refusal, too."""
    value: Any = 1
    for _ in range(10_000):
        value = {"k": value}
    for state in ({"caller": value}, {"o": Stateful(value)}, {"o": Stateful({"x": Stateful(value)})}):
        with pytest.raises(UnsupportedState):
            shardstore.save(state, tmp_path / "c")
        assert not (tmp_path / "c").exists()


def test_a_target_object_that_refuses_its_state_is_named(tmp_path: Path):
    """An error in a user's `load_state_dict` becomes one of ours, with the place."""

    class Picky(Stateful):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("no")

    shardstore.save({"thing": Stateful({"x": 1})}, tmp_path / "c")
    with pytest.raises((Mismatch, Damaged), match="thing"):
        shardstore.load(tmp_path / "c", into={"thing": Picky({})})
