"""Files of torch.save: read without running anything from them, streamed; written so that torch reads them."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardstore
from shardstore import formats
from shardstore.errors import CheckpointExists, Damaged, ShardstoreError, UnsupportedState
from shardstore.formats import Options
from shardstore.formats.plain import tensors_in
from shardstore.formats.torch_file import TorchFormat
from shardstore.memory import load
from shardstore.specs import DTYPES, Lazy
from tests.formats.trainings import state_of, tied, train
from tests.formats.weights import marker, mutations
from tests.kit.same import assert_same, ties

TORCH = TorchFormat()


def everything() -> dict[str, Any]:
    """What a file may hold: each dtype, views, ties, odd shapes, plain values, arrays."""
    torch.manual_seed(4)
    base = torch.randn(40, 50)
    tensors = {}
    for name, dtype in DTYPES.items():
        if name in {"uint8", "int64", "uint16"} or not name.startswith(("uint", "int", "bits")):
            bits = torch.randint(0, 2 if name == "bool" else 100, (4, 2 * dtype.itemsize), dtype=torch.uint8)
            tensors[name] = bits.view(getattr(torch, name))
    views = {"whole": base, "same": base, "turned": base.t(), "rows": base[3:7], "cell": base[2, 3], "none": base[:0]}
    return {"tensors": tensors, "views": views, "plain": plain_values(), "numpy": arrays()}


def plain_values() -> dict[Any, Any]:
    """Values of each plain kind, and keys of several."""
    return {
        "n": None, "i": 2**70, "neg": -5, "f": -0.0, "inf": float("inf"), "s": "\u00e9", "b": b"\0\xff", "c": 1 + 2j,
        "t": (1, ((), [])), "set": {1, 2}, "o": collections.OrderedDict(z=1, a=2), "count": collections.Counter("ab"),
        "d": torch.float32, "size": torch.Size([2, 3]), "dev": torch.device("cpu"), 7: "int", (1, "x"): "tuple",
    }  # fmt: skip


def arrays() -> dict[str, Any]:
    """Arrays and numbers of NumPy."""
    return {
        "a": np.arange(6, dtype=np.uint32).reshape(2, 3), "s": np.float64(0.5), "i": np.int64(3), "b": np.bool_(True),
        "f16": np.float16(1), "c": np.ones((0, 2), dtype=np.complex128),
    }  # fmt: skip


def saved(folder: Path, state: Any, name: str = "a.pt", **how: Any) -> str:
    """A file of torch's own making."""
    torch.save(state, folder / name, **how)
    return str(folder / name)


def test_everything_there_and_back(shm_path: Path) -> None:
    """From torch to a store, back, and there again: types, structure, dtypes, shapes, ties and every bit stay."""
    state = everything()
    formats.convert(saved(shm_path, state), str(shm_path / "s"))
    first = shardstore.load(str(shm_path / "s"))
    assert_same(first, state)
    assert frozenset({("views", "whole"), ("views", "same")}) in ties(first)
    formats.convert(str(shm_path / "s"), str(shm_path / "b.pt"))
    again = torch.load(shm_path / "b.pt", weights_only=False)
    assert_same(again, state)
    assert again["views"]["whole"] is again["views"]["same"]
    formats.convert(str(shm_path / "b.pt"), str(shm_path / "s2"))
    assert_same(shardstore.load(str(shm_path / "s2")), first)
    assert formats.diff(str(shm_path / "s"), str(shm_path / "b.pt")).same


def test_torch_reads_what_is_written_with_weights_only(shm_path: Path) -> None:
    """A written file without NumPy in it needs nothing but torch's default, and other zip tools find no fault in it."""
    state = everything()
    del state["numpy"]
    TORCH.write(state, str(shm_path / "a.pt"), Options())
    assert_same(torch.load(shm_path / "a.pt", weights_only=True), state)
    assert_same(torch.load(shm_path / "a.pt", weights_only=True, mmap=True), state)
    with zipfile.ZipFile(shm_path / "a.pt") as archive:
        assert archive.testzip() is None
        names = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
    data = (shm_path / "a.pt").read_bytes()
    for info in names:
        at = info.header_offset + 30 + int.from_bytes(data[info.header_offset + 26 :][:2], "little")
        assert (at + int.from_bytes(data[info.header_offset + 28 :][:2], "little")) % 64 == 0


