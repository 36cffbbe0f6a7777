"""Odd keys, names and structure: what stands in a state, and what the places of checkpoints are called."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardstore
from shardstore import header
from shardstore.errors import Damaged, InvalidArgument, Mismatch, UnsupportedState
from shardstore.events import Noticed
from tests.kit.damage import files_of, index_of, meta_of, parts_of, replace_file, shard, shards_of
from tests.kit.same import assert_same

ALLOWED_FILES = re.compile(
    r"model-\d{5}-of-\d{5}-([0-9a-f]{16})\.safetensors|state/\d{5}-of-\d{5}-([0-9a-f]{16})\.safetensors"
    r"|state/meta-([0-9a-f]{16})\.json|shardstore\.json|model\.safetensors\.index\.json"
)


def no_files(folder: Path) -> bool:
    """Whether nothing at all was written to a place."""
    return not folder.exists() or not list(folder.rglob("*"))


# ------------------------------------------------------------------------------------------------ K01, K02: what stays


def test_K01_integer_keys_and_counters_stay_what_they_are(tmp_path: Path):
    """Integer keys stay int, a Counter stays one, and the second round trip is like the first."""
    state = {"m": Counter({25: 1, 50: 1}), "st": {0: {"step": 3}, 1: {}}}
    shardstore.save(state, tmp_path / "1")
    first = shardstore.load(tmp_path / "1")
    assert_same(first, state)
    first["m"][25] += 1
    first["m"]["25"] = 7
    shardstore.save(first, tmp_path / "2")
    second = shardstore.load(tmp_path / "2")
    assert_same(second, first)
    assert second["m"] == Counter({25: 2, 50: 1, "25": 7})


def test_K01_keys_of_every_kind_keep_their_types_and_order(tmp_path: Path):
    """Keys that look alike as text stay apart, in their order, also where tensors stand under them."""
    keys: list[Any] = [
        1, "1", 1.5, "1.5", None, "None", True, "True", (1, "a"), "(1, 'a')", b"x", "x", -1, 2**80, frozenset({3, 4}),
        ((1, (2,)), None), float("inf"), "", "$t", "$", 3 + 4j, torch.float32,
    ]  # fmt: skip
    keys.remove(True)  # it is the key 1
    state = {
        "plain": {key: number for number, key in enumerate(keys)},
        "tensors": {key: torch.tensor([float(number)]) for number, key in enumerate(keys)},
        "ordered": OrderedDict((key, [key]) for key in reversed(keys)),
        "bools": {True: 1, False: 0, "True": 2},
        "counter": Counter({None: 2, (1, 2): 3}),
    }
    shardstore.save(state, tmp_path / "c")
    loaded = shardstore.load(tmp_path / "c")
    assert_same(loaded, state)
    shardstore.save(loaded, tmp_path / "d")
    assert_same(shardstore.load(tmp_path / "d"), state)
    metas = [json.loads((tmp_path / n / meta_of(tmp_path / n)).read_bytes()) for n in "cd"]
    assert metas[0]["state"] == metas[1]["state"]


def test_K01_sections_of_any_key(tmp_path: Path):
    """Also the keys at the top need not be text."""
    state = {0: torch.ones(2), "0": {"w": torch.zeros(2)}, None: 5, (1, 2): [torch.ones(1)], "a/b": torch.arange(3)}
    shardstore.save(state, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), state)


@pytest.mark.parametrize("template", [{"k": []}, {"k": None}, {"k": [{"a": 0}]}, {"k": [{"a": 0}] * 5}, {"k": {}}])
def test_K02_a_template_never_shortens_plain_data(tmp_path: Path, template: dict):
    """A list that is empty, shorter or longer in the template comes back whole, as it was saved."""
    state = {"k": [{"a": 1}, {"b": 2}]}
    shardstore.save(state, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), state)
    assert_same(shardstore.load(tmp_path / "c", into=template), state)


def test_K02_a_template_without_room_for_tensors_says_so_or_takes_them(tmp_path: Path):
    """Lists of tensors of other lengths: whole, or a Mismatch that touches nothing; never cut."""
    state = {"k": [torch.ones(2), torch.zeros(3)]}
    shardstore.save(state, tmp_path / "c")
    into: dict[str, Any] = {"k": []}
    shardstore.load(tmp_path / "c", into=into)
    assert_same(into, state)
    for items in ([torch.full((2,), 9.0)], [torch.full((2,), 9.0), torch.zeros(3), torch.zeros(1)]):
        with pytest.raises(Mismatch, match=r"k.*items"):
            shardstore.load(tmp_path / "c", into={"k": items})
        assert items[0].tolist() == [9, 9]


# ------------------------------------------------------------------------------------------------ K04, K06, K07: names

NASTY = [
    "x/y", "x%2Fy", "../z", ".", "", "a\\b", "Ωλ", "..", "/", "/etc/passwd", "a\0b", "a\nb", "C:\\x", "con", "~", "a b",
    "%", "%25", "a.b", ".a", "a..b", "model", "shardstore.json", "x" * 300, "\u202e", "\U0001f600", '"', "{}", "\x7f",
    "-rf", "*", "?", "[a]", "#1", "~2", "w~2",
]  # fmt: skip


@pytest.mark.parametrize("place", ["flat", "model", "section", "top"])
def test_K04_names_come_back_exactly_and_make_no_file_names(tmp_path: Path, place: str):
    """Slashes, dots, blanks, other scripts and control characters: exact names back, no file is named after them."""
    tensors = {name: torch.tensor([float(number)]) for number, name in enumerate(NASTY)}
    states = {
        "flat": tensors,
        "model": {"model": tensors},
        "section": {"a": {"b": tensors}},
        "top": {**tensors, "n": 1},
    }
    state = states[place]
    shardstore.save(state, tmp_path / "c", shards=3)
    assert_same(shardstore.load(tmp_path / "c"), state)
    into = {k: torch.zeros(1) for k in NASTY}
    whole = {"flat": into, "model": {"model": into}, "section": {"a": {"b": into}}, "top": {**into, "n": 0}}[place]
    shardstore.load(tmp_path / "c", into=whole)
    assert_same(whole, state)
    assert all(ALLOWED_FILES.fullmatch(name) for name in files_of(tmp_path / "c"))
    assert all(data.isascii() for name, data in files_of(tmp_path / "c").items() if name.endswith(".json"))
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]
    assert shardstore.verify(tmp_path / "c").ok
    for path in shards_of(tmp_path / "c"):
        assert safetensors.torch.load_file(tmp_path / "c" / path)


def test_K04_paths_are_unique_and_can_be_opened(tmp_path: Path):
    """Two places whose names join to the same path get different paths, and both can be read alone."""
    state = {
        "s": {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}},
        "x/y": {"z": torch.tensor([3.0])},
        "x": {"y/z": torch.tensor([4.0])},
        "x%2Fy": {"z": torch.tensor([5.0])},
        "n": {1: torch.tensor([6.0]), "1": torch.tensor([7.0])},
    }
    shardstore.save(state, tmp_path / "c")
    with shardstore.open(tmp_path / "c") as ckpt:
        assert len(set(ckpt)) == len(list(ckpt)) == 7
        assert sorted(ckpt[path][:].item() for path in ckpt) == [1, 2, 3, 4, 5, 6, 7]
        assert ckpt["x%2Fy/z"][:].item() == 3
        assert ckpt["x/y/z"][:].item() == 4
        assert ckpt["x%252Fy/z"][:].item() == 5
    assert_same(shardstore.load(tmp_path / "c"), state)


@pytest.mark.parametrize(
    "state",
    [
        {"__metadata__": torch.ones(2)},
        {"model": {"__metadata__": torch.ones(2), "w": torch.zeros(3)}},
        {"model": {"__metadata__": {"__metadata__": torch.ones(2)}}},
        {"__metadata__": {"w": torch.ones(2)}},
        {"optimizer": {"__metadata__": torch.ones(2)}},
        {"__metadata__": torch.ones(2), "n": 3},
        {"": {"__metadata__": torch.ones(2)}},
        {"model/": {"__metadata__": torch.ones(1)}, "model": {"": {"__metadata__": torch.ones(1)}}},
    ],
    ids=str,
)
def test_K06_tensors_named_like_the_reserved_entry(tmp_path: Path, state: dict):
    """`__metadata__` at any place round-trips, and every file stays readable by safetensors itself."""
    shardstore.save(state, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), state)
    assert shardstore.verify(tmp_path / "c").ok
    names = [set(safetensors.torch.load_file(tmp_path / "c" / path)) for path in shards_of(tmp_path / "c")]
    assert sum(map(len, names)) == len(index_of(tmp_path / "c")["tensors"]["path"])


def test_K07_our_headers_hold_strings_only(tmp_path: Path):
    """What we write under `__metadata__` is what every reader takes."""
    shardstore.save({"model": {"w": torch.ones(2)}, "x": torch.ones(1), "n": None}, tmp_path / "c", step=3)
    for path in shards_of(tmp_path / "c"):
        assert parts_of((tmp_path / "c" / path).read_bytes())[0]["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("metadata", [{"n": 0}, None, {"n": None}, [], "x", {"n": ["a"]}, {"n": {}}, 3])
def test_K07_headers_of_other_writers_with_odd_metadata(tmp_path: Path, metadata: Any):
    """A shard with metadata that breaks the format, though its digests are right, is one typed error that names it.

    Loading needs no header, since the index says where every byte lies, so it is not misled by it either.
    """
    shardstore.save({"model": {"w": torch.arange(4.0)}}, tmp_path / "c")
    (path,) = shards_of(tmp_path / "c")
    head, data = parts_of((tmp_path / "c" / path).read_bytes())
    made = shard({**head, "__metadata__": metadata}, data)
    replace_file(tmp_path / "c", path, made, start=len(made) - len(data))
    report = shardstore.verify(tmp_path / "c")
    (problem,) = report.checkpoints[0].problems
    assert (problem.kind, problem.file, report.exit_code) == ("header", path, 3)
    with pytest.raises(Damaged, match="__metadata__"):
        header.parse(made[8 : -len(data)], path, len(made))
    assert_same(shardstore.load(tmp_path / "c"), {"model": {"w": torch.arange(4.0)}})


@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "by": "somebody"}, "absent"])
def test_K07_headers_with_other_valid_metadata_are_fine(tmp_path: Path, metadata: Any):
    """No metadata, empty metadata, and other strings are what the format allows."""
    shardstore.save({"model": {"w": torch.arange(4.0)}}, tmp_path / "c")
    (path,) = shards_of(tmp_path / "c")
    head, data = parts_of((tmp_path / "c" / path).read_bytes())
    del head["__metadata__"]
    made = shard(head if metadata == "absent" else {**head, "__metadata__": metadata}, data)
    replace_file(tmp_path / "c", path, made, start=len(made) - len(data))
    assert shardstore.verify(tmp_path / "c").ok
    assert header.parse(made[8 : -len(data)], path, len(made))[0].keys() == {"w"}


# ------------------------------------------------------------------------------------------------ K08: wrappers


class Outer(nn.Module):
    """A wrapper like torch.compile's: its child is `_orig_mod`."""

    def __init__(self, inner: nn.Module, name: str = "_orig_mod") -> None:
        super().__init__()
        self.add_module(name, inner)


