"""`diff`: structure, types, values and bits of two checkpoints, measured window by window."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings

import shardstore
from shardstore import PerRank, formats
from shardstore.cli import main
from shardstore.formats import Comparison
from shardstore.formats import diff as compared_places
from shardstore.run import Run
from tests.formats.weights import everything
from tests.kit import states
from tests.kit.damage import flip, shards_of
from tests.kit.faults import CountingStore
from tests.kit.inject import injected


@pytest.fixture
def compare(shm_path: Path) -> Callable[..., Comparison]:
    """Save two states and compare them."""
    count = iter(range(10**6))

    def run(a: Any, b: Any, **options: Any) -> Comparison:
        number = next(count)
        places = [shm_path / f"{number}{side}" for side in "ab"]
        for state, place in zip((a, b), places, strict=True):
            shardstore.save(state, place, **options)
        return compared_places(*places)

    return run


def model(**tensors: torch.Tensor) -> dict[str, Any]:
    """A state with weights and a value."""
    return {"model": tensors, "step": 1}


def paths(rows: Any) -> list[str]:
    """The paths of findings."""
    return [row.path for row in rows]


# ------------------------------------------------------------------------------------------------ equal


def test_the_same_twice(compare: Callable[..., Comparison]):
    """Every dtype, ties, odd names: no difference, and nothing was read, since the digests say so."""
    found = compare({"model": everything()}, {"model": everything()})
    assert found.same
    assert (found.structure, found.values, found.tensors, found.ties) == ([], [], [], [])
    assert found.equal == found.unread == len(everything())


def test_kinds_of_dicts_and_the_section_make_no_difference(shm_path: Path, compare: Callable[..., Comparison]):
    """An OrderedDict and a dict, in another order; a flat state and one with its section; another layout of shards."""
    one, two = torch.ones(3), torch.zeros(2)
    assert compare({"m": OrderedDict(a=one, b=two)}, {"m": {"b": two, "a": one}}).same
    assert compare({"a": one, "b": two}, {"model": {"a": one, "b": two}}).same
    shardstore.save({"model": everything()}, shm_path / "x", shards=5)
    shardstore.save({"model": everything()}, shm_path / "y", hash="sha256")
    found = formats.diff(shm_path / "x", shm_path / "y")
    assert found.same
    assert found.unread == 0  # digests of two kinds say nothing about each other


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states.states())
def test_any_state_is_equal_to_itself(shm_path: Path, state: Any):
    """Whatever a state holds, NaN and -0.0 included, comparing two saves of it, read or by digests, finds nothing."""
    for name, options in (("a", {"hash": "sha256"}), ("b", {}), ("c", {})):
        shardstore.save(state, shm_path / name, overwrite=True, **options)
    for a, b in (("a", "b"), ("b", "c")):
        found = formats.diff(shm_path / a, shm_path / b)
        assert found.same, found
        assert not found.ties


def test_equal_digests_are_not_read(shm_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two checkpoints that differ in one large tensor, only the shards of that one are read."""
    monkeypatch.setattr("shardstore.formats.store._SMALL", 0)  # as if these were large
    state = {f"w{n}": torch.full((1_200_000,), float(n)) for n in range(4)}
    shardstore.save({"model": state}, shm_path / "a", shards=4)
    state["w2"][5] += 1
    shardstore.save({"model": state}, shm_path / "b", shards=4)
    with injected(CountingStore) as stores:
        found = formats.diff(shm_path / "a", shm_path / "b")
    assert paths(found.tensors) == ["model/w2"]
    assert found.unread == 3
    read = sum(call.nbytes for store in stores for call in store.calls if call.name == "read_into")
    assert read < 28_000_000  # 4.8 MB of each, twice, and headers; all of it would be more than 38 MB


def test_equal_blocks_with_tensors_in_other_places(shm_path: Path):
    """Blocks with the same digests hold two tensors under swapped names: they are not taken for equal."""
    pad, one, two = torch.zeros(1_500_000), torch.full((4,), 1.0), torch.full((4,), 2.0)
    shardstore.save({"model": {"pad": pad, "x": one, "y": two}}, shm_path / "a", shards=1)
    shardstore.save({"model": {"pad": pad, "y": one, "x": two}}, shm_path / "b", shards=1)
    found = formats.diff(shm_path / "a", shm_path / "b")
    assert sorted(paths(found.tensors)) == ["model/x", "model/y"]


