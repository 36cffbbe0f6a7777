"""`convert` and its command: between every two formats, verified, never over something else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import shardstore
from shardstore import PerRank, formats
from shardstore.cli import main
from shardstore.cli.convert import _FORMATS
from shardstore.errors import (
    CheckpointExists,
    CheckpointNotFound,
    Damaged,
    InvalidArgument,
    Mismatch,
    StoreError,
    UnsupportedState,
)
from shardstore.events import Event, Noticed, Progress, Started
from shardstore.formats import Layout, Options, files
from shardstore.training import Checkpointer
from tests.formats.trainings import state_of, tied, train
from tests.kit.damage import files_of, flip, shards_of
from tests.kit.same import assert_same, ties


@pytest.fixture
def call() -> Callable[..., Result]:
    """Call the command in this process."""
    return lambda *words: CliRunner().invoke(main, ["convert", *map(str, words)], prog_name="shardstore")


def weights() -> dict[str, Any]:
    """A state that each format for weights holds."""
    torch.manual_seed(5)
    return {"a.weight": torch.randn(3, 4), "b": torch.randn(2).bfloat16(), "n": torch.tensor([1, 2])}


def everything() -> dict[str, Any]:
    """What only a store holds, objects and all."""
    training = tied()
    train(training, 2)
    sparse = torch.eye(3).to_sparse()
    return state_of(training, odd={"sparse": sparse, "path": Path("x"), "p": torch.nn.Parameter(torch.ones(2))}, step=2)


def test_store_to_store_keeps_everything(shm_path: Path) -> None:
    """Between stores the state is stored again just as it is: objects, sparse tensors, Parameters, ties, the step."""
    shardstore.save(everything(), str(shm_path / "a"), step=2, shards=5)
    made = formats.convert(str(shm_path / "a"), "memory://" + str(shm_path / "b"))
    assert (made.source, made.target, made.step) == ("shardstore", "shardstore", 2)
    first, second = shardstore.load(str(shm_path / "a")), shardstore.load("memory://" + str(shm_path / "b"))
    assert_same(second, first)
    assert ties(second) == ties(first) != set()
    fresh = tied()
    shardstore.load("memory://" + str(shm_path / "b"), into=state_of(fresh))
    assert torch.equal(fresh[0].head.weight, first["model"]["head.weight"])


TARGETS = {"torch": "b.pt", "huggingface": "hf", "safetensors": "b.safetensors", "dcp": "dcp"}


@pytest.mark.parametrize("name", TARGETS)
def test_every_format_there_and_back(shm_path: Path, name: str) -> None:
    """Weights go to each format and come back equal; `diff` finds no difference either way."""
    shardstore.save(weights(), str(shm_path / "a"), step=3)
    there, back = str(shm_path / TARGETS[name]), str(shm_path / "back")
    formats.convert(str(shm_path / "a"), there, to_format=name)
    assert formats.detect(there).name == name
    assert formats.diff(str(shm_path / "a"), there).same
    formats.convert(there, back)
    assert formats.diff(str(shm_path / "a"), back).same
    loaded = shardstore.load(back)
    assert_same({key: loaded[key] for key in weights()}, weights())


def test_run_at_step_is_a_source(shm_path: Path) -> None:
    """A checkpoint of a run is named as everywhere."""
    training = tied()
    with Checkpointer(str(shm_path / "run"), state_of(training), every_steps=1) as ckpt:
        ckpt.resume()
        for _ in range(2):
            train(training, 1)
            ckpt.step(loss=1.0)
    made = formats.convert(f"{shm_path}/run@1", str(shm_path / "a.pt"), only=["model", "optimizer"])
    assert made.step == 1
    state = torch.load(shm_path / "a.pt", weights_only=True)
    assert list(state) == ["model", "optimizer"]
    assert state["optimizer"]["state"][0]["step"] == 1
    with pytest.raises(CheckpointNotFound):
        formats.convert(f"{shm_path}/run@7", str(shm_path / "b.pt"))


def test_nothing_is_cast_unless_asked(shm_path: Path) -> None:
    """With a dtype, floating-point tensors but single numbers are converted, once where they are tied; others stay."""
    tied_one = torch.randn(4, 1000)
    state = {"model": {"w": tied_one, "same": tied_one, "i": torch.tensor([1]), "s": torch.tensor(3.0)}, "x": 1}
    shardstore.save(state, str(shm_path / "a"))
    formats.convert(str(shm_path / "a"), str(shm_path / "b"), dtype="bfloat16")
    made = shardstore.load(str(shm_path / "b"))["model"]
    assert torch.equal(made["w"], tied_one.bfloat16())
    assert made["w"] is made["same"]
    assert (made["i"].dtype, made["s"].dtype) == (torch.int64, torch.float32)
    formats.convert(str(shm_path / "b"), str(shm_path / "c"), dtype=torch.float32)
    assert torch.equal(shardstore.load(str(shm_path / "c"))["model"]["w"], tied_one.bfloat16().float())
    for dtype in ("int8", "float", 3):
        with pytest.raises(InvalidArgument, match="dtype"):
            formats.convert(str(shm_path / "a"), str(shm_path / "d"), dtype=dtype)


@pytest.mark.parametrize("target", ["b.pt", "b.bin", "b.safetensors", "store"])
def test_nothing_is_overwritten(shm_path: Path, target: str) -> None:
    """A target that is there stays byte for byte, and the source isn't even read."""
    shardstore.save({"flat": dict.fromkeys(["weights", "exp_avg", "exp_avg_sq"], torch.ones(2))}, str(shm_path / "a"))
    if target == "store":
        shardstore.save(weights(), str(shm_path / target))
    else:
        (shm_path / target).write_bytes(b"mine")
    before = files_of(shm_path)
    with pytest.raises(CheckpointExists):
        formats.convert(str(shm_path / "a"), str(shm_path / target), step=1)
    assert files_of(shm_path) == before


