"""Single safetensors files and Hugging Face folders: read strictly, written as other tools read them."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore import formats
from shardstore.errors import CheckpointExists, Damaged, ShardstoreError, StoreError, UnsupportedState
from shardstore.formats import FORMATS, Options
from tests.formats.weights import everything, loaded, mutations
from tests.kit.damage import parts_of, shard
from tests.kit.same import assert_same, ties

INDEX = "model.safetensors.index.json"
GiB = 1 << 30


def write(state: Any, place: Path, kind: str = "huggingface", **options: Any) -> None:
    """Write a state in a format."""
    FORMATS[kind].write(state, str(place), Options(**options))


def read(place: Path, kind: str | None = None) -> dict[str, Any]:
    """What a format reads, in memory."""
    with formats.read(str(place), kind) as found:
        return loaded(found.state)


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("most", [10**9, 60, 1], ids=["one file", "shards", "a tensor each"])
def test_every_dtype_and_tie_comes_back(shm_path: Path, most: int):
    """Bits, dtypes, shapes, names and ties of weights go through a folder, whole or in shards."""
    state = everything()
    write(state, shm_path / "f", max_shard_bytes=most)
    names = sorted(path.name for path in (shm_path / "f").iterdir())
    assert (names == ["model.safetensors"]) == (most == 10**9)
    found = read(shm_path / "f")
    assert_same({name: found[name] for name in state}, {name: tensor.contiguous() for name, tensor in state.items()})
    assert len(found) == len(state)
    with formats.read(str(shm_path / "f")) as opened:
        assert opened.state["tied"] is opened.state["t.float32"]
        assert opened.format == "huggingface"


def test_the_index_is_that_of_transformers(shm_path: Path):
    """Names of files, `weight_map`, `total_size` and metadata; no file is larger than asked but for one tensor."""
    state = {f"w{n}": torch.full((10,), float(n)) for n in range(5)}
    write({"model": state}, shm_path / "f", max_shard_bytes=80)
    document = json.loads((shm_path / "f" / INDEX).read_text())
    assert document["metadata"] == {"total_size": 200}
    assert sorted(set(document["weight_map"].values())) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name in set(document["weight_map"].values()):
        data = (shm_path / "f" / name).read_bytes()
        head, _ = parts_of(data)
        assert head["__metadata__"] == {"format": "pt"}
        assert all(torch.equal(t, state[k]) for k, t in safetensors.torch.load(data).items())
    assert os.listdir(shm_path) == ["f"]


def test_safetensors_reads_odd_orders(shm_path: Path):
    """Tensors lie widest first, so that each is aligned, in whatever order the state has them."""
    state = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5, dtype=torch.float64), "c": torch.ones(1).half()}
    write(state, shm_path / "one.safetensors", "safetensors")
    data = (shm_path / "one.safetensors").read_bytes()
    head, _ = parts_of(data)
    assert [head[name]["data_offsets"][0] % size for name, size in (("b", 8), ("c", 2))] == [0, 0]
    assert (len(data) - 40 - 2 - 3) % 64 == 0
    found = safetensors.torch.load_file(shm_path / "one.safetensors")
    assert_same({name: found[name] for name in state}, state)


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"model": {"w": torch.ones(1)}, "step": 3}, "step"),
        ({"model": {"w": torch.ones(1), "n": 3}}, "model/n"),
        ({"model": {"a": {"w": torch.ones(1)}}}, "model/a"),
        ({"w": torch.ones(1, dtype=torch.complex128)}, "w"),
        ({"w": torch.ones(2, 2).to_sparse()}, "w"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"model": {1: torch.ones(1)}}, "model/1"),
    ],
)
def test_what_a_folder_of_weights_cannot_hold_is_refused(shm_path: Path, state: Any, path: str):
    """The error names the place, and not a byte is written."""
    with pytest.raises(UnsupportedState) as caught:
        write(state, shm_path / "f")
    assert caught.value.path == path
    assert not (shm_path / "f").exists()


def test_nothing_is_overwritten(shm_path: Path):
    """Weights that are there are refused; other files of a model's folder are left alone."""
    (shm_path / "f").mkdir()
    (shm_path / "f" / "config.json").write_text("{}")
    write({"w": torch.ones(1)}, shm_path / "f")
    with pytest.raises(CheckpointExists):
        write({"w": torch.zeros(1)}, shm_path / "f")
    assert (read(shm_path / "f")["w"] == 1).all()
    assert (shm_path / "f" / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointExists):
        write({"w": torch.zeros(1)}, shm_path / "f" / "config.json")


