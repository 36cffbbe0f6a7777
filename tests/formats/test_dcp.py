"""Folders of torch.distributed.checkpoint: read without running anything, put together, and written by torch itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import subprocess
import sys
import tracemalloc
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.filesystem import SerializationFormat

import shardstore
from shardstore import formats, memory
from shardstore.errors import CheckpointExists, Damaged, ShardstoreError, Unfinished, UnsupportedState
from shardstore.formats import FORMATS, Options, pickled
from tests.formats import dcp_ranks
from tests.formats.weights import everything, loaded, marker, mutations
from tests.kit.same import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


def training() -> dict[str, Any]:
    """A model, its AdamW, and plain values, as people save them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict()["param_groups"],
        "plain": {
            "f": 1.5,
            "n": None,
            "s": "text",
            "b": b"\0x",
            "t": (1, (2.0, "x")),
            "l": [1, 2],
            "none": [],
            "c": 1j,
        },
        "mixed": [torch.ones(2), {"a": 1, "b": [torch.zeros(1, dtype=torch.int8)]}, "x"],
        "pair": (torch.ones(2), 5),
        "step": 2**70,
    }


def write(state: Any, folder: Path) -> Path:
    """Write a state by our writer."""
    FORMATS["dcp"].write(state, str(folder), Options())
    return folder


def theirs_save(state: Any, folder: Path) -> Path:
    """Write a state by torch alone."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def read(folder: Path) -> Any:
    """What is read, in memory."""
    with formats.read(str(folder)) as found:
        assert found.format == "dcp"
        return loaded(found.state)


def ordered(value: Any) -> Any:
    """With the keys of dicts in order, which DCP does not keep."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return type(value)(map(ordered, value)) if type(value) in (list, tuple) else value


# ------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("save", [write, theirs_save], ids=["ours", "torch's"])
def test_a_training_comes_back(shm_path: Path, save: Callable[[Any, Path], Path]):
    """Tensors, nested dicts and lists, tuples and plain values, written by torch and by us through torch."""
    assert_same(ordered(read(save(training(), shm_path / "d"))), ordered(training()))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(shm_path: Path):
    """Bits, dtypes, shapes, odd names, views: through torch's files."""
    state = {name: tensor for name, tensor in everything().items() if tensor.dtype != torch.float4_e2m1fn_x2}
    found = read(write({"model": state}, shm_path / "d"))["model"]
    assert_same(ordered(found), ordered({name: tensor.contiguous() for name, tensor in state.items()}))


def test_torch_loads_what_is_written(shm_path: Path):
    """`dcp.load` fills tensors from our folder, which holds nothing but its own files, flushed and under one name."""
    state = training()
    write(state, shm_path / "d")
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    dcp.load(target, checkpoint_id=shm_path / "d", no_dist=True)
    assert_same(target["model"], state["model"])
    assert sorted(os.listdir(shm_path / "d")) == [".metadata", "__0_0_0.distcp"]
    assert os.listdir(shm_path) == ["d"]