def test_what_the_target_cannot_hold_leaves_nothing(shm_path: Path) -> None:
    """A refusal comes before a byte is written."""
    shardstore.save(everything(), str(shm_path / "a"), step=2)
    for name in ("b.pt", "b.bin"):
        with pytest.raises(UnsupportedState):
            formats.convert(str(shm_path / "a"), str(shm_path / name))
    assert [one.name for one in shm_path.iterdir()] == ["a"]


def test_a_disk_that_forgets_is_found_out(shm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that reads back otherwise than it was written never gets its name."""
    shardstore.save(weights(), str(shm_path / "a"))
    put = files.LocalStore.put

    def forgetting(self: Any, key: str, body: Any, **how: Any) -> None:
        put(self, key, body, **how)
        if key.endswith(".part"):
            flip(Path(self.url) / key, body.nbytes // 2)

    monkeypatch.setattr(files.LocalStore, "put", forgetting)
    with pytest.raises(Damaged, match="read back"):
        formats.convert(str(shm_path / "a"), str(shm_path / "b.pt"))
    assert [one.name for one in shm_path.iterdir()] == ["a"]


def test_a_damaged_source_is_found_while_it_is_read(shm_path: Path) -> None:
    """A flipped bit in a store's shard ends the conversion, and nothing is left of it."""
    shardstore.save({"model": {"w": torch.randn(100_000), "v": torch.randn(3)}, "x": 1}, str(shm_path / "a"))
    flip(shm_path / "a" / shards_of(shm_path / "a")[0], 5000)
    with pytest.raises(Damaged, match="model-0000"):
        formats.convert(str(shm_path / "a"), str(shm_path / "b.pt"))
    assert [one.name for one in shm_path.iterdir()] == ["a"]


def test_events_tell_bytes_and_notes(shm_path: Path) -> None:
    """A listener hears how far it is, and what a person should know."""
    heard: list[Event] = []
    (shm_path / "step_000004.bin").write_bytes(bytes([5, 0, 0, 0, 0, 0, 0, 0]))
    formats.convert(shm_path / "step_000004.bin", shm_path / "a", listener=heard.append)
    assert any(isinstance(event, Noticed) and "named after step 4" in event.what for event in heard)
    heard.clear()
    formats.convert(shm_path / "a", shm_path / "b.bin", listener=heard.append)
    assert any(isinstance(event, Started) and event.work == "save" for event in heard)
    assert sum(event.nbytes for event in heard if isinstance(event, Progress) and event.work == "save") == 8


def test_many_small_tensors_are_read_together(shm_path: Path) -> None:
    """Thousands of small tensors cost some reads of the store, not one each."""
    state = {"model": {f"t{k}": torch.full((3,), float(k)) for k in range(3000)}, "x": 1}
    shardstore.save(state, str(shm_path / "a"))
    heard: list[Event] = []
    formats.convert(shm_path / "a", shm_path / "b.pt", listener=heard.append)
    assert sum(isinstance(event, Progress) and event.work == "load" for event in heard) < 50
    assert_same(torch.load(shm_path / "b.pt", weights_only=True), state)


def test_sections_are_chosen_by_name(shm_path: Path) -> None:
    """A section that isn't there is an error, and a text is no list of sections."""
    shardstore.save({"model": weights(), "x": 1}, str(shm_path / "a"))
    with pytest.raises(Mismatch, match="ema"):
        formats.convert(shm_path / "a", shm_path / "b.pt", only=["ema"])
    with pytest.raises(InvalidArgument):
        formats.convert(shm_path / "a", shm_path / "b.pt", only="model")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"from_format": "gguf"}, InvalidArgument), ({"to_format": "gguf"}, InvalidArgument),
        ({"max_shard_bytes": 0}, InvalidArgument), ({"layout": "x", "model": torch.nn.Linear(1, 1)}, InvalidArgument),
        ({"run": True, "to_format": "torch"}, InvalidArgument), ({"layout": "nowhere.json"}, StoreError),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(shm_path: Path, options: dict[str, Any], error: type[Exception]) -> None:
    """What makes no sense is said at once."""
    shardstore.save(weights(), str(shm_path / "a"))
    with pytest.raises(error):
        formats.convert(shm_path / "a", shm_path / "b", **options)
    assert not (shm_path / "b").exists()


