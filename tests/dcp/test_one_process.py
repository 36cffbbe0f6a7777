"""The writer and reader for torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import shardstore
from shardstore import header
from shardstore.dcp import Reader, Writer
from shardstore.errors import (
    CheckpointExists,
    CheckpointNotFound,
    Damaged,
    InvalidArgument,
    Mismatch,
    StoreError,
    UnsupportedState,
)
from tests.dcp.planners import Halves, Hole, Liar
from tests.kit.damage import files_of, flip, meta_of, shards_of
from tests.kit.same import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


def failure(call: Callable[[], Any]) -> BaseException:
    """The error that DCP's exception holds."""
    with pytest.raises(CheckpointException) as raised:
        call()
    return raised.value.failures[0][0]


def save(state: Any, url: Path, planner: Any = None, **options: Any) -> None:
    """Save through our writer."""
    dcp.save(state, storage_writer=Writer(str(url), **options), planner=planner)


def load(state: Any, url: Path, planner: Any = None, **options: Any) -> None:
    """Load through our reader."""
    dcp.load(state, storage_reader=Reader(str(url), **options), planner=planner)


def values() -> dict[str, Any]:
    """Plain values of many kinds, and tensors where DCP doesn't look for them."""
    return {
        "none": None, "true": True, "big": 2**70, "nan": float("inf"), "text": "é", "raw": b"\0x", "c": 1j,
        "list": [1, [2, "x"]], "pair": (1, (2.0, "x")), "empty": [], "dtype": torch.bfloat16, "path": Path("a/b"),
        "python": random.getstate(), "numpy": np.random.RandomState(1).get_state(), "scalar": np.float32(0.1),
        "nested": {"deep": {"$odd": 1, "a.b": {3}}}, "groups": [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2}],
        "tensors": (torch.ones(2), {"x": torch.arange(3)}), "mixed": [torch.zeros(3), "x", 5],
    }  # fmt: skip


