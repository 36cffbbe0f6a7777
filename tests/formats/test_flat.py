"""The flat single file: read, written, converted, with and without a layout; what it can't hold."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardstore
from shardstore import formats
from shardstore.errors import CheckpointExists, Damaged, InvalidArgument, ShardstoreError, UnsupportedState
from shardstore.formats import Layout, Options
from shardstore.formats.flat import FlatFormat, planned
from shardstore.memory import load
from shardstore.specs import Lazy, TensorSpec
from tests.formats.trainings import numbers, state_of, tied, train
from tests.formats.weights import mutations

FLAT = FlatFormat()


def flat_bytes(step: int, *numbers: float) -> bytes:
    """A file as a C program writes it."""
    return struct.pack(f"<ii{len(numbers)}f", step, len(numbers) // 3, *numbers)


def put(path: Path, data: bytes) -> str:
    """A file with that content."""
    path.write_bytes(data)
    return str(path)


@pytest.fixture
def trained(shm_path: Path) -> tuple[Any, str]:
    """A training after three steps, and its flat file."""
    training = tied()
    train(training, 3)
    path = str(shm_path / "step_000003.bin")
    FLAT.write({**state_of(training)}, path, Options(layout=Layout.of(*training)))
    return training, path


def test_golden_file_is_read_and_written_byte_by_byte(shm_path: Path) -> None:
    """The format is little-endian: int32 step and count, then weights, first and second moments."""
    data = bytes.fromhex("64000000 02000000 0000803f 00000040 00004040 00008040 0000a040 0000c040")
    path = put(shm_path / "step_000100.bin", data)
    with formats.read(path) as found:
        assert (found.format, found.step) == ("flat", 100)
        assert {name: numbers(part) for name, part in found.state["flat"].items()} == {
            "weights": [1, 2],
            "exp_avg": [3, 4],
            "exp_avg_sq": [5, 6],
        }
        FLAT.write(found.state, str(shm_path / "b.bin"), Options())
    assert (shm_path / "b.bin").read_bytes() == data
    assert data == flat_bytes(100, 1, 2, 3, 4, 5, 6)


def test_layout_names_the_parts_and_the_way_back_gives_the_same_bytes(shm_path: Path) -> None:
    """With a layout the numbers get names and shapes in its order; ties and groups come from it; cmp is silent."""
    layout = {
        "parameters": [["b.w", [2, 1]], ["a", [1]]],
        "ties": {"head": "b.w"},
        "groups": [["a"], ["b.w"]],
        "left_out": [],
    }
    (shm_path / "layout.json").write_text(json.dumps(layout))
    source = put(shm_path / "step_000007.bin", flat_bytes(7, *range(9)))
    there, back = str(shm_path / "ckpt"), str(shm_path / "back.bin")
    made = formats.convert(source, there, layout=shm_path / "layout.json")
    assert (made.source, made.target, made.step) == ("flat", "shardstore", 7)
    state = shardstore.load(there)
    assert state["model"]["head"] is state["model"]["b.w"]
    assert state["model"]["b.w"].tolist() == [[0], [1]]
    assert state["optimizer"]["state"]["a"]["exp_avg_sq"].tolist() == [8]
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [["a"], ["b.w"]]
    formats.convert(there, back, layout=shm_path / "layout.json")
    assert Path(back).read_bytes() == Path(source).read_bytes()


@pytest.mark.parametrize("groups", [False, True])
def test_training_goes_on_from_an_import_with_the_same_losses(shm_path: Path, groups: bool) -> None:
    """AdamW from a flat file continues bit by bit, also in two groups; hyperparameters are those of the optimizer."""
    training = tied(groups)
    train(training, 3)
    path = str(shm_path / "step_000003.bin")
    FLAT.write(state_of(training, step=3), path, Options(layout=Layout.of(*training)))
    assert os.path.getsize(path) == 8 + 12 * (28 + 8)
    fresh = tied(groups)
    with torch.no_grad():
        for param in fresh[0].parameters():
            param.fill_(9)
    formats.convert(path, str(shm_path / "ckpt"), model=fresh[0], optimizer=fresh[1])
    shardstore.load(str(shm_path / "ckpt"), into=state_of(fresh))
    assert train(fresh, 4, seed=5) == train(training, 4, seed=5)


def test_F07_ties_count_once(trained: tuple[Any, str], shm_path: Path) -> None:
    """A tied pair is one parameter in the file, exported from objects or from a store, with a layout or without."""
    training, path = trained
    assert struct.unpack("<ii", Path(path).read_bytes()[:8]) == (3, 28 + 8)
    del training[0].mask
    shardstore.save(state_of(training), str(shm_path / "ckpt"), step=3)
    formats.convert(str(shm_path / "ckpt"), str(shm_path / "again.bin"))
    assert (shm_path / "again.bin").read_bytes() == Path(path).read_bytes()


def test_a_tied_parameter_stands_where_its_first_name_does(shm_path: Path) -> None:
    """Also where the optimizer knows it by its second name: the model's iterator gives it under the first."""
    first, other = torch.full((2,), 1.0), torch.full((2,), 2.0)
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    adam = {"state": {"b": moments, "z": dict(moments)}, "param_groups": [{"params": ["b", "z"]}]}
    state = {"model": {"a": first, "b": other, "z": first}, "optimizer": adam, "step": 1}
    FlatFormat().write(state, str(shm_path / "x.bin"), Options())
    with formats.read(str(shm_path / "x.bin")) as found:
        assert numbers(found.state["flat"]["weights"]) == [1, 1, 2, 2]