def compiled(inner: nn.Module) -> nn.Module:
    """As torch.compile wraps it: `_orig_mod`."""
    return torch.compile(inner)


def parallel(inner: nn.Module) -> nn.Module:
    """As data parallelism wraps it: `module`."""
    return nn.DataParallel(inner)


def sharded(inner: nn.Module) -> nn.Module:
    """As FSDP wraps it."""
    return Outer(inner, "_fsdp_wrapped_module")


def checkpointed(inner: nn.Module) -> nn.Module:
    """As activation checkpointing wraps it."""
    return Outer(inner, "_checkpoint_wrapped_module")


def net(wrap=lambda inner: inner) -> nn.Module:
    """A net with a wrapped part inside."""
    return nn.Sequential(
        OrderedDict(first=nn.Linear(3, 4), body=wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
    )


WRAPPINGS = {
    "bare": net,
    "compiled": lambda: compiled(net()),
    "parallel": lambda: parallel(net()),
    "parallel compiled": lambda: parallel(compiled(net())),
    "compiled parallel": lambda: compiled(parallel(net())),
    "three deep": lambda: compiled(parallel(compiled(net()))),
    "sharded checkpointed": lambda: sharded(checkpointed(net())),
    "inside": lambda: net(compiled),
    "inside and outside": lambda: parallel(net(lambda inner: checkpointed(compiled(inner)))),
}


_NAMES = list(WRAPPINGS)
PAIRS = dict.fromkeys([*(("bare", name) for name in _NAMES), *zip(_NAMES, [*_NAMES[4:], *_NAMES[:4]], strict=True)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what torch itself deprecates
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_K08_wrappers_around_modules_make_no_difference(tmp_path: Path, source: str, target: str):
    """Saved out of any nesting of wrappers, loaded into any other: every weight and buffer, and nothing left over."""
    one, two = WRAPPINGS[source](), WRAPPINGS[target]()
    shardstore.save({"model": one}, tmp_path / "c")
    names = set(net().state_dict())
    assert set(index_of(tmp_path / "c")["tensors"]["path"]) == {f"model/{name}" for name in names}
    shardstore.load(tmp_path / "c", into={"model": two})
    assert_same(list(two.state_dict().values()), list(one.state_dict().values()))
    assert set(shardstore.load(tmp_path / "c")["model"]) == names


def test_K08_a_module_that_is_called_module_is_no_wrapper(tmp_path: Path):
    """A child that merely has the name `module` keeps it."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "w": nn.Linear(1, 1)})
    shardstore.save({"model": model}, tmp_path / "c")
    assert "module.weight" in shardstore.load(tmp_path / "c")["model"]


def test_K08_names_that_collide_without_wrappers_are_refused(tmp_path: Path):
    """Two weights that would have one name are refused at the save, with both names."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(UnsupportedState, match=r"_orig_mod\.weight.*weight"):
        shardstore.save({"model": Both()}, tmp_path / "c")
    assert no_files(tmp_path / "c")


def test_K08_a_plain_dict_keeps_its_prefixes_and_rename_takes_them_off(tmp_path: Path):
    """Plain keys are data and stay; loading them into a bare Module needs `rename`, and is strict about leftovers."""
    weights = {f"_orig_mod.module.{name}": value.clone() for name, value in net().state_dict().items()}
    shardstore.save({"model": weights}, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), {"model": weights})
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Mismatch) as caught:
        shardstore.load(tmp_path / "c", into={"model": model})
    assert set(caught.value.missing) == {f"model/{name}" for name in before}
    assert set(caught.value.unexpected) == {f"model/{name}" for name in weights}
    assert_same(dict(model.state_dict()), before)
    with pytest.raises(Mismatch):  # only one layer taken off
        shardstore.load(tmp_path / "c", into={"model": model}, rename=lambda path: path.replace("_orig_mod.", ""))
    shardstore.load(tmp_path / "c", into={"model": model}, rename=lambda path: path.replace("_orig_mod.module.", ""))
    assert_same(list(model.state_dict().values()), list(weights.values()))
    with pytest.raises(InvalidArgument, match="same path"):
        shardstore.load(tmp_path / "c", into={"model": model}, rename=lambda path: "model/x")


# ------------------------------------------------------------------------------------------------ K09, K14: differences


def test_K09_a_mismatch_lists_both_sides_and_touches_nothing(tmp_path: Path):
    """The checkpoint lacks `b` and has `z` besides: one error that lists both; no tensor has changed."""
    shardstore.save({"model": {"a": torch.ones(2), "z": torch.ones(3)}, "n": 5}, tmp_path / "c")
    into = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "n": 0}
    with pytest.raises(Mismatch) as caught:
        shardstore.load(tmp_path / "c", into=into)
    assert caught.value.missing == ("model/b",)
    assert caught.value.unexpected == ("model/z",)
    assert "model/b" in str(caught.value)
    assert "model/z" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KeyError)
    assert_same(into, {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "n": 0})