def test_modules_versions_survive(shm_path: Path) -> None:
    """The `_metadata` of a state_dict, by which modules know older layouts, goes there and back."""
    state = nn.Sequential(nn.BatchNorm1d(3)).state_dict()
    formats.convert(saved(shm_path, {"model": state, "x": 1}), str(shm_path / "s"))
    formats.convert(str(shm_path / "s"), str(shm_path / "b.pt"))
    assert torch.load(shm_path / "b.pt", weights_only=True)["model"]._metadata == state._metadata


def test_optimizers_get_the_names_of_their_parameters(shm_path: Path) -> None:
    """Numbers become names in the store, and numbers again in a file, in which the names stay known.

    That the model's order was taken for the optimizer's is told.
    """
    training = tied()
    train(training, 3)
    plain = {name: copy.deepcopy(part.state_dict()) for name, part in state_of(training).items()}
    del plain["model"]["mask"]
    made = formats.convert(saved(shm_path, plain), str(shm_path / "s"))
    assert ["in the order of the model" in note for note in made.notes] == [True]
    assert set(shardstore.load(str(shm_path / "s"))["optimizer"]["state"]) == {
        "emb.weight",
        "norm.weight",
        "norm.bias",
    }
    fresh = tied()
    shardstore.load(str(shm_path / "s"), into=state_of(fresh), allow_missing="model/mask")
    assert train(fresh, 3, seed=9) == train(training, 3, seed=9)
    formats.convert(str(shm_path / "s"), str(shm_path / "b.pt"))
    back = torch.load(shm_path / "b.pt", weights_only=True)["optimizer"]
    assert back["param_groups"][0].pop("param_names") == ("emb.weight", "norm.weight", "norm.bias")
    assert_same(back, plain["optimizer"])
    assert formats.diff(str(shm_path / "s"), str(shm_path / "b.pt")).same


@pytest.mark.parametrize(("groups", "buffer"), [(False, True), (True, False)])
def test_numbers_stay_where_names_are_not_certain(shm_path: Path, groups: bool, buffer: bool) -> None:
    """A buffer too many, or two groups, leave the order open: then numbers stay, with a note, until a layout tells."""
    training = tied(groups)
    train(training, 1)
    state = {name: part.state_dict() for name, part in state_of(training).items()}
    if not buffer:
        del state["model"]["mask"]
    path = saved(shm_path, state)
    made = formats.convert(path, str(shm_path / "s"))
    assert "names can't be told" in made.notes[0]
    assert set(shardstore.load(str(shm_path / "s"))["optimizer"]["state"]) == {0, 1, 2}
    formats.convert(path, str(shm_path / "s2"), model=training[0], optimizer=training[1])
    fresh = tied(groups)
    shardstore.load(str(shm_path / "s2"), into=state_of(fresh), allow_missing="model/mask")
    assert train(fresh, 3, seed=9) == train(training, 3, seed=9)