def test_F01_offsets_in_64_bits(shm_path: Path) -> None:
    """The last numbers of a file of 2^31 - 1 parameters (26 GB, sparse) are read from the right place."""
    count = 2**31 - 1
    path = shm_path / "step_000001.bin"
    with path.open("wb") as file:
        file.write(struct.pack("<ii", 1, count))
        for third, value in enumerate((1.5, 2.5, 3.5)):
            file.seek(8 + 4 * (count * (third + 1) - 1))
            file.write(struct.pack("<f", value))
    layout = Layout({"big": (count - 1,), "last": (1,)})
    with formats.read(str(path), options=Options(layout=layout)) as found:
        own = found.state["optimizer"]["state"]["last"]
        assert [numbers(t) for t in (found.state["model"]["last"], own["exp_avg"], own["exp_avg_sq"])] == [
            [1.5],
            [2.5],
            [3.5],
        ]


class Huge(Lazy):
    """A tensor that is only planned with."""

    def buffers(self) -> Any:
        raise AssertionError("nothing is to be read")


def test_F01_more_parameters_than_an_int32_says_are_refused(shm_path: Path) -> None:
    """2^31 parameters are refused before anything is read or written."""
    parts = {name: Huge(TensorSpec("float32", (2**31,))) for name in ("weights", "exp_avg", "exp_avg_sq")}
    with pytest.raises(UnsupportedState, match="2,147,483,648 parameters are more than an int32"):
        FLAT.write({"flat": parts, "step": 1}, str(shm_path / "x.bin"), Options())
    assert not list(shm_path.iterdir())


@pytest.mark.parametrize(
    ("step", "count", "nbytes"),
    [(1, -1, 20), (1, 2**31 - 1, 20), (-1, 1, 20), (1, 1, 21), (1, 1, 19), (1, 0, 20), (1, 2, 20), (-(2**31), 0, 8)],
)
def test_F02_nonsense_in_the_head_is_refused(shm_path: Path, step: int, count: int, nbytes: int) -> None:
    """Signs, sizes and overflow are checked before anything of the rest is looked at."""
    path = put(shm_path / "step_000001.bin", struct.pack("<ii", step, count) + bytes(nbytes - 8))
    with pytest.raises(Damaged, match="step_000001"):
        formats.read(path)


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_F02_shorter_than_a_head(shm_path: Path, nbytes: int) -> None:
    """A file without a whole head is refused."""
    with pytest.raises(Damaged, match=f"{nbytes} bytes"):
        formats.read(put(shm_path / "step_1.bin", bytes(nbytes)))


def test_F02_no_parameters_at_all(shm_path: Path) -> None:
    """A count of 0 is a file of eight bytes, there and back."""
    path = put(shm_path / "step_000000.bin", flat_bytes(0))
    formats.convert(path, str(shm_path / "ckpt"))
    formats.convert(str(shm_path / "ckpt"), str(shm_path / "b.bin"))
    assert (shm_path / "b.bin").read_bytes() == bytes(8)


def parts(count: int = 2) -> dict[str, Any]:
    """What is imported without a layout, but for the step."""
    return {"flat": {name: torch.zeros(count) for name in ("weights", "exp_avg", "exp_avg_sq")}}


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor([3])])
def test_F06_whole_steps_of_any_kind(step: Any) -> None:
    """A step may be a number or a tensor, as long as it is whole."""
    assert planned({**parts(), "step": step}, Options())[0].step == 3