def test_K09_a_partial_load_is_on_request_only_and_reported(tmp_path: Path):
    """Each side is allowed by itself, by pattern or by `strict=False`, and what was allowed is told to the listener."""
    shardstore.save({"model": {"a": torch.ones(2), "z": torch.ones(3)}}, tmp_path / "c")

    def load(**options: Any) -> tuple[dict, str]:
        into, seen = {"model": {"a": torch.zeros(2), "b": torch.full((2,), 7.0)}}, []
        shardstore.load(tmp_path / "c", into=into, listener=seen.append, **options)
        return into, " ".join(event.what for event in seen if isinstance(event, Noticed))

    for options in ({"strict": False}, {"allow_missing": "model/b", "allow_unexpected": "model/*"}):
        into, told = load(**options)
        assert_same(into, {"model": {"a": torch.ones(2), "b": torch.full((2,), 7.0)}})
        assert "model/b" in told
        assert "model/z" in told
    for options in ({"allow_missing": "*/b"}, {"allow_unexpected": ["model/z"]}, {"allow_missing": "model/z"}):
        with pytest.raises(Mismatch):
            load(**options)


def test_K09_objects_report_their_differences_too(tmp_path: Path):
    """A Module that lacks a layer and one that has a layer more; an optimizer over a parameter fewer."""
    one = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    shardstore.save({"model": one, "optimizer": optimizer}, tmp_path / "c")
    fewer, more = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for model, attribute in ((fewer, "unexpected"), (more, "missing")):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(Mismatch) as caught:
            shardstore.load(tmp_path / "c", into={"model": model})
        assert len(getattr(caught.value, attribute)) == 2
        assert_same(dict(model.state_dict()), before)
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = torch.optim.SGD(list(two.parameters())[1:], lr=0.5)
    with pytest.raises(Mismatch, match=r"0\.weight"):
        shardstore.load(tmp_path / "c", into={"model": two, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "target",
    [
        torch.full((4,), 9.0), torch.full((16,), 9.0), torch.full((2, 4), 9.0), torch.full((8, 1), 9.0),
        torch.full((1, 8), 9.0), torch.full((), 9.0), torch.full((8,), 9.0, dtype=torch.float64),
        torch.full((8,), 9, dtype=torch.int32), torch.full((8,), 9.0, dtype=torch.bfloat16), torch.zeros(0),
    ],
    ids=lambda t: f"{list(t.shape)} {t.dtype}",
)  # fmt: skip
@pytest.mark.parametrize("kind", ["tensor", "parameter", "buffer"])
def test_K14_another_shape_or_dtype_is_refused_with_both(tmp_path: Path, target: torch.Tensor, kind: str):
    """Nothing is cut, spread or cast: an error with both shapes and dtypes, also with `strict=False`."""
    shardstore.save({"model": {"w": torch.arange(8.0), "ok": torch.ones(3)}}, tmp_path / "c")
    into: Any = {"w": target, "ok": torch.full((3,), 5.0)}
    if kind != "tensor":
        into = nn.Module()
        if kind == "parameter":
            into.w = nn.Parameter(target, requires_grad=False)
        else:
            into.register_buffer("w", target)
        into.register_buffer("ok", torch.full((3,), 5.0))
    before = target.clone()
    for options in ({}, {"strict": False}):
        with pytest.raises(Mismatch) as caught:
            shardstore.load(tmp_path / "c", into={"model": into}, **options)
        (text,) = caught.value.different
        assert "model/w" in text
        assert "(8,)" in text
        assert str(tuple(target.shape)) in text
        assert "float32" in text
        assert str(target.dtype).removeprefix("torch.") in text
        assert_same(target, before)
    state = into if kind == "tensor" else into.state_dict()
    assert state["ok"].tolist() == [5, 5, 5]


def test_K14_a_target_of_another_kind_is_refused(tmp_path: Path):
    """A tensor where plain data was saved, an object where a tensor was, a dict where a tensor was."""
    shardstore.save({"s": {"w": torch.ones(2), "n": 3, "d": {"x": torch.ones(1)}}}, tmp_path / "c")
    for wrong in (
        {"w": torch.zeros(2), "n": torch.zeros(1), "d": {"x": torch.zeros(1)}},
        {"w": nn.Linear(1, 1), "n": 0, "d": {"x": torch.zeros(1)}},
        {"w": {"y": torch.zeros(2)}, "n": 0, "d": {"x": torch.zeros(1)}},
        {"w": torch.zeros(2), "n": 0, "d": torch.zeros(1)},
    ):
        with pytest.raises(Mismatch) as caught:
            shardstore.load(tmp_path / "c", into={"s": wrong})
        assert "s/" in str(caught.value)
        assert all(not t.any() for t in wrong.values() if isinstance(t, torch.Tensor))


# ------------------------------------------------------------------------------------------------ K12, K13, K15: places

PLACES = [
    "run[1]*?", "run #2", "a b", "100%", "%2F", "~", "-rf", ".hidden", "Ωλ-日本", "a;b&c|d", "$HOME", "{a,b}", "a'b\"c",
    "step-1.0.5", "run.json", "x" * 200, "new\nline", "!", "file:", "s3:x", "a=b", "con", "tab\there",
]  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_K12_places_are_taken_as_they_are(tmp_path: Path, cli, name: str, monkeypatch: pytest.MonkeyPatch):
    """No character in the name of a folder means anything: save, load, open, verify, overwrite, ls, show and prune."""
    place = tmp_path / name
    other = tmp_path / "run1ab"
    shardstore.save({"w": torch.zeros(1)}, other)
    untouched = files_of(other)
    for url in (place, str(place), f"file://{place}"):
        state = {"w": torch.tensor([float(len(str(url)))]), "n": [1]}
        shardstore.save(state, url, step=1, overwrite=True)
        assert_same(shardstore.load(url), state)
        with shardstore.open(url) as ckpt:
            assert ckpt["w/"][:].item() == len(str(url))
        assert shardstore.verify(url).ok
    assert (place / "shardstore.json").is_file()
    with pytest.raises(shardstore.CheckpointExists):
        shardstore.save(state, place)
    for words in (["verify"], ["show"], ["ls"], ["prune", "--leftovers"]):
        assert cli(*words, place).exit_code == 0, words
    monkeypatch.chdir(tmp_path)
    if ":" not in name:
        assert_same(shardstore.load(f"./{name}"), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "run1ab"])
    assert files_of(other) == untouched