def test_a_failed_write_leaves_nothing(shm_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second shard can't be written: the first goes, too, and so does the folder that was made."""
    from shardstore.storage import LocalStore

    put = LocalStore.put

    def fail(self: Any, key: str, body: Any, **conditions: Any) -> None:
        if "00002" in key:
            raise StoreError("full")
        put(self, key, body, **conditions)

    monkeypatch.setattr(LocalStore, "put", fail)
    with pytest.raises(StoreError, match="full"):
        write({"a": torch.ones(9), "b": torch.ones(9)}, shm_path / "f", max_shard_bytes=1)
    assert not (shm_path / "f").exists()


# ------------------------------------------------------------------------------------------------ conversions


@pytest.mark.parametrize("flat", [True, False])
def test_to_a_store_and_back(shm_path: Path, flat: bool):
    """Folder, store, file, folder: the tensors are the same at each station, and diff says so."""
    state = everything()
    write(state if flat else {"model": state}, shm_path / "hf", max_shard_bytes=50)
    formats.convert(shm_path / "hf", shm_path / "store")
    formats.convert(shm_path / "store", shm_path / "one.safetensors")
    formats.convert(shm_path / "one.safetensors", shm_path / "back", to_format="huggingface")
    for name in ("store", "one.safetensors", "back"):
        compared = formats.diff(shm_path / "hf", shm_path / name)
        assert compared.same, compared
        assert not compared.ties
    assert ties(shardstore.load(shm_path / "store")) == ties({name: state[name] for name in read(shm_path / "hf")})


def test_the_weights_of_a_training_alone(shm_path: Path):
    """A store with more than weights: refused as it is, and its section `model` can be taken."""
    shardstore.save({"model": {"w": torch.ones(3)}, "step": 7}, shm_path / "c")
    with pytest.raises(UnsupportedState, match="weights alone"):
        formats.convert(shm_path / "c", shm_path / "hf", to_format="huggingface")
    formats.convert(shm_path / "c", shm_path / "hf", to_format="huggingface", only=["model"])
    assert_same(read(shm_path / "hf"), {"w": torch.ones(3)})


# ------------------------------------------------------------------------------------------------ hostile input


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/hostname", "a/../../b", "C:\\x", "a\u0000b", "", ".", "n" * 300, None, 3, ["x"], "x\\y"],
    ids=repr,
)
def test_Z01_names_in_the_index_that_leave_the_folder(shm_path: Path, name: Any):
    """Z01: refused before anything is opened, a right file at that place or not."""
    folder = shm_path / "f"
    folder.mkdir()
    safetensors.torch.save_file({"w": torch.ones(1)}, shm_path / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))
    with pytest.raises(Damaged, match="leaves the folder"):
        read(folder)


@pytest.mark.parametrize("size", [2**64 - 1, 2**31, 2**63, "file + 1"])
def test_Z04_header_lengths(shm_path: Path, size: Any):
    """Z04: a length that the file can't hold is refused without memory for it."""
    data = safetensors.torch.save({"w": torch.ones(4)})
    size = len(data) - 7 if size == "file + 1" else size
    (shm_path / "x.safetensors").write_bytes(struct.pack("<Q", size) + data[8:])
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="header"):
            read(shm_path / "x.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def entry(**members: Any) -> dict[str, Any]:
    """A header entry of four floats, with some members changed."""
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **members}


@pytest.mark.parametrize(
    "header",
    [
        {"w": entry(shape=[1000, 1000])}, {"w": entry(data_offsets=[8, 4])}, {"w": entry(data_offsets=[0, 160])},
        {"w": entry(data_offsets=[0, 8, 16])}, {"w": entry(shape=[-4])}, {"w": entry(dtype="F33")},
        {"w": entry(shape=[2**40, 2**40])}, {"w": {}}, {"w": entry(more=1)}, {"w": entry(shape=[True])},
        {"w": entry(), "v": entry()}, {"w": entry(shape=[2], data_offsets=[0, 8])},
        {"w": entry(dtype="F4", shape=[4, 8, 1], data_offsets=[0, 16])},
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"a":' * 10_000, b"[]", b"nothing", {"__metadata__": {"a": 1}, "w": entry()},
    ],
)  # fmt: skip
def test_Z06_Z09_Z10_headers_that_lie(shm_path: Path, header: Any):
    """Z06, Z09, Z10: offsets that don't fit, repeated keys and deep JSON are refused with a typed error."""
    (shm_path / "x.safetensors").write_bytes(shard(header, b"\0" * 16))
    with pytest.raises((Damaged, UnsupportedState)):
        read(shm_path / "x.safetensors")