@pytest.mark.parametrize(
    "step",
    [
        3.5,
        2**31,
        -1,
        True,
        "3",
        math.nan,
        math.inf,
        torch.tensor(3.5),
        torch.tensor([3.0, 3.0]),
        2**70,
        torch.tensor(-1),
    ],
)
def test_F06_other_steps_are_refused(step: Any) -> None:
    """Steps that are not whole, or not an int32, are no steps of a flat file."""
    with pytest.raises(UnsupportedState, match="step"):
        planned({**parts(), "step": step}, Options())


def test_a_step_must_be_known_and_one() -> None:
    """Without a step nothing is written, nor with two different ones."""
    with pytest.raises(UnsupportedState, match="--step"):
        planned(parts(), Options())
    with pytest.raises(UnsupportedState, match="one step"):
        planned({**parts(), "step": 3}, Options(step=4))


def _steps(training: Any) -> None:
    training[1].state[training[0].emb.weight]["step"] += 2


def _frozen(training: Any) -> None:
    del training[1].state[training[0].norm.bias]


def _half(training: Any) -> None:
    training[1].state[training[0].norm.bias]["exp_avg"] = torch.zeros(4, dtype=torch.bfloat16)


def _fresh(training: Any) -> None:
    training[1].state.clear()


@pytest.mark.parametrize(
    ("change", "why"),
    [(_steps, "one step"), (_frozen, "frozen|lacks"), (_half, "bfloat16"), (_fresh, "no moments yet")],
)
def test_F09_states_that_a_flat_file_cannot_hold(shm_path: Path, change: Any, why: str) -> None:
    """Steps that differ, missing moments and other dtypes are refused with the reason, before a byte is written."""
    training = tied()
    train(training, 3)
    change(training)
    del training[0].mask
    with pytest.raises(UnsupportedState, match=why):
        FLAT.write(state_of(training, step=3), str(shm_path / "x.bin"), Options())
    assert not list(shm_path.iterdir())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "only Adam"),
        (torch.optim.Adagrad, "only Adam"),
    ],
    ids=["amsgrad", "sgd", "adagrad"],
)
def test_F09_other_optimizers(shm_path: Path, make: Any, why: str) -> None:
    """Only Adam's two moments have room."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedState, match=why):
        FLAT.write({"model": model, "optimizer": optimizer}, str(shm_path / "x.bin"), Options(step=1))


def test_what_would_be_lost_is_refused(trained: tuple[Any, str], shm_path: Path) -> None:
    """Buffers and further sections are named, and left out only when that is asked for."""
    training, path = trained
    shardstore.save(state_of(training, extra={"x": 1}), str(shm_path / "ckpt"), step=3)
    out = str(shm_path / "out.bin")
    with pytest.raises(UnsupportedState, match=r"extra.*--only"):
        formats.convert(str(shm_path / "ckpt"), out)
    with pytest.raises(UnsupportedState, match=r"mask.*left_out"):
        formats.convert(str(shm_path / "ckpt"), out, only=["model", "optimizer"])
    formats.convert(str(shm_path / "ckpt"), out, only=["model", "optimizer"], layout=Layout.of(*training))
    assert Path(out).read_bytes() == Path(path).read_bytes()


def test_F09_moments_without_a_parameter(shm_path: Path) -> None:
    """An optimizer of more than the model can't lose a part of its state unseen."""
    training = tied()
    train(training, 2)
    del training[0].mask
    shardstore.save(state_of(training), str(shm_path / "ckpt"), step=2)
    with formats.read(str(shm_path / "ckpt")) as found:
        for name in ("emb.weight", "head.weight"):
            del found.state["model"][name]
        with pytest.raises(UnsupportedState, match="no parameter of that name"):
            FLAT.write(found.state, str(shm_path / "x.bin"), Options(step=2))
    assert not (shm_path / "x.bin").exists()