def test_K13_very_long_names(tmp_path: Path):
    """A name of 100,000 characters, one of 100,000 parts, and both as Module names, go round."""
    long, deep = "k" * 100_000, ".".join(["a"] * 50_000)
    state = {"model": {long: torch.ones(2), deep: torch.zeros(2)}, long: {deep: torch.ones(1), "n": 1}, "d": {long: 2}}
    shardstore.save(state, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), state)
    assert_same(shardstore.load(tmp_path / "c", only=f"model/{deep}"), {"model": {deep: torch.zeros(2)}})
    assert shardstore.verify(tmp_path / "c").ok
    for path in shards_of(tmp_path / "c"):
        assert safetensors.torch.load_file(tmp_path / "c" / path)
    into = {"model": {long: torch.zeros(2), deep: torch.ones(2)}}
    shardstore.load(tmp_path / "c", into=into)
    assert_same(into, {"model": state["model"]})
    del into["model"][deep]
    with pytest.raises(Mismatch) as caught:
        shardstore.load(tmp_path / "c", into=into)
    assert len(str(caught.value)) < 10_000


def test_K13_a_header_over_the_limit_of_the_format(tmp_path: Path):
    """Names that take more than a header may hold are spread over more shards, or refused before a byte is written."""
    one = "n" * 99_999_990
    with pytest.raises((InvalidArgument, UnsupportedState)):
        shardstore.save({"model": {one: torch.ones(1)}}, tmp_path / "c")
    assert no_files(tmp_path / "c")
    many = {f"{number}" + "n" * 12_000_000: torch.ones(1) for number in range(8)}
    shardstore.save({"model": many}, "memory://k13/c", shards=1)
    with shardstore.open("memory://k13/c") as ckpt:
        assert len(ckpt) == 8
    loaded = shardstore.load("memory://k13/c")
    assert loaded["model"].keys() == many.keys()