def test_equal_digests_of_a_damaged_shard_say_what_was_saved(shm_path: Path):
    """Digests tell what was saved: damage on the disk is `verify`'s to find, and no difference between the two."""
    for name in "ab":
        shardstore.save({"model": {"w": torch.ones(2_000_000)}}, shm_path / name)
    shard = shm_path / "a" / shards_of(shm_path / "a")[0]
    flip(shard, shard.stat().st_size - 1)
    assert formats.diff(shm_path / "a", shm_path / "b").same


# ------------------------------------------------------------------------------------------------ different


def test_structure(compare: Callable[..., Comparison]):
    """What one side lacks, other containers, dtypes and shapes; of a missing dict only the dict is named."""
    a = {"model": {"w": torch.ones(2), "x": torch.ones(2), "d": torch.ones(3)}, "o": {"p": {"q": 1}}, "l": [1], "t": 1}
    b = {"model": {"w": torch.ones(2), "x": torch.ones(2, 1), "d": torch.ones(3).double()}, "o": {}, "l": (1,),
         "t": torch.ones(1), "n": 2}  # fmt: skip
    found = compare(a, b)
    assert {row.path: (row.a, row.b) for row in found.structure} == {
        "model/x": ("float32 [2]", "float32 [2, 1]"), "model/d": ("float32 [3]", "float64 [3]"),
        "o/p": ("a dict", None), "l": ("a list", "a tuple"), "t": ("1", "float32 [1]"), "n": (None, "2"),
    }  # fmt: skip
    assert not found.same
    assert paths(found.tensors) == ["model/d"]  # measured across dtypes: no value differs
    assert found.tensors[0].max_abs == 0


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True), (1, True, False), (1, 1.0, False), (0.0, -0.0, False), (math.nan, math.nan, True),
        (math.nan, -math.nan, False), (2**100, 2**100, True), ("a", "b", False), (b"a", b"a", True), (1j, 1j, True),
        (complex(0, 0.0), complex(0, -0.0), False), ({1, 2}, {2, 1}, True), (None, None, True),
        (np.float32(1), np.float32(1), True), (np.float32(1), np.float64(1), False), (torch.float32, torch.int8, False),
        (np.arange(3), np.arange(3), True), (np.arange(3), np.arange(3) + 1, False), (Path("a"), Path("a"), True),
    ],
    ids=repr,
)  # fmt: skip
def test_values(compare: Callable[..., Comparison], a: Any, b: Any, same: bool):
    """Plain values differ by type and bits."""
    found = compare({"v": a}, {"v": b})
    assert found.same == same
    assert paths(found.values) == ([] if same else ["v"])


def test_measures(compare: Callable[..., Comparison]):
    """Largest and mean difference, relative norm, counts of changed, NaN and infinite elements."""
    a = torch.tensor([3.0, 4.0, math.nan, math.inf, 0.0, 0.0])
    b = torch.tensor([3.0, 6.0, math.nan, 1.0, math.nan, -0.0])
    (change,) = compare(model(w=a), model(w=b)).tensors
    assert (change.elements, change.changed) == (6, 4)
    assert change.max_abs == 2.0
    assert change.mean_abs == pytest.approx(2 / 3)  # of three that are finite on both sides
    assert change.relative == pytest.approx(2 / 5)
    assert (change.nans, change.infs) == ((1, 2), (1, 0))