def blanked(value: Any) -> Any:
    """The same structure with other values."""
    if isinstance(value, dict):
        return {key: blanked(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [blanked(item) for item in value]
    return torch.full_like(value, 7) if isinstance(value, torch.Tensor) else "blank"


def test_values_come_back_exactly_both_ways(tmp_path: Path):
    """Plain values, and tensors inside of them, are what they were: by `shardstore.load`, and by `dcp.load`."""
    save(values(), tmp_path / "c")
    assert_same(shardstore.load(str(tmp_path / "c")), values())
    state = blanked(values())
    load(state, tmp_path / "c")
    assert_same(state, values())
    shardstore.save(values(), str(tmp_path / "d"))
    state = blanked(values())
    load(state, tmp_path / "d")
    assert_same(state, values())


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A save calls neither torch.save nor pickle, and each file is JSON or safetensors, from first byte to last."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle")

    with monkeypatch.context() as patched:
        for where, name in ((torch, "save"), (pickle, "dump"), (pickle, "dumps"), (pickle, "Pickler")):
            patched.setattr(where, name, forbidden)
        save({"model": nn.Linear(3, 2).state_dict(), **values()}, tmp_path / "c")
    files = files_of(tmp_path / "c")
    assert len(files) >= 4
    for name, data in files.items():
        if name.endswith(".json"):
            json.loads(data)
        else:
            size = header.length(data[:8], name, len(data))
            header.parse(data[8 : 8 + size], name, len(data))


def test_a_flat_state_is_a_model(tmp_path: Path):
    """What DCP saves of a bare state_dict loads into the Module, and the other way round."""
    torch.manual_seed(1)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save(model.state_dict(), tmp_path / "c")
    shardstore.load(str(tmp_path / "c"), into=other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    shardstore.save(model, str(tmp_path / "d"))
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    load(state, tmp_path / "d")
    assert_same(state, dict(model.state_dict()))


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer with two groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1 * (seed + 1)}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(seed + 1):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_optimizers_in_both_of_DCPs_forms(tmp_path: Path, flattened: bool, ours: bool):
    """Groups by place or by parameter (`flatten_optimizer_state_dict`) load what `dcp.save` or we ourselves wrote."""
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    model, optimizer = trained(1)
    if ours:
        shardstore.save({"model": model, "optimizer": optimizer}, str(tmp_path / "c"))
    else:
        weights, moments = get_state_dict(model, optimizer, options=options)
        save({"model": weights, "optimizer": moments}, tmp_path / "c")
    new, resumed = trained(0)
    weights, moments = get_state_dict(new, resumed, options=options)
    state = {"model": weights, "optimizer": moments}
    load(state, tmp_path / "c")
    set_state_dict(new, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    assert_same(dict(new.state_dict()), dict(model.state_dict()))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_ties_are_kept(tmp_path: Path):
    """Tied weights are written once, and load into a tied Module."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.outer.weight = self.inner.weight

    model, other = Tied(), Tied()
    save({"model": model.state_dict()}, tmp_path / "c")
    assert sum(map(len, files_of(tmp_path / "c").values())) < 2 * 64 * 64 * 4
    shardstore.load(str(tmp_path / "c"), into={"model": other})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    state = {"model": {name: torch.zeros(64, 64) for name in model.state_dict()}}
    load(state, tmp_path / "c")
    assert_same(state["model"], dict(model.state_dict()))


def test_several_parts_on_one_rank_and_bytes_of_a_planner(tmp_path: Path):
    """A planner that cuts tensors and makes bytes of values itself: parts lie in files of their own."""
    state = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(4), "n": (1, "x")}
    save(state, tmp_path / "c", Halves())
    assert len(shards_of(tmp_path / "c")) == 2
    assert shardstore.verify(str(tmp_path / "c")).ok
    assert_same(shardstore.load(str(tmp_path / "c")), state)
    target = {"a": torch.zeros(4, 3), "b": torch.zeros(4, dtype=torch.int64), "n": None}
    load(target, tmp_path / "c")
    assert_same(target, state)


def test_a_bit_flip_that_DCP_loads_silently_is_an_error_here(tmp_path: Path):
    """The same flipped bit: torch's own format gives a wrong weight and no word, ours names the file and the tensor."""
    state = {"model": {"w": torch.arange(1000.0)}, "step": 1}
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    dcp.save(state, checkpoint_id=theirs)
    save(state, ours)
    needle = state["model"]["w"].numpy().tobytes()
    (file,) = theirs.glob("*.distcp")
    shard = next(name for name in shards_of(ours) if needle in (ours / name).read_bytes())
    for path in (file, ours / shard):
        flip(path, path.read_bytes().index(needle) + 4 * 500 + 3)
    loaded = {"model": {"w": torch.zeros(1000)}, "step": 0}
    dcp.load(loaded, checkpoint_id=theirs)
    assert (loaded["model"]["w"] != state["model"]["w"]).sum() == 1
    target = {"model": {"w": torch.zeros(1000)}, "step": 0}
    error = failure(lambda: load(target, ours))
    assert isinstance(error, Damaged)
    assert error.file == shard
    assert "model/w" in str(error)
    assert target["step"] == 0


def test_damage_to_index_and_structure_is_told_as_such(tmp_path: Path):
    """DCP swallows what fails while the metadata is read; ours comes out with its class and the name of the file."""
    save({"w": torch.ones(2), "n": 1}, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    flip(tmp_path / "a" / "shardstore.json", 100)
    error = failure(lambda: load({"n": 0}, tmp_path / "a"))
    assert isinstance(error, Damaged)
    assert error.file == "shardstore.json"
    flip(tmp_path / "b" / meta_of(tmp_path / "b"), 100)
    error = failure(lambda: load({"n": 0}, tmp_path / "b"))
    assert isinstance(error, Damaged)
    assert error.file == meta_of(tmp_path / "b")
    assert isinstance(failure(lambda: load({"n": 0}, tmp_path / "none")), CheckpointNotFound)


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path: Path):
    """A second save to the same place is refused and harms nothing; with overwrite=True the new one is there."""
    save({"n": 1}, tmp_path / "c")
    before = files_of(tmp_path / "c")
    assert isinstance(failure(lambda: save({"n": 2}, tmp_path / "c")), CheckpointExists)
    assert files_of(tmp_path / "c") == before
    save({"n": 3}, tmp_path / "c", overwrite=True, step=5, hash="sha256")
    assert shardstore.load(str(tmp_path / "c")) == {"n": 3}
    assert shardstore.open(str(tmp_path / "c")).step == 5
    assert shardstore.verify(str(tmp_path / "c")).ok


@pytest.mark.parametrize(
    ("state", "path", "remedy"),
    [
        ({"a": {"f": print}}, "a/f", "build it anew"), ({"m": nn.Linear(1, 1), "n": object()}, "n/", "plain values"),
        ({"a": {"m": nn.Linear(1, 1)}}, "a/m", "state_dict()"),
        ({"r": shardstore.tree.PerRank(1)}, "r/", "a key of its own"),
        ({"s": torch.ones(2).to_sparse()}, "s", ""), ({"q": torch.ones(2, device="meta")}, "q", "materialise"),
    ],
)  # fmt: skip
def test_what_cant_be_stored_is_refused_before_anything_is_written(tmp_path: Path, state: Any, path: str, remedy: str):
    """The error has the path and a remedy, and the place is as empty as before."""
    error = failure(lambda: save(state, tmp_path / "c"))
    assert isinstance(error, UnsupportedState)
    assert path in str(error)
    assert remedy in str(error)
    assert files_of(tmp_path / "c") == {}


def test_another_dtype_is_refused_not_cast(tmp_path: Path):
    """All differences at once, before a tensor is touched; DCP would have cast."""
    save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "c")
    state = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.int32), "c": torch.zeros(2)}
    error = failure(lambda: load(state, tmp_path / "c"))
    assert isinstance(error, Mismatch)
    assert len(error.different) == 2
    assert not state["c"].any()