@pytest.mark.parametrize("levels", [50, 150])
@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "ordered", "mixed"])
def test_K13_deep_nests_go_round(tmp_path: Path, kind: str, levels: int):
    """Many levels of containers, with a tensor and a number at the bottom."""
    state = nested(kind, levels)
    shardstore.save(state, tmp_path / "c")
    assert_same(shardstore.load(tmp_path / "c"), state)


@pytest.mark.parametrize("levels", [250, 3_000, 100_000])
@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "ordered", "mixed"])
def test_K13_too_deep_nests_are_refused_before_writing(tmp_path: Path, kind: str, levels: int):
    """Never a RecursionError: a typed refusal with the place, and nothing on disk."""
    state = nested(kind, levels)
    with pytest.raises(UnsupportedState, match="deep") as caught:
        shardstore.save(state, tmp_path / "c")
    assert len(str(caught.value)) < 2_000
    assert no_files(tmp_path / "c")


def nested(kind: str, levels: int) -> dict[str, Any]:
    """A state that is nested so deep."""
    value: Any = [torch.ones(1), 7]
    makers: dict[str, Any] = {
        "dict": lambda v: {"k": v}, "list": lambda v: [v], "tuple": lambda v: (v,),
        "ordered": lambda v: OrderedDict([("k", v), (1, 2)]),
    }  # fmt: skip
    for level in range(levels):
        made = makers.get(kind) or list(makers.values())[level % 4]
        value = made(value)
    return {"s": value}


