"""Every version reads the golden checkpoints of format 1 exactly, and this one still writes them byte by byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import shardstore
from shardstore.specs import DTYPES
from tests.golden import make, states
from tests.kit.damage import files_of, flip, index_of, meta_of, parts_of, shards_of
from tests.kit.same import assert_same, raw, ties

HERE = Path(__file__).parent / "golden"
NAMES = [*make.CASES, "pieces"]
MODES = pytest.mark.parametrize("options", [{}, {"mode": "map"}, {"threads": 1}], ids=["copy", "map", "one thread"])
PLAIN = ["dict", "OrderedDict", "Counter", "tuple", "set", "frozenset", "Size", "bytes", "bytearray", "int", "float"]
OTHERS = ["complex", "numpy", "ndarray", "dtype", "device", "Path", "datetime", "date", "time", "timedelta", "sparse"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each golden checkpoint."""
    return request.param


def test_every_byte_verifies(name: str):
    """Index, digests, headers, meta and the derived index are whole, and there is nothing else in the folders."""
    report = shardstore.verify(HERE / name)
    assert report.ok, report.checkpoints[0].problems
    found = report.checkpoints[0]
    assert found.attempt == make.ATTEMPT
    assert not found.leftovers
    assert not found.foreign
    assert sum(map(len, files_of(HERE / name).values())) < 40_000


@pytest.mark.parametrize("dtype", list(DTYPES))
@MODES
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes(dtype: str, options: dict[str, Any]):
    """A tensor of each dtype has exactly the bytes that were written down by hand, in the file and in memory."""
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    tensor = shardstore.load(HERE / "dtypes", only=f"model/{dtype}", **options)["model"][dtype]
    assert tensor.dtype == getattr(torch, dtype)
    assert raw(tensor) == states.little(dtype)
    assert_same(tensor, states.dtypes()["model"][dtype])
    head, data = parts_of((HERE / "dtypes" / shards_of(HERE / "dtypes")[0]).read_bytes())
    begin, end = head[dtype]["data_offsets"]
    assert data[begin:end] == states.little(dtype)
    assert head[dtype]["dtype"] == DTYPES[dtype].tag


@MODES
def test_values(options: dict[str, Any]):
    """Every tag of the format: types, order, bits, ties."""
    wanted = states.values()
    with make.registered():
        loaded = shardstore.load(HERE / "values", **options)
    one, two = loaded.pop("custom"), wanted.pop("custom")
    assert (type(one), one.x) == (states.Point, two.x)
    assert_same(one.at, two.at)
    assert_same(loaded, wanted)
    assert ties(loaded) == ties(wanted)
    with shardstore.open(HERE / "values") as ckpt:
        assert ckpt.step == 2**63 - 1


def test_values_have_every_tag_of_the_format():
    """The golden meta lacks no tag that the format page lists."""
    text = (HERE / "values" / meta_of(HERE / "values")).read_text()
    assert [tag for tag in [*PLAIN, *OTHERS, "custom"] if f'{{"$":"{tag}"' not in text] == []
    assert '"$tensors"' in text
    objects = (HERE / "objects" / meta_of(HERE / "objects")).read_text()
    assert all(f'"kind":"{kind}"' in objects for kind in ("module", "optimizer", "stateful"))
    assert '"left":["scheduler/lr_lambdas.0","scheduler/lr_lambdas.1"]' in objects


@MODES
@pytest.mark.parametrize("case", ["flat", "module"])
def test_flat_states(case: str, options: dict[str, Any]):
    """A flat state_dict, and a bare Module: the same data, with torch's versions; both go into a Module."""
    loaded = shardstore.load(HERE / case, **options)
    assert_same(dict(loaded), dict(states.flat()))
    assert loaded._metadata == states.flat()._metadata
    fresh = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    target = torch.nn.Sequential()
    target.add_module("a", fresh[0])
    target.add_module("n", fresh[1])
    shardstore.load(HERE / case, into=target)
    assert_same(target.state_dict(), states.flat())