def test_places_that_are_nothing(shm_path: Path) -> None:
    """A place where nothing is, one that is no checkpoint, and foreign files behind a URL are told apart."""
    with pytest.raises(CheckpointNotFound, match="nothing at"):
        formats.detect(str(shm_path / "x"))
    (shm_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedState, match="none of"):
        formats.detect(str(shm_path / "notes.txt"))
    with pytest.raises(InvalidArgument, match="local"):
        formats.read("s3://bucket/a.pt", "torch")
    with pytest.raises(CheckpointNotFound, match="holds no checkpoint"):
        formats.convert(str(shm_path), str(shm_path / "b.pt"))
    os.mkfifo(shm_path / "fifo.pt")
    with pytest.raises(UnsupportedState):
        formats.detect(str(shm_path / "fifo.pt"))


def test_a_layout_goes_through_json(shm_path: Path) -> None:
    """What a model's layout writes as JSON is read as the same layout, but for the values of buffers."""
    layout = Layout.of(*tied(groups=True))
    (shm_path / "l.json").write_text(json.dumps(layout.as_json()))
    read = Layout.read(shm_path / "l.json")
    assert read.as_json() == layout.as_json()
    assert layout.as_json()["ties"] == {"head.weight": "emb.weight"}
    assert layout.left_out == ("mask",)


# -- the command