def test_to_a_store_and_back(shm_path: Path):
    """A store of plain data goes to DCP and back without a difference; so does one of a model and its optimizer."""
    shardstore.save(training(), shm_path / "a")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    shardstore.save({"model": model, "optimizer": optimizer}, shm_path / "b")
    for name in ("a", "b"):
        formats.convert(shm_path / name, shm_path / f"{name}-dcp", to_format="dcp")
        formats.convert(shm_path / f"{name}-dcp", shm_path / f"{name}-back")
        compared = formats.diff(shm_path / name, shm_path / f"{name}-back")
        assert compared.same, compared
    fresh = nn.Linear(3, 2)
    shardstore.load(shm_path / "b-back", into={"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))


@pytest.mark.ranks
@pytest.mark.slow
def test_parts_of_many_ranks_are_put_together(shm_path: Path):
    """Tensors cut along rows and columns by two ranks, unevenly, and replicated ones, read by one process."""
    script = [sys.executable, dcp_ranks.__file__]
    env = {**os.environ, "PYTHONPATH": str(Path(shardstore.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*script, str(rank), "2", str(shm_path / "meeting"), str(shm_path / "d")], env=env)
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    with formats.read(str(shm_path / "d")) as found:
        assert_same(ordered(loaded(found.state)), ordered({"model": dcp_ranks.whole(), "step": 3}))
        shardstore.save(found.state, shm_path / "c")
    assert_same(ordered(shardstore.load(shm_path / "c")["model"]), ordered(dcp_ranks.whole()))


def test_few_tensors_at_a_time(shm_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Torch keeps the tensors of a file until it is closed; so files are small, and few tensors are in memory."""
    from shardstore.formats import dcp_write

    monkeypatch.setattr(dcp_write, "BATCH", 2000)
    monkeypatch.setattr("shardstore.formats.store._SMALL", 0)
    state = {f"w{n:02}": torch.full((250,), float(n)) for n in range(10)}
    shardstore.save({"model": state}, shm_path / "c")
    live: list[Any] = []
    most = []

    def watched(tensor: Any) -> torch.Tensor:
        made = torch.empty(tensor.spec.shape).untyped_storage()
        live.append(weakref.ref(made))
        most.append(sum(one() is not None for one in live))
        return torch.empty(0).set_(made, 0, tensor.spec.shape).copy_(memory.load(tensor))

    monkeypatch.setattr(dcp_write, "load", watched)
    with formats.read(str(shm_path / "c")) as found:
        write(found.state, shm_path / "d")
    assert len(most) == 10
    assert max(most) <= 4  # two of this file, and of the last one, whose names torch still holds
    assert len(list((shm_path / "d").glob("*.distcp"))) == 5
    assert_same(read(shm_path / "d")["model"], state)


# ------------------------------------------------------------------------------------------------ refused on writing


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {1: 2}}, "a"), ({"a": {"b": {}}}, "a.b"), ({"a": {1, 2}}, "a"), ({"a": Path("x")}, "a"),
        ({"a": (1, {3})}, "a"), ({"a": torch.eye(2).to_sparse()}, "a"), ({"a": {"b": 1}, "a.b": 2}, "the state"),
    ],
)  # fmt: skip
def test_what_dcp_cannot_hold_is_refused(shm_path: Path, state: Any, path: str):
    """Keys that would become text, empty dicts, types that need code, names that fall together: nothing is written."""
    with pytest.raises(UnsupportedState) as caught:
        write(state, shm_path / "d")
    assert caught.value.path == path
    assert os.listdir(shm_path) == []


def test_nothing_is_overwritten(shm_path: Path):
    """A place where something is, be it empty, is refused."""
    (shm_path / "d").mkdir()
    with pytest.raises(CheckpointExists):
        write({"a": 1}, shm_path / "d")


# ------------------------------------------------------------------------------------------------ hostile input


def replaced(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Change the metadata of a folder, as torch's own objects."""
    with (folder / ".metadata").open("rb") as file:
        found = pickle.load(file)
    (folder / ".metadata").write_bytes(pickle.dumps(change(found) or found))
    return folder


def test_Z03_metadata_that_would_run_code_is_refused_by_name(shm_path: Path):
    """Z03: a pickle with a marker in place of, or within, the metadata: refused, and the marker is not there."""
    ran, evil = marker(shm_path)
    folder = write({"w": torch.ones(2)}, shm_path / "d")
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(UnsupportedState, match=r"names 'builtins\.exec'.*nothing was run"):
        read(folder)
    (folder / ".metadata").write_bytes(whole)
    replaced(folder, lambda found: setattr(found, "planner_data", evil))
    with pytest.raises(UnsupportedState, match=r"builtins\.exec"):
        read(folder)
    assert not ran.exists()
    pickle.loads(pickle.dumps(evil))
    assert ran.exists()  # it would have worked


@pytest.mark.parametrize("name", ["os system", "torch load", "torch.distributed.checkpoint.metadata.os system",
                                  "torch.distributed.checkpoint.metadata dataclass", "builtins getattr"])  # fmt: skip
def test_Z03_only_names_on_the_list(shm_path: Path, name: str):
    """Z03: names near those that are allowed are refused, too."""
    folder = write({"w": torch.ones(2)}, shm_path / "d")
    (folder / ".metadata").write_bytes(b"c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(UnsupportedState, match="nothing was run"):
        read(folder)


def test_Z03_items_that_would_run_code_are_refused_by_name(shm_path: Path):
    """Z03: an item with a marker is refused with its name; the marker is not there; with torch's own loader it is."""
    ran, evil = marker(shm_path)
    folder = theirs_save({"model": {"w": torch.ones(2)}, "rng": {"state": evil}}, shm_path / "d")
    with pytest.raises(UnsupportedState, match=r"'rng\.state' holds more than tensors") as caught:
        read(folder)
    assert caught.value.path == "rng.state"
    assert not ran.exists()


def test_a_save_that_did_not_finish(shm_path: Path):
    """Without `.metadata`, which comes last, it is unfinished."""
    folder = write({"w": torch.ones(2)}, shm_path / "d")
    (folder / ".metadata").unlink()
    with pytest.raises(Unfinished, match="did not finish"):
        read(folder)


def test_other_forms_of_dcp_are_refused_by_name(shm_path: Path):
    """Items in safetensors, and metadata of each rank alone, are not taken for damage."""
    form = {"serialization_format": SerializationFormat.SAFETENSORS}
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(shm_path / "a", **form), no_dist=True)
    with pytest.raises(UnsupportedState, match="SAFETENSORS"):
        read(shm_path / "a")
    write({"w": torch.ones(2)}, shm_path / "b")
    (shm_path / "b" / ".metadata").rename(shm_path / "b" / "__0.metadata")
    with pytest.raises(UnsupportedState, match="use_collectives"):
        read(shm_path / "b")


def _tensor(found: Any) -> Any:
    return found.state_dict_metadata["w"]


def _place(found: Any) -> Any:
    return next(iter(found.storage_data.values()))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hole": lambda m: _tensor(m).chunks.clear(),
    "overlap": lambda m: _tensor(m).chunks.append(_tensor(m).chunks[0]),
    "huge": lambda m: setattr(_tensor(m), "size", torch.Size([2**40])),
    "huge chunk": lambda m: (
        setattr(_tensor(m), "size", torch.Size([2**40])),
        setattr(_tensor(m), "chunks", [theirs.ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]),
    )[2:],
    "no place": lambda m: m.storage_data.clear(),
    "leaves the folder": lambda m: setattr(_place(m), "relative_path", "../x"),
    "absolute": lambda m: setattr(_place(m), "relative_path", "/etc/hostname"),
    "past the end": lambda m: setattr(_place(m), "offset", 10**9),
    "negative": lambda m: setattr(_place(m), "offset", -1),
    "packed": lambda m: setattr(_place(m), "transform_descriptors", ["zstd"]),
    "a path of nothing": lambda m: m.planner_data.update(w=()),
    "a path of lists": lambda m: m.planner_data.update(w=(["w"],)),
    "a far place in a list": lambda m: m.planner_data.update(w=("l", 10**9)),
    "a deep path": lambda m: m.planner_data.update(w=("w",) * 5000),
    "two in one place": lambda m: m.planner_data.update(w=("n",)),
    "below a value": lambda m: m.planner_data.update(w=("n", "w")),
    "no dict": lambda m: setattr(m, "state_dict_metadata", []),
    "no metadata": lambda _: theirs.MetadataIndex("w"),
    "other dtype": lambda m: setattr(_tensor(m).properties, "dtype", torch.int32),
    "sparse": lambda m: setattr(_tensor(m).properties, "layout", torch.sparse_coo),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_Z01_Z06_metadata_that_lies(shm_path: Path, change: Callable[[Any], Any]):
    """Z01, Z06: shapes, places and paths that make no sense are refused, with no memory for what they claim."""
    folder = replaced(write({"n": 1, "w": torch.ones(6)}, shm_path / "d"), change)
    tracemalloc.start()
    try:
        with pytest.raises((Damaged, UnsupportedState)):
            read(folder)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_an_item_that_is_packed_or_cut(shm_path: Path):
    """A zip file whose members are deflated could grow without bound; one that is cut is damaged."""
    folder = write({"w": torch.zeros(1000)}, shm_path / "d")
    file = folder / "__0_0_0.distcp"
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(shm_path / "new", "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    packed = (shm_path / "new").read_bytes()
    file.write_bytes(packed)
    replaced(folder, lambda found: (setattr(_place(found), "length", len(packed)), setattr(
        _tensor(found), "size", torch.Size([1])), setattr(_tensor(found), "chunks", [
            theirs.ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]))[3:])  # fmt: skip
    with pytest.raises(Damaged, match="packed"):
        read(folder)
    file.write_bytes(whole[:-40])
    with pytest.raises(Damaged):
        read(folder)


def test_a_flipped_bit_in_an_item_is_found(shm_path: Path):
    """Torch loads it without a word; here the CRC that it wrote tells."""
    folder = write({"w": torch.zeros(1000)}, shm_path / "d")
    file = folder / "__0_0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    target = {"w": torch.zeros(1000)}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    assert (target["w"] != 0).any()
    with pytest.raises(Damaged, match="CRC"):
        read(folder)


def test_a_pickle_is_read_as_data_alone():
    """Opcodes that build by calling, extension codes, huge memo numbers and deep nesting: no code, no memory."""
    none: Callable[[pickled.Name], bool] = lambda name: False  # noqa: E731 - as an argument
    assert pickled.read(pickle.dumps({"a": [1, (2.5, None, True, b"x")]}), "x", none) == {
        "a": [1, (2.5, None, True, b"x")]
    }
    for bad in (b"\x80\x02(ios\nsystem\n.", b"\x80\x02\x82\x01.", b"\x80\x02Pid\n.", b"\x80\x02(i1\n1\n."):
        with pytest.raises(UnsupportedState, match="nothing was run"):
            pickled.read(bad, "x", none)
    tracemalloc.start()
    try:
        assert pickled.read(b"\x80\x02Nr\xff\xff\xff\xff.", "x", none) is None
        for bad in (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_998 + b".", b"\x80\x04\x8d" + b"\xff" * 8 + b".",
                    b"\x80\x02]]s.", b"\x80\x02}]Ns.", b"h\x05.", b".", b"", b"\x80", b"N", b"0."):  # fmt: skip
            with pytest.raises((Damaged, UnsupportedState)):
                pickled.read(bad, "x", none)
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_what_torch_writes_needs_13_names(shm_path: Path):
    """The names in a plain folder of torch, of which all are known, so that the list is no wider than it must be."""
    folder = theirs_save(training(), shm_path / "d")
    names = [(op.name, arg) for op, arg, _ in pickletools.genops((folder / ".metadata").read_bytes())]
    assert sum(name == "STACK_GLOBAL" for name, _ in names) <= 15
    read(folder)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_raise_typed_errors_only(shm_path: Path, data: st.DataObject):
    """Whatever becomes of the metadata or the items: it reads, or an error of ours says why not."""
    folder = shm_path / "d"
    if not folder.exists():
        write({"w": torch.ones(6), "l": [1, {"a": (2, "x")}]}, folder)
    target = folder / data.draw(st.sampled_from(sorted(os.listdir(folder))))
    whole = target.read_bytes()
    try:
        target.write_bytes(data.draw(mutations(whole)))
        with contextlib.suppress(ShardstoreError):
            read(folder)
    finally:
        target.write_bytes(whole)


def test_lists_whose_items_different_ranks_wrote(shm_path: Path):
    """DCP shares among ranks what all have, and then names the items in any order: their places count."""
    state = {"list": [torch.full((1,), float(at)) for at in range(3)]}
    dcp.save(state, checkpoint_id=shm_path / "d", no_dist=True)
    path = shm_path / "d" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries = metadata.state_dict_metadata
    metadata.state_dict_metadata = {name: entries[name] for name in ("list.2", "list.0", "list.1")}
    path.write_bytes(pickle.dumps(metadata))
    with formats.read(shm_path / "d") as found:
        assert_same(loaded(found.state), state)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_folder_that_is_saved_again_meanwhile(shm_path: Path):
    """DCP writes over its own files: what was opened before is refused, not read from two saves."""
    dcp.save({"a": torch.zeros(3), "b": 1}, checkpoint_id=shm_path / "d", no_dist=True)
    with formats.read(shm_path / "d") as found:
        dcp.save({"a": torch.ones(3), "b": 1}, checkpoint_id=shm_path / "d", no_dist=True)
        with pytest.raises(Damaged, match="written to meanwhile"):
            loaded(found.state)
    with formats.read(shm_path / "d") as found:
        assert_same(loaded(found.state), {"a": torch.ones(3), "b": 1})
