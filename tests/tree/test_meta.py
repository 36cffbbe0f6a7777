"""The meta file is read as if an enemy had written it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import Damaged, ShardstoreError, UnsupportedState, UnsupportedVersion
from shardstore.tree import Meta, dump_meta, flatten, parse_meta, restore
from tests.tree.loader import Saved


def data_of(state, **changes):
    """A meta file around a skeleton."""
    top = {"schema": "shardstore-meta/1", "attempt": "a", "flat": False, "left": [], "state": state, **changes}
    return json.dumps(top).encode()


BAD = {
    "unknown tag": {"$": "pickle", "data": ""},
    "tag is no text": {"$": 3},
    "tag is null": {"$": None},
    "unknown dollar key": {"$x": 1},
    "dollar key inside": {"a": 1, "$": "int"},
    "number out of range": {"$t": 4},
    "negative number": {"$t": -1},
    "number is a bool": {"$t": True},
    "number is text": {"$t": "0"},
    "huge number": {"$t": 2**70},
    "number twice": [{"$t": 0}, {"$t": 0}],
    "unknown flag": {"$t": 0, "q": True},
    "flag is no bool": {"$t": 0, "g": 1},
    "p is false": {"$t": 0, "p": False},
    "run too long": {"$tensors": {"prefix": "", "first": 1, "count": 4}},
    "run of one": {"$tensors": {"prefix": "", "first": 0, "count": 1}},
    "run over a number in use": [{"$t": 1}, {"$tensors": {"prefix": "", "first": 0, "count": 2}}],
    "run with a bad type": {"$tensors": {"prefix": "", "first": 0, "count": 2, "type": "dict"}},
    "run with versions but no type": {"$tensors": {"prefix": "", "first": 0, "count": 2, "versions": {}}},
    "run with bad versions": {"$tensors": {"prefix": "", "first": 0, "count": 2, "type": "OrderedDict", "versions": 1}},
    "run without prefix": {"$tensors": {"first": 0, "count": 2}},
    "run with company": {"$tensors": {"prefix": "", "first": 0, "count": 2}, "x": 1},
    "run is null": {"$tensors": None},
    "large int as a number": 2**53 + 1,
    "small int as text": {"$": "int", "text": "5"},
    "int with spaces": {"$": "int", "text": " 99999999999999999999"},
    "int with other digits": {"$": "int", "text": "٣" * 20},
    "int that is huge": {"$": "int", "text": "9" * 500_000},
    "finite float as bits": {"$": "float", "bits": "0000000000000000"},
    "short bits": {"$": "float", "bits": "7ff"},
    "complex of ints": {"$": "complex", "real": 1, "imag": 0.0},
    "bytes that are no base64": {"$": "bytes", "data": "?"},
    "bytes without data": {"$": "bytes"},
    "bytes with more": {"$": "bytes", "data": "", "x": 1},
    "numpy object": {"$": "numpy", "dtype": "|O8", "data": ""},
    "numpy of a huge dtype": {"$": "numpy", "dtype": "<U999999999", "data": ""},
    "numpy of the wrong size": {"$": "numpy", "dtype": "<f8", "data": "AAAA"},
    "array of text": {"$": "ndarray", "t": 0, "dtype": "<U3"},
    "dtype that torch has no": {"$": "dtype", "name": "float99"},
    "dtype that is a function": {"$": "dtype", "name": "load"},
    "device": {"$": "device", "name": "nowhere:1"},
    "size": {"$": "Size", "items": [-1]},
    "datetime": {"$": "datetime", "text": "2020-13-01T00:00:00"},
    "datetime in another form": {"$": "datetime", "text": "20200101T000000"},
    "timedelta": {"$": "timedelta", "days": 0, "seconds": 90_000, "microseconds": 0},
    "dict without pairs": {"$": "dict", "items": [[1]]},
    "dict with a list as key": {"$": "dict", "items": [[[], 1]]},
    "dict with a dict as key": {"$": "dict", "items": [[{}, 1]]},
    "dict with a tensor as key": {"$": "dict", "items": [[{"$t": 0}, 1]]},
    "dict with a bytearray as key": {"$": "dict", "items": [[{"$": "bytearray", "data": ""}, 1]]},
    "dict with versions": {"$": "dict", "items": [], "versions": {}},
    "set of lists": {"$": "set", "items": [[1]]},
    "object of another kind": {"$": "object", "kind": "exec", "class": "x", "value": 1},
    "object without value": {"$": "object", "kind": "module", "class": "x"},
    "custom without name": {"$": "custom", "name": "", "value": 1},
    "sparse of another layout": {"$": "sparse", "layout": "strided", "shape": [], "parts": {}},
    "sparse without parts": {"$": "sparse", "layout": "sparse_coo", "shape": [1], "parts": {}, "coalesced": True},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_Z14_a_skeleton_that_the_format_does_not_allow_is_damage(name):
    """Unknown tags and members, wrong types and ranges: Damaged, naming the file, at any depth."""
    for state in ({"x": BAD[name]}, {"x": [{"$": "tuple", "items": [BAD[name]]}]}):
        with pytest.raises(Damaged) as caught:
            parse_meta(data_of(state), count=4, file="state/meta-1.json")
        assert caught.value.file == "state/meta-1.json"


def test_Z10_deep_nests_and_json_that_is_none_are_damage():
    """100,000 levels of lists, of dicts, of keys: a typed error, no RecursionError. Repeated keys and NaN too."""
    tuples = b'{"$":"tuple","items":[' * 420 + b"]}" * 420
    keys = b'{"$":"dict","items":[[' + tuples + b",1]]}"
    for inner in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 450 + b"]" * 450,
                  b"NaN", b"1e999", b'{"a":1,"a":2}', b"9" * 5000, tuples, keys, b"\xff"):  # fmt: skip
        data = b'{"schema":"shardstore-meta/1","attempt":"a","flat":false,"left":[],"state":{"x":' + inner + b"}}"
        with pytest.raises(Damaged):
            parse_meta(data, count=0)


def test_the_top_is_strict_and_another_schema_is_another_version():
    """Missing, unknown and wrong members are damage; an unknown schema says which version is needed."""
    good = data_of({})
    assert parse_meta(memoryview(good), count=0) == Meta("a", False, [], {})
    wrong = [{"flat": 1}, {"attempt": None}, {"left": "x"}, {"left": [1]}, {"more": 1}, {"state": 5}, {"state": []}]
    for changes in (*wrong, {"state": {"$t": 0}}):
        with pytest.raises(Damaged):
            parse_meta(data_of(**{"state": {}, **changes}), count=1)
    for data in (b"", b"[]", b"{}", b"null"):
        with pytest.raises(ShardstoreError):
            parse_meta(data, count=0)
    for schema in ("shardstore-meta/2", 1, None, "1"):
        with pytest.raises(UnsupportedVersion, match="shardstore-meta/1"):
            parse_meta(data_of({}, schema=schema), count=0)


@pytest.mark.parametrize(
    ("state", "dtype"),
    [
        ({"$": "dict", "items": [[1, 1], [1, 2]]}, "float32"),
        ({"$": "dict", "items": [[1, 1], [True, 2]]}, "float32"),
        ({"$": "set", "items": [1, 1]}, "float32"),
        ({"$tensors": {"prefix": "other/", "first": 0, "count": 2}}, "float32"),
        ({"$t": 0, "g": True}, "int64"),
        ({"$": "ndarray", "t": 0, "dtype": "<f8"}, "float32"),
        (
            {"$": "sparse", "layout": "sparse_coo", "shape": [1], "coalesced": True,
             "parts": {"indices": {"$t": 0}, "values": {"$t": 1}}},
            "float32",
        ),
    ],
)  # fmt: skip
def test_a_skeleton_that_contradicts_itself_or_the_tensors_is_damage_at_restore(state, dtype):
    """What only shows when values are made is still a typed error: keys twice, foreign paths, parts that don't fit."""
    meta = parse_meta(data_of({"x": state}), count=2)
    tensors = {number: torch.ones(2, dtype=getattr(torch, dtype)) for number in range(2)}
    with pytest.raises(Damaged):
        restore(meta, ["x/a", "x/b"], tensors)