def test_names_of_the_optimizer_itself(shm_path: Path) -> None:
    """An optimizer that was built with named parameters names them, in whatever order its groups have them."""
    torch.manual_seed(2)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(reversed(list(model.named_parameters())), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    formats.convert(saved(shm_path, plain), str(shm_path / "s"))
    state = shardstore.load(str(shm_path / "s"))["optimizer"]
    assert state["param_groups"][0]["params"] == ["bias", "weight"]
    formats.convert(str(shm_path / "s"), str(shm_path / "b.pt"))
    assert_same(torch.load(shm_path / "b.pt", weights_only=True)["optimizer"], plain["optimizer"])


# -- nothing is run


def _legacy(state: Any, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def _object_array(state: Any, path: Path) -> None:
    torch.save({"a": np.array([state["x"]], dtype=object)}, path)


def _plain_pickle(state: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(state))


@pytest.mark.parametrize("save", [torch.save, _legacy, _object_array, _plain_pickle])
def test_Z03_nothing_of_a_file_is_run(shm_path: Path, save: Any) -> None:
    """A file that would run code is refused in every form, names what it wants, and the code has not run."""
    planted, evil = marker(shm_path)
    save({"x": evil}, shm_path / "a.pt")
    with pytest.raises(ShardstoreError) as caught:
        formats.convert(str(shm_path / "a.pt"), str(shm_path / "s"))
    assert isinstance(caught.value, UnsupportedState | Damaged)
    assert not planted.exists()
    assert not (shm_path / "s").exists()
    if save is torch.save:
        assert "builtins.exec" in str(caught.value)
        assert "nothing of it was run" in str(caught.value)


def test_classes_are_refused_by_name(shm_path: Path) -> None:
    """A whole module, or another object, is refused with its type and what to do."""
    with pytest.raises(UnsupportedState, match=r"torch\.nn\.modules\.linear\.Linear.*weights_only"):
        formats.read(saved(shm_path, nn.Linear(2, 2)))
    with pytest.raises(UnsupportedState, match=r"pathlib\.PosixPath"):
        formats.read(saved(shm_path, {"p": Path("x")}, "b.pt"))


def test_torchscript_is_refused_with_a_clear_word(shm_path: Path) -> None:
    """A program with weights in it is code, whatever its name ends in."""
    script = shm_path / "model.jit"
    with zipfile.ZipFile(script, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "version", "code/__torch__.py"):
            archive.writestr(f"model/{name}", b"x")
    with pytest.raises(UnsupportedState, match="TorchScript program, which is code"):
        formats.read(str(script))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conj|taken over"),
        (torch.ones(1).expand(5000, 5000), "expanded"),
        (torch.zeros(3).untyped_storage(), "storage"),
    ],
    ids=["sparse", "conj", "expanded", "storage"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_not_plain(shm_path: Path, value: Any, why: str) -> None:
    """What can't be streamed is refused with its path, never taken for something else."""
    with pytest.raises(ShardstoreError, match=why):
        formats.read(saved(shm_path, {"odd": value}))


def test_parameters_are_told(shm_path: Path) -> None:
    """That a tensor was a Parameter is not kept, and said."""
    made = formats.convert(saved(shm_path, {"p": nn.Parameter(torch.ones(2)), "x": 1}), str(shm_path / "s"))
    assert "1 tensors were parameters" in made.notes[0]
    assert type(shardstore.load(str(shm_path / "s"))["p"]) is torch.Tensor


@pytest.mark.parametrize(
    ("value", "why"),
    [(Path("x"), "Path"), (frozenset({1}), "frozenset"), (2**5000, "int"), (np.datetime64(3, "s"), "datetime64")],
    ids=["path", "frozenset", "int", "datetime"],
)
def test_what_torch_would_not_read_back_is_refused(shm_path: Path, value: Any, why: str) -> None:
    """A store may hold more than weights_only=True reads: refused with path and reason, before a byte is written."""
    shardstore.save({"a": {"b": value}}, str(shm_path / "s"))
    with pytest.raises(UnsupportedState, match=why) as caught:
        formats.convert(str(shm_path / "s"), str(shm_path / "a.pt"))
    assert caught.value.path == "a.b"
    assert not (shm_path / "a.pt").exists()


# -- damage


def test_a_flipped_bit_in_a_storage_is_found(shm_path: Path) -> None:
    """The CRCs of the archive are checked, for whole storages and for views of them; torch itself doesn't look."""
    base = torch.arange(1000.0)
    path = Path(saved(shm_path, {"view": base[5:900], "x": 1}))
    data = bytearray(path.read_bytes())
    at = data.index(base.numpy().tobytes()) + 2000
    data[at] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    with pytest.raises(Damaged, match="CRC"):
        formats.convert(str(path), str(shm_path / "s"))
    with pytest.raises(ShardstoreError):
        shardstore.load(str(shm_path / "s"))


def test_files_without_crcs_are_read(shm_path: Path) -> None:
    """A file may leave the CRCs out; that is no damage."""
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(shm_path, {"a": torch.ones(3), "x": 1})
    finally:
        torch.serialization.set_crc32_options(True)
    formats.convert(path, str(shm_path / "s"))
    assert shardstore.load(str(shm_path / "s"))["a"].tolist() == [1, 1, 1]


def test_an_archive_packed_anew_is_read_and_a_compressed_one_refused(shm_path: Path) -> None:
    """Records may lie elsewhere than torch puts them; compressed ones are refused with a remedy."""
    path = saved(shm_path, {"a": torch.arange(5.0), "x": 1})
    for name, how in (("stored.pt", zipfile.ZIP_STORED), ("deflated.pt", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(shm_path / name, "w", how) as new:
            for info in reversed(old.infolist()):
                new.writestr(info.filename, old.read(info), how)
    with formats.read(str(shm_path / "stored.pt")) as found:
        assert load(found.state["a"]).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UnsupportedState, match="compressed"):
        formats.read(str(shm_path / "deflated.pt"))


def test_files_of_old_are_read(shm_path: Path) -> None:
    """Files from before torch 1.6, which are no archives, give the same state."""
    state = {"a": torch.randn(3), "o": collections.OrderedDict(x=1)}
    formats.convert(saved(shm_path, state, _use_new_zipfile_serialization=False), str(shm_path / "s"))
    assert_same(shardstore.load(str(shm_path / "s")), state)


def test_structures_that_would_never_end(shm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict that contains itself, and lists that double forty times, end in errors of ours, soon."""
    circle: dict[str, Any] = {}
    circle["me"] = circle
    with pytest.raises(UnsupportedState, match="contains itself"):
        formats.read(saved(shm_path, circle))
    monkeypatch.setattr("shardstore.formats.torch_file._MOST", 10_000)
    doubled: Any = [1]
    for _ in range(40):
        doubled = [doubled, doubled]
    with pytest.raises(UnsupportedState, match="stands for more than"):
        formats.read(saved(shm_path, doubled))


@settings(max_examples=60)
@given(data=st.data(), form=st.sampled_from(["archive", "bare", "old"]))
def test_whatever_bytes_are_there(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: str) -> None:
    """Mutated files, with and without CRCs, are read or refused by an error of ours."""
    buffer = io.BytesIO()
    state = {"a": torch.arange(9.0)[2:], "t": torch.zeros(2, 3).t(), "n": np.arange(3), "l": [1, (2.5, "x")]}
    torch.serialization.set_crc32_options(form != "bare")
    torch.save(state, buffer, _use_new_zipfile_serialization=form != "old")
    torch.serialization.set_crc32_options(True)
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    path.write_bytes(data.draw(mutations(buffer.getvalue())))
    try:
        with formats.read(str(path)) as found:
            for _, tensor in tensors_in(found.state):
                load(tensor)
    except ShardstoreError as error:
        assert "fuzzed.pt" in str(error) or error.path is not None  # noqa: PT017 - whichever it is


def test_nothing_is_read_before_it_is_wanted(shm_path: Path) -> None:
    """Opening a file gives lazy tensors, which name file and place."""
    path = saved(shm_path, {"model": {"w": torch.randn(1000)}})
    with formats.read(path) as found:
        assert isinstance(found.state["model"]["w"], Lazy)
        assert found.state["model"]["w"].spec == ("float32", (1000,))


def test_an_existing_file_is_left_alone(shm_path: Path) -> None:
    """A written file never replaces another one."""
    (shm_path / "a.pt").write_bytes(b"mine")
    with pytest.raises(CheckpointExists):
        TORCH.write({"x": 1}, str(shm_path / "a.pt"), Options())
    assert (shm_path / "a.pt").read_bytes() == b"mine"


PEAK = """
import sys
import torch
from shardstore import formats
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
before = peak()
formats.convert(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["bin", "pt"])
def test_T21_conversion_is_bounded_by_a_tensor_and_the_buffers(shm_path: Path, ending: str) -> None:
    """Converting 384 MB to a store takes less than 64 MB, and the way back what a store read in part needs."""
    shardstore.save({"flat": dict.fromkeys(["weights"], torch.empty(1)), "x": 1}, str(shm_path / "warm"))
    parts = {name: torch.zeros(32_000_000) for name in ("weights", "exp_avg", "exp_avg_sq")}
    source = str(shm_path / f"step_000001.{ending}")
    formats.by_name("flat" if ending == "bin" else "torch").write({"flat": parts, "step": 1}, source, Options())
    del parts
    for old, new, most in ((source, "s", 64), (str(shm_path / "s"), f"back.{ending}", 160)):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, old, str(shm_path / new)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert int(done.stdout) < most * 10**6
    assert formats.diff(source, str(shm_path / f"back.{ending}")).same