def test_a_destination_with_a_hole_is_refused(tmp_path: Path):
    """A plan that leaves a tensor out would leave old values in it."""
    save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "c")
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    error = failure(lambda: load(state, tmp_path / "c", Hole()))
    assert isinstance(error, Mismatch)
    assert "b: 0 of its 2 elements" in str(error)
    assert not state["a"].any()


def test_a_planner_that_gives_something_else_is_refused(tmp_path: Path):
    """What is written has the shape that was planned; else rows would be filed under a wrong place."""
    error = failure(lambda: save({"a": torch.ones(3)}, tmp_path / "c", Liar()))
    assert isinstance(error, UnsupportedState)
    assert "in doubt" in str(error)
    assert files_of(tmp_path / "c") == {}


def test_a_file_that_vanishes_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No index is written, the rest is removed, and the place can be saved to again."""
    commit = Writer.finish

    def finish(self: Writer, metadata: Any, results: Any) -> None:
        for shard in (tmp_path / "c").rglob("*.safetensors"):
            shard.unlink()
        commit(self, metadata, results)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "finish", finish)
        error = failure(lambda: save({"a": torch.ones(3)}, tmp_path / "c"))
    assert isinstance(error, StoreError)
    assert ".safetensors" in str(error)
    assert files_of(tmp_path / "c") == {}
    save({"a": torch.ones(3)}, tmp_path / "c")
    assert shardstore.verify(str(tmp_path / "c")).ok


@pytest.mark.parametrize("more", [{}, {"step": 1}])
def test_planners_that_cache_their_plans(tmp_path: Path, more: dict[str, Any]):
    """A plan is cached with where its save went; the next goes to its own place all the same, with its own values."""
    for at in range(4):
        planner = type("Caching", (DefaultSavePlanner,), {})(enable_plan_caching=True)
        planner._cached_plans_key = f"test {len(more)}"
        state = {"a": torch.full((3,), float(at)), **dict.fromkeys(more, at)}
        if at == 3:
            state["b"] = torch.ones(2)
        save(state, tmp_path / f"c{at}", planner)
        assert_same(shardstore.load(str(tmp_path / f"c{at}")), state)
        assert shardstore.verify(str(tmp_path / f"c{at}")).ok
        assert not list((tmp_path / f"c{at}").glob("attempt-*"))
    assert len({shardstore.open(str(tmp_path / f"c{at}")).attempt for at in range(4)}) == 4


def test_an_index_for_each_rank_is_refused(tmp_path: Path):
    """`use_collectives=False` would make as many checkpoints as ranks."""
    with pytest.raises(InvalidArgument, match="use_collectives"):
        dcp.save({"a": 1}, storage_writer=Writer(str(tmp_path / "e")), use_collectives=False)
    assert not (tmp_path / "e").exists()


def test_one_writer_for_many_places(tmp_path: Path):
    """`checkpoint_id` is the place, and a writer that has failed can be used again; at rest it can be pickled."""
    writer, reader = Writer(str(tmp_path / "none")), Reader(str(tmp_path / "none"))
    for at in range(2):
        dcp.save({"n": at}, storage_writer=writer, checkpoint_id=tmp_path / f"c{at}")
    failure(lambda: dcp.save({"n": 2}, storage_writer=writer, checkpoint_id=tmp_path / "c1"))
    dcp.save({"n": 3}, storage_writer=pickle.loads(pickle.dumps(writer)), checkpoint_id=tmp_path / "c3")
    for at in (0, 1, 3):
        state = {"n": None}
        dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)), checkpoint_id=tmp_path / f"c{at}")
        assert state == {"n": at}


def test_parts_of_a_state_and_what_has_no_name(tmp_path: Path):
    """A state that asks for less gets that; values per rank have no name in DCP, and keys equal as text neither."""
    state = {"a": torch.ones(2), "r": shardstore.tree.PerRank(1), "k": {1: "x", "1": "y", 2: "z"}, "o": None}
    shardstore.save(state, str(tmp_path / "c"))
    target: dict[str, Any] = {"a": torch.zeros(2), "k": {"2": None}}
    load(target, tmp_path / "c")
    assert_same(target, {"a": torch.ones(2), "k": {"2": "z"}})
    for name in ("r", "k.1"):
        target = {"r": 0} if name == "r" else {"k": {"1": 0}}
        assert f"Missing key in checkpoint state_dict: {name}" in str(failure(lambda t=target: load(t, tmp_path / "c")))
    target = {"a": torch.zeros(2), "more": torch.zeros(2)}
    load(target, tmp_path / "c", DefaultLoadPlanner(allow_partial_load=True))
    assert_same(target, {"a": torch.ones(2), "more": torch.zeros(2)})


def test_odd_tensors(tmp_path: Path):
    """Empty and 0-d tensors, strided targets, dtypes that other tools lack, parameters."""
    state = {
        "model": {"none": torch.ones(0, 3), "zero": torch.tensor(5), "f8": torch.ones(3).to(torch.float8_e5m2)},
        "t": torch.arange(6.0).view(2, 3).T, "p": nn.Parameter(torch.ones(2)), "c": torch.ones(2) * 1j,
    }  # fmt: skip
    save(state, tmp_path / "c")
    loaded = shardstore.load(str(tmp_path / "c"))
    assert torch.equal(loaded["t"], state["t"])
    target = {
        "model": {key: torch.zeros_like(value) for key, value in state["model"].items()}, "t": torch.zeros(2, 3).T,
        "p": nn.Parameter(torch.zeros(2)), "c": torch.zeros(2, dtype=torch.complex64),
    }  # fmt: skip
    load(target, tmp_path / "c")
    assert_same(target["model"], state["model"])
    assert torch.equal(target["t"], state["t"])
    assert torch.equal(target["p"], state["p"])
    assert torch.equal(target["c"], state["c"])


def test_to_a_store_of_objects_and_striped(tmp_path: Path):
    """Any place that `shardstore.save` takes: several roots, in any order."""
    state = {"a": torch.ones(2), "n": 1}
    roots = [str(tmp_path / name) for name in ("x", "y")]
    dcp.save(state, storage_writer=Writer(roots))
    target = {"a": torch.zeros(2), "n": 0}
    dcp.load(target, storage_reader=Reader(roots[::-1]))
    assert_same(target, state)