def test_measures_over_many_windows(compare: Callable[..., Comparison]):
    """A tensor larger than a window is measured as a whole, against numpy."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(700, 1001, generator=generator)
    b = a + torch.randn(700, 1001, generator=generator) * (torch.rand(700, 1001, generator=generator) > 0.9)
    (change,) = compare(model(w=a), model(w=b)).tensors
    away = (b.double() - a.double()).abs()
    assert change.changed == int((a != b).sum())
    assert change.max_abs == float(away.max())
    assert change.mean_abs == pytest.approx(float(away.mean()))
    assert change.relative == pytest.approx(float(away.norm() / a.double().norm()))


def test_the_most_changed_come_first(compare: Callable[..., Comparison]):
    """Sorted by relative change; a change from nothing, and one without numbers, before all."""
    a = {name: torch.ones(4) for name in ("little", "much", "same")} | {"zero": torch.zeros(4)}
    b = {"little": a["little"] * 1.001, "much": a["much"] * 3, "same": a["same"], "zero": torch.ones(4)}
    found = compare(model(**a), model(**b))
    assert paths(found.tensors) == ["model/zero", "model/much", "model/little"]
    assert found.tensors[0].relative == math.inf


@pytest.mark.parametrize("name", sorted(everything()))
def test_every_dtype_is_measured(compare: Callable[..., Comparison], name: str):
    """A changed bit in a tensor of any dtype is one changed element."""
    tensor = everything()[name].contiguous()
    if not tensor.numel():
        return
    other = tensor.clone()
    other.view(-1).view(torch.uint8)[0] ^= 1
    (change,) = compare(model(w=tensor), model(w=other)).tensors
    assert change.changed == 1
    assert (change.max_abs is None) == (name == "t.float4_e2m1fn_x2")


def test_ties_are_told_and_no_difference(shm_path: Path):
    """The same values, tied on one side only: exit 0, and a line that says so."""
    tied = torch.ones(3)
    shardstore.save({"model": {"a": tied, "b": tied}}, shm_path / "a")
    shardstore.save({"model": {"a": tied, "b": tied.clone()}}, shm_path / "b")
    found = formats.diff(shm_path / "a", shm_path / "b")
    assert found.same
    assert [(row.path, row.a, row.b) for row in found.ties] == [("model/b", "= model/a", "alone")]


def test_values_per_rank(compare: Callable[..., Comparison]):
    """Tensors in them are compared as any others, also deep inside."""
    one, two = ({"own": PerRank({"t": torch.arange(5000)}), "w": torch.ones(1)} for _ in "ab")
    assert compare(one, two).same
    two["own"].value["t"][2500] = 0
    assert paths(compare(one, two).tensors) == ["own/0.t"]


def test_pieces_by_digests(shm_path: Path):
    """A tensor in pieces is compared with one in a piece by reading, with itself by digests."""
    golden = Path(__file__).parents[1] / "golden" / "pieces"
    shardstore.save(shardstore.load(golden), shm_path / "whole")
    assert formats.diff(golden, golden).unread == 2
    found = formats.diff(golden, shm_path / "whole")
    assert (found.same, found.unread) == (True, 0)


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def call() -> Callable[..., Result]:
    """Call the command line in this process."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words], prog_name="shardstore")


def test_the_command(shm_path: Path, call: Callable[..., Result]):
    """Exit 0 and 8; text for people, one document for scripts, infinities as text."""
    shardstore.save(model(w=torch.zeros(3), v=torch.ones(2)), shm_path / "a")
    shardstore.save({"model": {"w": torch.ones(3), "v": torch.ones(2)}, "step": 2}, shm_path / "b")
    result = call("diff", shm_path / "a", shm_path / "a")
    assert (result.exit_code, result.stdout) == (0, "the same: 2 tensors equal, 2 of them by digests\n")
    result = call("diff", shm_path / "a", shm_path / "b")
    assert result.exit_code == 8
    assert result.stdout.splitlines()[0] == "step: 1 -> 2"
    assert result.stdout.splitlines()[1].split() == [
        "TENSOR", "DTYPE", "SHAPE", "CHANGED", "MAX", "MEAN", "RELATIVE", "NAN", "INF",
    ]  # fmt: skip
    assert result.stdout.splitlines()[2].split() == ["model/w", "float32", "3", "3", "1", "1", "inf", "0", "0"]
    assert result.stdout.splitlines()[3].startswith("different: 1 tensor, 1 value; 1 tensor equal")
    result = call("diff", shm_path / "a", shm_path / "b", "--json")
    document = json.loads(result.stdout)
    assert (document["exit_code"], document["same"], document["values"]) == (
        8, False, [{"path": "step", "a": "1", "b": "2"}],
    )  # fmt: skip
    assert document["tensors"][0]["relative"] == "inf"


def test_the_command_takes_checkpoints_of_a_run_and_other_formats(shm_path: Path, call: Callable[..., Result]):
    """RUN@STEP against a folder of Hugging Face; a place with nothing is 5."""
    from tests.kit.runs import Trainer

    with Run(shm_path / "run") as run:
        trainer = Trainer(run)
        trainer.save(100)
        trainer.save(200)
    formats.convert(f"{shm_path}/run@100", shm_path / "hf", to_format="huggingface")
    assert call("diff", f"{shm_path}/run@100", shm_path / "hf").exit_code == 0
    assert call("diff", f"{shm_path}/run@200", shm_path / "hf").exit_code == 8
    assert call("diff", f"{shm_path}/run@100", shm_path / "nothing").exit_code == 5