@pytest.mark.parametrize("levels", [100, 190])
def test_K13_depth_does_not_depend_on_the_stack_that_is_left(tmp_path: Path, levels: int):
    """Called from deep inside other code, a nest is saved and loaded, or refused by a typed error."""
    state = nested("dict", levels)

    def below(depth: int) -> bool:
        if depth:
            return below(depth - 1)
        try:
            shardstore.save(state, tmp_path / "c")
            assert_same(shardstore.load(tmp_path / "c"), state)
        except UnsupportedState:
            return no_files(tmp_path / "c")
        return True

    assert below(0)
    shardstore.save({"w": torch.ones(1)}, tmp_path / "other")
    for depth in (300, 500, 700):
        folder = tmp_path / "c"
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if folder.exists():
            folder.rmdir()
        assert below(depth)


def test_K15_dots_in_places_are_not_cut(tmp_path: Path, cli):
    """Runs whose folders differ after a dot stay apart, and step folders may have dots."""
    places = ["runs/v1.2/exp", "runs/v1.3/exp", "runs/v1/exp", "runs/v1.2/step-1.5.safetensors", "runs/v1.2/step-1.5"]
    for number, name in enumerate(places):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shardstore.save({"w": torch.tensor([number])}, tmp_path / name, step=number)
    for number, name in enumerate(places):
        assert shardstore.load(tmp_path / name)["w"].item() == number
    report = shardstore.verify(tmp_path / "runs")
    assert len(report.checkpoints) == len(places)
    assert report.ok
    shown = cli("ls", tmp_path / "runs", "--json").output
    assert len(json.loads(shown)["checkpoints"]) == len(places)


def test_names_of_many_letters_are_all_tried():
    """The lists above have every punctuation character that means something to a shell or a file system."""
    assert set("/\\.%~*?[]#\0\n\"'$&;|{}!= ") <= set("".join(NASTY + PLACES))