def test_objects():
    """A Module, an Optimizer over parameters in another order, and a scheduler are restored; as data they are plain."""
    wanted = states.objects()
    fresh = states.objects()
    for parameter in fresh["model"].parameters():
        parameter.data.zero_()
    fresh["optimizer"].state.clear()
    fresh["step"] = 0
    shardstore.load(HERE / "objects", into=fresh)
    assert fresh["step"] == 2
    assert_same(fresh["model"].state_dict(), wanted["model"].state_dict())
    assert_same(fresh["optimizer"].state_dict()["state"], wanted["optimizer"].state_dict()["state"])
    assert fresh["scheduler"].state_dict() == wanted["scheduler"].state_dict()
    plain = shardstore.load(HERE / "objects")
    assert list(plain["optimizer"]["state"]) == ["a.weight", "a.bias"]
    assert plain["optimizer"]["param_groups"][1]["lr"] == 0.5


def test_nothing():
    """A state without a tensor."""
    assert_same(shardstore.load(HERE / "nothing"), {"n": 1})
    assert_same(shardstore.load(HERE / "nothing", mode="map"), {"n": 1})


# ------------------------------------------------------------------------------------------------ pieces


@MODES
def test_pieces(options: dict[str, Any]):
    """A tensor that lies in three pieces of three files is put together: whole, mapped, into any target, by slices."""
    wanted = states.pieces()
    assert_same(shardstore.load(HERE / "pieces", **options), wanted)
    assert_same(
        shardstore.load(HERE / "pieces", only="model/parts", **options), {"model": {"parts": wanted["model"]["parts"]}}
    )
    for target in (torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(4, 12)[:, ::2]):
        shardstore.load(HERE / "pieces", into={"model": {"whole": torch.zeros(4), "parts": target}})
        assert_same(target.contiguous(), wanted["model"]["parts"])


def test_slices_of_pieces_read_only_the_files_that_hold_them(tmp_path: Path):
    """Every box of the tensor is right; with the other files gone, what lies in the remaining ones still loads."""
    wanted = states.pieces()["model"]["parts"]
    place = tmp_path / "c"
    shutil.copytree(HERE / "pieces", place)
    with shardstore.open(place) as ckpt:
        for key in np.ndindex(4, 6):
            assert ckpt["model/parts"][key] == wanted[key]
        for a in range(4):
            for b in range(6):
                assert torch.equal(ckpt["model/parts"][a:, b:], wanted[a:, b:])
                assert torch.equal(ckpt["model/parts"][: a + 1, : b + 1], wanted[: a + 1, : b + 1])
    first, _, third = shards_of(place)
    (place / first).unlink()
    flip(place / third, (place / third).stat().st_size - 1)
    with shardstore.open(place) as ckpt:
        assert torch.equal(ckpt["model/parts"][2:, :3], wanted[2:, :3])
        for key in (slice(0, 1), (slice(2, 4), slice(3, 4)), slice(None)):
            with pytest.raises(shardstore.Damaged) as caught:
                ckpt["model/parts"][key]
            assert caught.value.tensors == ("model/parts",)
    problems = {problem.file: problem for problem in shardstore.verify(place).checkpoints[0].problems}
    assert set(problems) == {first, third}
    assert problems[third].tensors == ("model/parts",)


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_is_written_today_is_the_same(name: str):
    """The same state with the same attempt id gives the same files: shards, meta, and index but for versions."""
    wanted = files_of(HERE / name)
    made = make.pieces() if name == "pieces" else make.files(name)
    assert made.keys() == wanted.keys()
    for key in wanted:
        if key != "shardstore.json":
            assert made[key] == wanted[key], key
    document = index_of(HERE / name)
    text = make.pieces()["shardstore.json"] if name == "pieces" else made["shardstore.json"]
    old = (HERE / name / "shardstore.json").read_bytes()
    assert _without_versions(text, document) == _without_versions(old, document)


def _without_versions(text: bytes, document: dict[str, Any]) -> dict[str, Any]:
    import json

    made = json.loads(text)
    assert list(made) == list(document)
    return {key: value for key, value in made.items() if key not in {"versions", "sha256"}}


def test_safetensors_opens_every_shard(name: str):
    """The shards are what the safetensors library reads; of types that it lacks it shows the bytes."""
    for path in shards_of(HERE / name):
        if name == "dtypes":
            with safetensors.safe_open(HERE / name / path, "pt") as opened:
                assert set(opened.keys()) <= set(DTYPES)
        else:
            assert safetensors.torch.load_file(HERE / name / path)