def test_dumped_metas_parse_to_the_same_skeleton():
    """Dump and parse are inverse; the bytes are ASCII and the same for equal states."""
    state = {"a": {"w": torch.ones(1), "v": torch.ones(2)}, "é": {3, 1, 2}, "n": (1, 2)}
    flat = flatten(state)
    data = dump_meta(flat, "ff00")
    meta = parse_meta(data, count=2)
    assert (meta.attempt, meta.flat, meta.left, meta.state) == ("ff00", False, [], flat.state)
    assert data.isascii()
    assert data == dump_meta(flatten(state), "ff00")


def test_plain_values_beyond_the_limit_are_refused_at_the_save(monkeypatch):
    """What could not be read again is not written."""
    monkeypatch.setattr("shardstore.tree.meta.MAX_BYTES", 1000)
    with pytest.raises(UnsupportedState, match="store large data as tensors"):
        dump_meta(flatten({"x": "y" * 2000}), "a")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["$", "$t", "$tensors", "items", "data", "prefix", "first", "count", "kind", "class", "value", "a"]
            ),
            inner | st.sampled_from(["tuple", "dict", "set", "int", "object", "numpy", "sparse", "custom"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(json_values)
def test_any_json_is_a_state_or_a_typed_error(value):
    """Whatever JSON stands there, parse and restore give a value or one of our errors, nothing else."""
    data = json.dumps(
        {"schema": "shardstore-meta/1", "attempt": "a", "flat": False, "left": [], "state": {"x": value}}
    ).encode()
    paths = ["x/a", "x/b", "x/c"]
    try:
        meta = parse_meta(data, count=3)
        restore(meta, paths, {number: torch.ones(2) for number in range(3)})
    except ShardstoreError:
        pass


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_of_a_meta_never_escapes_as_another_error(place, byte):
    """One wrong byte anywhere: still a state of some kind, or a typed error."""
    saved = Saved(SAMPLE)
    data = bytearray(saved.data)
    data[place % len(data)] = byte
    try:
        meta = parse_meta(bytes(data), count=len(saved.paths))
        restore(meta, saved.paths, {number: torch.ones(2) for number in range(len(saved.paths))})
    except ShardstoreError:
        pass


SAMPLE = {
    "m": {"a": torch.ones(2), "b": torch.ones(2)},
    "o": {1: (2.5, float("nan")), "t": torch.ones(2)},
    "s": {1, 2},
    "i": 2**80,
}