@pytest.mark.parametrize(
    "layout",
    ["[", "{}", '{"parameters": 3}', '[["a"]]', '[["a", [-1]]]', '[["a", [1]], ["a", [1]]]', '[["a", [true]]]',
     '{"parameters": [], "more": 1}', '{"parameters": [["a", [1]]], "ties": {"b": "c"}}',
     '{"parameters": [["a", [1]]], "groups": [["b"]]}', '[["a", [5]]]'],
)  # fmt: skip
def test_layouts_that_make_no_sense(shm_path: Path, layout: str) -> None:
    """A wrong layout is a wrong argument, said before anything is written."""
    (shm_path / "l.json").write_text(layout)
    path = put(shm_path / "step_000001.bin", flat_bytes(1, 1, 2, 3))
    with pytest.raises(InvalidArgument):
        formats.convert(path, str(shm_path / "ckpt"), layout=shm_path / "l.json")
    assert not (shm_path / "ckpt").exists()


def test_a_name_that_says_another_step_is_told(shm_path: Path) -> None:
    """The head counts; a file that was renamed is a note."""
    made = formats.convert(put(shm_path / "step_000009.bin", flat_bytes(8, 1, 2, 3)), str(shm_path / "ckpt"))
    assert made.step == 8
    assert "step 9" in made.notes[0]


def test_a_file_that_shrinks_while_it_is_read(shm_path: Path) -> None:
    """Bytes that go away under a conversion are an error, and leave no checkpoint."""
    path = put(shm_path / "step_000001.bin", flat_bytes(1, 1, 2, 3))
    with formats.read(path) as found:
        os.truncate(path, 12)
        with pytest.raises(Damaged, match="ends at"):
            load(found.state["flat"]["exp_avg_sq"])
        with pytest.raises(Damaged):
            shardstore.save(found.state, str(shm_path / "ckpt"))
    with pytest.raises(ShardstoreError):
        shardstore.load(str(shm_path / "ckpt"))


KILLED = """
import os, signal, sys
import torch
from shardstore.formats import Options
from shardstore.formats.flat import FlatFormat
path, point = sys.argv[1], 0
torch.set_num_threads(1)  # a forked child has none of torch's threads
def state(value):
    parts = {n: torch.full((1_000_000,), value) for n in ("weights", "exp_avg", "exp_avg_sq")}
    return {"flat": parts, "step": int(value)}
def die_at(point):
    left = [point]
    def counted(call):
        def wrapper(*a, **k):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*a, **k)
        return wrapper
    for name in "open write writev pwrite pwritev fsync fdatasync replace rename unlink preadv close".split():
        setattr(os, name, counted(getattr(os, name)))
FlatFormat().write(state(1.0), path, Options())
new = state(2.0)
old = open(path, "rb").read()
ended, seen = False, []
while not ended:
    pid = os.fork()
    if not pid:
        die_at(point)
        FlatFormat().write(new, path, Options(overwrite=True))
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    now = open(path, "rb").read()
    seen.append("old" if now == old else "new" if len(now) == len(old) and now[:4] == b"\\x02\\0\\0\\0" else "BROKEN")
    if not ended and seen[-1] == "new":
        open(path, "wb").write(old)
    point += 1 if point < 12 else 3
print(",".join(seen))
"""


@pytest.mark.slow
@pytest.mark.torture
def test_F08_overwriting_leaves_the_old_file_or_the_new_one(shm_path: Path) -> None:
    """SIGKILL at every operation of an overwrite: whoever looks finds one whole file, and in the end the new one."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(shm_path / "step.bin")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    seen = done.stdout.strip().split(",")
    assert len(seen) >= 20, seen
    assert set(seen) == {"old", "new"}, seen
    assert seen[-1] == "new"


def test_nothing_is_overwritten_unasked(trained: tuple[Any, str], shm_path: Path) -> None:
    """A file that is there stays as it is, and no other file comes beside it."""
    training, path = trained
    before = Path(path).read_bytes()
    with pytest.raises(CheckpointExists):
        FLAT.write(state_of(training), path, Options(layout=Layout.of(*training)))
    assert Path(path).read_bytes() == before
    assert [one.name for one in shm_path.iterdir()] == [Path(path).name]


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_bytes_are_there(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Mutated and truncated files are read or refused by an error of ours, and what is read has the right size."""
    path = tmp_path_factory.getbasetemp() / "step_000005.bin"
    path.write_bytes(data.draw(mutations(flat_bytes(5, *range(12)))))
    try:
        with formats.read(str(path)) as found:
            assert path.stat().st_size == 8 + 12 * len(numbers(found.state["flat"]["weights"]))
    except ShardstoreError as error:
        assert "step_000005.bin" in str(error)  # noqa: PT017 - whichever it is
