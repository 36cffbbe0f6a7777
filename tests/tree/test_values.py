"""Plain values and structure: what goes in comes out, exactly, or is refused with its path."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import pathlib
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch

from shardstore.errors import InvalidArgument, Mismatch, UnsupportedState
from shardstore.tree import flatten, register_type
from tests.tree.loader import Saved, roundtrip, same


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Config:
    depth: int = 3


class Pair(NamedTuple):
    a: int
    b: int


PLAIN = {
    "none": None,
    "bool": [True, False],
    "text": "naïve \U0001f600 \x00 \n",
    "lone": "\ud800",
    "int": [0, -1, 2**53, -(2**53)],
    "float": [0.0, -0.0, 5e-324, 1.0, math.pi],
    "complex": complex(-0.0, math.inf),
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "size": torch.Size([2, 0]),
    "dtype": [torch.bfloat16, torch.qint8],
    "device": torch.device("cuda:3"),
    "path": pathlib.Path("/a/b"),
    "time": [
        dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
        dt.datetime(1, 1, 1),  # noqa: DTZ001
        dt.date(2020, 1, 1),
        dt.time(1, 2, fold=1),
        dt.timedelta(days=-3, microseconds=7),
    ],
    "ordered": OrderedDict([("b", 1), ("a", {"z": OrderedDict()})]),
    "keys": {1: "a", None: "b", (1, (2, "x")): "c", 2.5: "d", b"k": "e", np.int64(7): "f", frozenset({3}): "g"},
    "dollar": {"$": 1, "$t": 0, "$tensors": {}},
    "sets": [{1, "a", (2, None)}, frozenset({b"x"}), set()],
    "empty": [{}, [], (), ""],
    "random": random.Random(3).getstate(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_plain_value_comes_back_equal_in_type_and_bits(name):
    """Each supported type of value round-trips alone, in a list, and under a key."""
    value = PLAIN[name]
    back = roundtrip({"x": value, "deep": [{"y": (value,)}]})
    assert same(back["x"], value)
    assert same(back["deep"][0]["y"][0], value)


def test_N01_numpy_scalars_keep_their_types():
    """Numpy scalars of every plain dtype, text and times included, come back as the same scalars."""
    values = [
        np.float64(1e-3), np.int64(7), np.bool_(True), np.float16(0.1), np.float32("nan"), np.uint8(255),
        np.complex64(1 - 2j), np.str_("a\u20ac"), np.str_(""), np.bytes_(b"q"), np.datetime64("2020-01-02T03"),
        np.timedelta64(5, "ms"), np.datetime64("NaT"),
    ]  # fmt: skip
    assert same(roundtrip({"v": values})["v"], values)
    with pytest.raises(UnsupportedState, match="x/"):
        flatten({"x": np.longdouble(1)})


def test_N03_the_skeleton_is_strict_json_and_floats_keep_their_bits():
    """inf, nan (payload and sign kept), -0.0 and the smallest float round-trip through JSON without NaN or Infinity."""
    payload = struct.unpack(">d", bytes.fromhex("fff800000000beef"))[0]
    state = {"best": math.inf, "l": math.nan, "z": -0.0, "e": 5e-324, "p": payload, "m": [-math.inf, 1.5]}
    saved = Saved(state)

    def no(text):
        pytest.fail(f"{text} is no JSON")

    json.loads(saved.data, parse_constant=no)
    assert same(saved.fresh(), state)


def test_N05_integers_are_exact_and_text_beyond_what_a_double_holds():
    """Ints of any size are exact; none beyond 2**53 stands as a JSON number; 1.0 stays a float."""
    state = {"tok": 2**63 + 1, "seed": 2**127 + 3, "neg": -(2**70), "one": 1.0, "edge": 2**53 + 1, "huge": 7**9999}
    saved = Saved(state)
    assert same(saved.fresh(), state)
    numbers = []
    json.loads(saved.data, parse_int=lambda text: numbers.append(int(text)))
    assert max(map(abs, numbers), default=0) <= 2**53
    with pytest.raises(UnsupportedState, match="bytes"):
        flatten({"x": 1 << 2_000_000})


REFUSED = [
    (Config(), "asdict"),
    (Colour.RED, "name"),
    (Pair(1, 2), "_asdict"),
    (defaultdict(list), r"dict\(it\)"),
    (deque([1]), r"list\(it\)"),
    (type("Text", (str,), {})("x"), "built-in"),
    (torch.Generator(), "get_state"),
    (random.Random(), "getstate"),
    (np.random.default_rng(), "bit_generator"),
    (lambda: 0, "build it anew"),
    (object(), "register_type"),
    (np.array([object()]), "numpy dtype"),
    (np.array(["a"]), "numpy dtype"),
    (np.zeros(2, dtype=[("a", "f4")]), "numpy dtype"),
    (np.ma.masked_array([1.0]), "asarray"),
    (dt.datetime.now(dt.timezone(dt.timedelta(hours=1), "CET")), "astimezone"),
    ({Colour.RED: 1}, "dict key"),
    ({torch.ones(1)}, "set"),
]


@pytest.mark.parametrize(("value", "remedy"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_N07_other_classes_are_refused_with_path_and_remedy(value, remedy):
    """A value of another class, or of a subclass of a plain type, is refused, with its place and what to do."""
    with pytest.raises(UnsupportedState, match=remedy) as caught:
        flatten({"cfg": {"a": [value]}})
    assert caught.value.path in {"cfg/a.0", "cfg/a"}
    assert "cfg/a" in str(caught.value)


def test_N07_a_registered_type_needs_its_name_at_load_and_nothing_else(own_registry):
    """register_type stores a class by parts; a load where the name is unknown says so instead of importing anything."""
    register_type(
        Config, "tests.Config", lambda c: {"depth": c.depth, "t": torch.ones(2)}, lambda d: Config(d["depth"])
    )
    saved = Saved({"cfg": Config(7), "n": 1})
    assert saved.fresh()["cfg"] == Config(7)
    into = {"cfg": None}
    assert saved.into(into)["cfg"] == Config(7)
    with pytest.raises(InvalidArgument, match="taken"):
        register_type(Pair, "tests.Config", list, tuple)
    with pytest.raises(InvalidArgument, match="stored anyway"):
        register_type(dict, "d", list, dict)
    own_registry.BY_NAME.clear()
    with pytest.raises(Mismatch, match=r"tests\.Config.*register_type"):
        saved.fresh()
    with pytest.raises(Mismatch, match="register_type"):
        saved.bind({"cfg": None})
    assert saved.fresh("n") == {"n": 1}


def test_N08_tuples_and_lists_stay_what_they_are_at_every_depth():
    """Tuples come back as tuples and lists as lists, nested and empty ones too."""
    state = {"betas": (0.9, 0.95), "l": [1, 2], "n": ((1,), [()])}
    assert same(roundtrip(state), state)


def test_K01_keys_and_counters_keep_their_types_through_two_saves():
    """Int keys stay int and a Counter a Counter; saving what was loaded gives the very same bytes."""
    state = {"m": Counter({25: 1, 50: 1}), "st": {0: {"step": 3}, 1: {}}}
    first = Saved(state)
    back = first.fresh()
    assert same(back, state)
    assert Saved(back).data == first.data


def test_K04_any_text_may_be_a_key_and_paths_stay_unique():
    """Slashes, dots, percent signs, backslashes, the empty text: exact names back, as sections and below them."""
    names = ["x/y", "x%2Fy", "../z", ".", "", "a\\b", "Ωλ", "%", "a.b", "~2"]
    tensors = {name: torch.tensor([float(place)]) for place, name in enumerate(names)}
    nested = {"step": 1, **{name: {"w": value, "": value} for name, value in tensors.items()}}
    clash = {"s": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.ones(3)}, "n": 0}
    for state in (tensors, nested, clash):
        saved = Saved(state)
        assert same(saved.fresh(), state)
        assert len(set(saved.paths)) == len(saved.paths)
    assert Saved(clash).paths == ["s/a.b", "s/a.b~2", "s/1", "s/1~2"]
    assert "x%252Fy/w" in Saved(nested).paths
    assert "x%2Fy/w" in Saved(nested).paths


def test_K13_very_long_keys_round_trip_and_very_deep_states_are_refused():
    """A key of 100,000 characters is fine; 3,000 levels are refused in words, never with a RecursionError."""
    long = {"k" * 100_000: torch.ones(1), "x": torch.ones(2)}
    assert same(roundtrip(long), long)
    deep = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(UnsupportedState, match="200 levels"):
        flatten(deep)


def test_N14_deep_nests_and_cycles_are_typed_errors():
    """10,000 levels of any container, and containers that hold themselves, are refused; 200 levels are stored."""
    for wrap in (lambda v: {"a": v}, lambda v: [v], lambda v: (v,), lambda v: {1: v}):
        deep = {}
        for _ in range(10_000):
            deep = wrap(deep)
        with pytest.raises(UnsupportedState, match="levels"):
            flatten({"x": deep})
        fine = 0
        for _ in range(199):
            fine = wrap(fine)
        assert same(roundtrip({"x": fine}), {"x": fine})
    cycle = {"a": [1]}
    cycle["a"].append(cycle)
    with pytest.raises(UnsupportedState, match="contains itself") as caught:
        flatten(cycle)
    assert caught.value.path == "a/1"
    shared = [1]
    assert roundtrip({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def test_the_root_is_a_dict_or_a_module():
    """Anything else as the whole state is refused with the remedy to wrap it."""
    for state in ([1], torch.ones(2), None, torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)):
        with pytest.raises(UnsupportedState, match="wrap it"):
            flatten(state)
    assert roundtrip({}) == {}
    assert same(roundtrip({3: {"a": torch.ones(1)}, None: 1}), {3: {"a": torch.ones(1)}, None: 1})


def test_numpy_arrays_keep_dtype_byte_order_and_shape():
    """Arrays of plain dtypes come back bit-equal: 0-dim, empty, big-endian, transposed, read-only, dates."""
    frozen = np.arange(4)
    frozen.flags.writeable = False
    arrays = [
        np.arange(6.0).reshape(2, 3).T, np.array(3), np.zeros((0, 2), np.uint16), np.arange(3, dtype=">i4"),
        np.array([True, False]), np.array(["2020-01-01", "NaT"], "M8[D]"), np.array([1 - 2j], "c8"), frozen,
        np.arange(5)[::-1], np.array([1, 2], "float16"),
    ]  # fmt: skip
    back = roundtrip({"a": arrays})["a"]
    assert same(back, arrays)
    assert all(array.flags.writeable for array in back)


def test_the_callers_state_is_not_changed_and_not_referred_to():
    """Flattening copies plain values: changing the state afterwards changes nothing that was taken."""
    state = {"a": [1, {"b": [2]}], "log": [1, 2], "t": {"x": torch.ones(2), "y": torch.ones(2)}}
    flat = flatten(state)
    before = json.dumps(flat.state)
    state["a"][1]["b"].append(3)
    state["log"].append(3)
    state["a"].clear()
    assert json.dumps(flat.state) == before
    assert flat.leaves[0].tensor is state["t"]["x"]