def test_an_index_that_names_a_tensor_in_the_wrong_file(shm_path: Path):
    """A tensor that its file lacks is damage, a missing file is a store error; one too many is noted and left out."""
    write({f"w{n}": torch.full((2,), n) for n in range(3)}, shm_path / "f", max_shard_bytes=8)
    document = json.loads((shm_path / "f" / INDEX).read_text())
    placed = document["weight_map"]
    (shm_path / "f" / INDEX).write_text(json.dumps({"weight_map": {**placed, "w0": placed["w1"]}}))
    with pytest.raises(Damaged, match="'w0' lies in"):
        read(shm_path / "f")
    (shm_path / "f" / INDEX).write_text(json.dumps({"weight_map": {"w1": placed["w1"]}}))
    (shm_path / "f" / placed["w0"]).unlink()
    assert list(read(shm_path / "f")) == ["w1"]
    (shm_path / "f" / INDEX).write_text(json.dumps(document))
    with pytest.raises(StoreError):
        read(shm_path / "f")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_raise_typed_errors_only(shm_path: Path, data: st.DataObject):
    """Whatever becomes of a header or of the index of shards: it reads, or an error of ours says why not."""
    folder = shm_path / "f"
    if not folder.exists():
        write({"a": torch.ones(3), "b": torch.ones(2).half(), "c": torch.ones(1)}, folder, max_shard_bytes=12)
    target = folder / data.draw(st.sampled_from(sorted(os.listdir(folder))))
    whole = target.read_bytes()
    try:
        target.write_bytes(data.draw(mutations(whole)))
        for place in (folder, target):
            with contextlib.suppress(ShardstoreError):
                read(place, "huggingface" if place is folder else "safetensors")
    finally:
        target.write_bytes(whole)


# ------------------------------------------------------------------------------------------------ other tools


def tiny(kind: str) -> Any:
    """A tiny model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    tied = kind == "tied llama"
    config = transformers.LlamaConfig(
        **small, intermediate_size=32, max_position_embeddings=32, num_key_value_heads=1, tie_word_embeddings=tied
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("most", [10**9, 5000], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied llama"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_our_export(shm_path: Path, kind: str, most: int):
    """A checkpoint of a model, exported: `from_pretrained` gives equal logits, and what it saves we read the same."""
    model = tiny(kind).eval()
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == (kind != "llama")
    shardstore.save({"model": model, "step": 3}, shm_path / "c")
    formats.convert(shm_path / "c", shm_path / "hf", to_format="huggingface", only=["model"], max_shard_bytes=most)
    model.config.save_pretrained(shm_path / "hf")
    assert (shm_path / "hf" / INDEX).exists() == (most == 5000)
    again, said = type(model).from_pretrained(shm_path / "hf", output_loading_info=True)
    assert {key: list(value) for key, value in said.items() if value} == {}
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again.eval()(tokens).logits)
    again.save_pretrained(shm_path / "theirs", max_shard_size="5KB" if most < 10**9 else "1GB")
    ours, theirs = read(shm_path / "hf"), read(shm_path / "theirs")
    assert_same({name: ours[name] for name in sorted(theirs)}, {name: theirs[name] for name in sorted(theirs)})
    assert set(ours) - set(theirs) <= {"lm_head.weight"}


# ------------------------------------------------------------------------------------------------ silero-vad


@pytest.fixture(scope="session")
def silero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data files of the wheel silero-vad, where it is at hand: no test fetches it."""
    place = os.environ.get("SILERO_VAD_WHEEL", "")
    if not place or not os.path.isfile(place):
        pytest.skip("SILERO_VAD_WHEEL names no wheel; `pip download --no-deps silero-vad` fetches one")
    folder = tmp_path_factory.mktemp("silero")
    with zipfile.ZipFile(place) as wheel:
        wheel.extractall(folder)
    return folder / "silero_vad" / "data"


def test_silero_goes_there_and_back(silero: Path, shm_path: Path):
    """A real file of weights: to a store, to a folder, and back, with the same tensors as the library reads."""
    source = silero / "silero_vad_16k.safetensors"
    formats.convert(source, shm_path / "c")
    formats.convert(shm_path / "c", shm_path / "hf", to_format="huggingface")
    formats.convert(shm_path / "hf", shm_path / "back.safetensors")
    assert formats.diff(source, shm_path / "back.safetensors").same
    wanted, found = map(safetensors.torch.load_file, (source, shm_path / "back.safetensors"))
    assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))


def test_silero_jit_is_refused(silero: Path):
    """TorchScript is code: it is refused by that name, and not loaded."""
    with pytest.raises(ShardstoreError, match="TorchScript"):
        formats.read(str(silero / "silero_vad.jit"), "torch")


def test_the_format_of_a_file_is_no_tie(shm_path: Path):
    """Every file says `"format": "pt"`: where a tensor is called `pt`, nothing is tied to it."""
    path = shm_path / "a.safetensors"
    safetensors.torch.save_file({"pt": torch.ones(2)}, path, {"format": "pt"})
    with formats.read(path) as found:
        assert list(found.state) == ["pt"]