def test_the_command_converts(shm_path: Path, call: Callable[..., Result]) -> None:
    """The issue's words: to a store with a layout and back, byte-equal; --json tells what was made."""
    training = tied()
    train(training, 1)
    formats.by_name("flat").write(
        state_of(training, step=1), str(shm_path / "step_000001.bin"), Options(layout=Layout.of(*training))
    )
    (shm_path / "layout.json").write_text(json.dumps(Layout.of(*training).as_json()))
    layout = ("--layout", shm_path / "layout.json")
    done = call(shm_path / "step_000001.bin", shm_path / "ckpt", *layout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "shardstore from flat, step 1" in done.stdout
    done = call(shm_path / "ckpt", shm_path / "b.bin", *layout, "--json")
    assert json.loads(done.stdout)["to"] == "flat"
    assert (shm_path / "b.bin").read_bytes() == (shm_path / "step_000001.bin").read_bytes()


def test_the_commands_exit_codes(shm_path: Path, call: Callable[..., Result]) -> None:
    """Each failure has the house's code, as text and as JSON."""
    shardstore.save(weights(), str(shm_path / "a"))
    (shm_path / "bad.bin").write_bytes(b"12345678")
    assert call(shm_path / "a", shm_path / "a").exit_code == 6
    assert call(shm_path / "nothing", shm_path / "b").exit_code == 5
    assert call(shm_path / "a", shm_path / "b", "--to", "gguf").exit_code == 2
    assert call(shm_path / "a", shm_path / "b", "--steps", "x").exit_code == 2
    assert call("--from", "flat", shm_path / "bad.bin", shm_path / "b").exit_code == 3
    failed = call(shm_path / "a", shm_path / "b.bin", "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["error"]["kind"] == "UnsupportedState"


def test_the_command_knows_the_formats() -> None:
    """Its list is written down, since it can't import torch to look: it is the list that there is."""
    assert set(_FORMATS.choices) == set(formats.FORMATS)


def test_a_source_that_is_written_to_meanwhile_is_no_source(shm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another checkpoint of the same size goes into the file while it is read: no mixture of both is taken for good."""
    old, new = ({"w": torch.full((3 * 1024 * 1024,), value)} for value in (1.0, 2.0))
    for name, state in (("old", old), ("new", new)):
        shardstore.save(state, str(shm_path / name))
        formats.convert(shm_path / name, shm_path / f"{name}.safetensors")
    data, read = (shm_path / "new.safetensors").read_bytes(), files.ForeignFile.slices

    def slices(self: Any, offset: int, nbytes: int) -> Any:
        for number, part in enumerate(read(self, offset, nbytes)):
            yield part
            if not number and self.path.endswith("old.safetensors"):
                (shm_path / "old.safetensors").write_bytes(data)

    monkeypatch.setattr(files.ForeignFile, "slices", slices)
    with pytest.raises(Damaged, match="was written to while it was read"):
        formats.convert(shm_path / "old.safetensors", shm_path / "mixed")
    with pytest.raises(CheckpointNotFound):
        shardstore.load(shm_path / "mixed")


@pytest.mark.parametrize("to", ["huggingface", "dcp"])
def test_folders_are_read_back(shm_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """A bit that turns after it was written is found, and nothing stays, as with single files."""
    shardstore.save({"w": torch.ones(64)}, str(shm_path / "a"))
    sync = os.fsync

    def turning(fd: int) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_file() and (at := path.read_bytes().find(b"\0\0\x80?" * 64)) >= 0:
            flip(path, at + 5)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", turning)
        with pytest.raises(Damaged):
            formats.convert(shm_path / "a", shm_path / "b", to_format=to)
    assert [path.name for path in shm_path.iterdir()] == ["a"]
    formats.convert(shm_path / "a", shm_path / "b", to_format=to)
    assert formats.diff(shm_path / "a", shm_path / "b").same


def test_values_per_rank_are_kept_by_stores_and_refused_by_all_else(shm_path: Path) -> None:
    """In a copy, in another dtype and in a run they are the same, tensors and all; other formats name them."""
    state = {"model": {"w": torch.ones(2)}, "own": PerRank({"t": torch.arange(9000), "n": 1}), "last": torch.zeros(2)}
    shardstore.save(state, str(shm_path / "a"), step=3)
    for name, how in (("b", {}), ("c", {"dtype": "float16"}), ("run", {"run": True})):
        formats.convert(shm_path / "a", shm_path / name, **how)
        made = shardstore.load(f"{shm_path / name}{'@3' * (name == 'run')}")
        assert_same(made["own"].value, state["own"].value)
        assert made["last"].tolist() == [0, 0]
    with pytest.raises(UnsupportedState, match="own: it is a value per rank"):
        formats.convert(shm_path / "a", shm_path / "a.pt")


def test_packed_floats_stay_as_they_are(shm_path: Path) -> None:
    """Torch converts none of them, so that another dtype for the rest leaves them alone."""
    packed = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    shardstore.save({"p": packed, "w": torch.ones(2)}, str(shm_path / "a"))
    formats.convert(shm_path / "a", shm_path / "b", dtype="bfloat16")
    assert_same(shardstore.load(shm_path / "b"), {"p": packed, "w": torch.ones(2, dtype=torch.bfloat16)})
