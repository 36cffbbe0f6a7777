"""What several ranks may hold, and what is refused: by name, with the remedy, before a byte is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from tests.ranks.conftest import Ranks
from tests.ranks.states import lists_of, values


def stored_bytes(folder: Path) -> int:
    """Bytes of tensors in all files."""
    files = [path.read_bytes() for path in folder.rglob("*.safetensors")]
    return sum(len(data) - 8 - int.from_bytes(data[:8], "little") for data in files)


def test_D07_empty_shards(tmp_path: Path, ranks: Ranks):
    """6 rows, 1 row and none on 4 ranks, and columns: saved by 4 and by 3, loaded by 4, 3, 2 and 1, and as data."""
    expected = {
        "/six/w": [[row * 3 + column + 0.5 for column in range(3)] for row in range(6)],
        "/one/w": [[0.5, 1.5, 2.5]], "/none/w": [],
        "/columns/w": [[row * 5 + column + 0.5 for column in range(5)] for row in range(3)], "/scalar/w": 2.5,
    }  # fmt: skip
    for before, sizes in ((4, (4, 3, 2, 1)), (3, (4,))):
        (tmp_path / str(before)).mkdir()
        url = f"{tmp_path}/{before}"
        saved = ranks.run("save_each", before, url=url, names=["few_rows"])
        assert all(told["few_rows"].get("digest") for told in saved), saved
        for size in sizes:
            assert ranks.run("load_each", size, url=url, names=["few_rows"]) == [{"few_rows": expected}] * size
        data = shardstore.load(f"{url}/few_rows")
        assert lists_of(data) == expected
        assert data["none"]["w"].shape == (0, 3)


REFUSED = {
    "different_plain": ("model/w", "rank 0 and rank 1 hold different values", "PerRank"),
    "different_large": ("model/w", "rank 0 and rank 1 hold different values", "PerRank"),
    "different_rows": ("model/w", "rank 0 and rank 1 hold different values", "of sharded tensors make DTensors"),
    "different_shape": ("model/w", "rank 0 has float32 (2, 3), rank 1 float32 (3, 3)", "sharded tensors make DTensors"),
    "different_number": ("seed/", "rank 0 has 100, rank 1 101", "PerRank"),
    "per_rank_not_on_all": ("seed/", "rank 1 a PerRank", "PerRank"),
    "partial": ("model/w", "is Partial", "redistribute()"),
    "tied_on_one": ("model/b", "tied to model/a", ""),
    "tied_whole_on_one": ("model/b", "hold different values", ""),
    "split_per_rank": ("model/w", "a DTensor is no value of one rank", "to_local()"),
    "by_number": ("optimizer/state.0", "rank 0 has", "save optimizers themselves, not their state_dict()"),
    "fsdp1": ("model/", "FSDP1", "fully_shard"),
    "old_shards": ("model/w", "ShardedTensor", "DTensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_refused(tmp_path: Path, ranks: Ranks):
    """D06 and others.

    Plain tensors and numbers that differ from rank to rank, Megatron-like parts under one name, unfinished sums,
    optimizers by number, FSDP1, ShardedTensor: named on every rank, with the remedy; nothing stays.
    """
    found = ranks.run("save_each", 2, url=str(tmp_path), names=list(REFUSED))
    for name, (path, what, remedy) in REFUSED.items():
        told = [one[name] for one in found]
        kinds = {one.get("error") for one in told}
        assert kinds <= {"UnsupportedState", "PerError", "PeerError"}, told
        assert "UnsupportedState" in kinds, told
        assert all(path in one["text"] and what in one["text"] and remedy in one["text"] for one in told), told
        left = [path.name for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert not left or (name == "tied_on_one" and not [file for file in left if not file.startswith("attempt-")])


def test_D06_values_of_each_rank(tmp_path: Path, ranks: Ranks):
    """PerRank.

    Each rank gets its own back, tensors of different sizes among them; another number of ranks is an error, unless a
    rule says what is to be.
    """
    url = f"{tmp_path}/per_rank"
    ranks.run("save_each", 3, url=str(tmp_path), names=["per_rank"])
    for rank, seen in enumerate(ranks.run("per_rank_again", 3, url=url)):
        assert "error" not in seen["strict"]
        assert (seen["seed"], seen["rng"]) == (rank, [rank] * (5 + rank))
        assert (seen["ruled"], seen["data"]) == (rank, [0, 1, 2])
    for rank, seen in enumerate(ranks.run("per_rank_again", 2, url=url)):
        assert seen["strict"]["error"] == "Mismatch"
        assert "3 ranks" in seen["strict"]["text"]
        assert (seen["ruled"], seen["data"]) == ([3, rank, 2], [0, 1, 2])
    alone = shardstore.load(url)
    assert alone["seed"].values == (0, 1, 2)
    with pytest.raises(shardstore.Mismatch, match="3 ranks"):
        shardstore.load(url, into={"seed": shardstore.PerRank(0)})
    assert shardstore.verify(url).ok


def test_D14_replicas_are_stored_once_and_written_by_all(tmp_path: Path, ranks: Ranks):
    """Tensors that all 4 ranks hold, as DTensors and as plain ones.

    Each lies on disk once, every rank writes a quarter, and the small ones share a file.
    """
    ranks.run("save_each", 4, url=str(tmp_path), names=["replicated"])
    sizes = [path.stat().st_size for path in (tmp_path / "replicated").rglob("*.safetensors")]
    unique = 16 * 200 * 200 * 4 + 50 * 4
    assert len(sizes) == 4
    assert unique <= sum(sizes) < unique * 1.02
    assert max(sizes) < 1.02 * unique / 4
    with shardstore.open(f"{tmp_path}/replicated") as lazy:
        assert len(lazy) == 66
    state = shardstore.load(f"{tmp_path}/replicated", only="tiny/*")
    assert state["tiny"]["t49"] == 49


def test_D13_loads_without_the_device_it_came_from(tmp_path: Path, ranks: Ranks):
    """Nothing in a checkpoint of DTensors says on which device they were; without ranks they are plain CPU tensors."""
    ranks.run("save_each", 2, url=str(tmp_path), names=["few_rows"])
    state = shardstore.load(f"{tmp_path}/few_rows")
    assert type(state["six"]["w"]) is torch.Tensor
    assert state["six"]["w"].device.type == "cpu"
    meta = (
        next((tmp_path / "few_rows").rglob("meta-*")).read_text() + (tmp_path / "few_rows/shardstore.json").read_text()
    )
    assert "cuda" not in meta
    assert "device" not in meta


def test_ties_survive(tmp_path: Path, ranks: Ranks):
    """Tied tensors, split so that the last ranks hold nothing of them, and on a mesh whose first rank holds nothing.

    Stored once, and one tensor again after a load.
    """
    ranks.run("save_each", 4, url=str(tmp_path), names=["tied", "reversed_mesh"])
    for name, pairs in (("tied", "ab cd"), ("reversed_mesh", "ab")):
        state = shardstore.load(f"{tmp_path}/{name}")["model"]
        for one, other in pairs.split():
            assert state[one].data_ptr() == state[other].data_ptr()
            assert state[one].flatten()[0] == 0.5
        assert stored_bytes(tmp_path / name) == 24 + 12 * (name == "tied")


def test_tensors_on_a_part_of_the_ranks(tmp_path: Path, ranks: Ranks):
    """DTensors on two of four ranks, of which the others hold an empty shell, and two such on different halves."""
    names = ["half_mesh", "two_halves"]
    assert all(
        told[name]["digest"] for told in ranks.run("save_each", 4, url=str(tmp_path), names=names) for name in names
    )
    state = shardstore.load(f"{tmp_path}/half_mesh")
    assert state["part"]["w"].flatten().tolist() == [at + 0.5 for at in range(10)]
    assert shardstore.load(f"{tmp_path}/two_halves")["model"]["b"].shape == (9, 2)
    found = ranks.run("load_halves", 4, url=str(tmp_path))
    assert found[0] == found[1] == [[at + 0.5 for at in range(10)], [at + 0.5 for at in range(14)]]
    assert found[2] == found[3] == [None, [at + 0.5 for at in range(14)]]


def test_optimizers_find_names_by_the_state_dict_of_the_model(tmp_path: Path, ranks: Ranks):
    """{"model": model.state_dict(), "optimizer": optimizer} with FSDP2, where ranks have empty parts."""
    found = ranks.run("save_each", 4, url=str(tmp_path), names=["by_state_dict"])
    assert all(told["by_state_dict"].get("digest") for told in found), found
    names = set(shardstore.load(f"{tmp_path}/by_state_dict")["optimizer"]["state"])
    assert names == {
        "inner.weight",
        "inner.bias",
        "middle.weight",
        "norm.weight",
        "norm.bias",
        "outer.weight",
        "outer.bias",
        "scale",
    }


@pytest.mark.parametrize("size", [2, 4])
def test_odd_states_come_back(tmp_path: Path, ranks: Ranks, size: int):
    """All are bit-equal after a load into others.

    Parts that are not contiguous, dtypes, two-dimensional splits, keys in another order or on one rank alone, bare
    Modules, several optimizers with a scheduler.
    """
    names = ["odd_layouts", "other_order", "bare_model", "more_optimizers"]
    assert ranks.run("round_trips", size, url=str(tmp_path), names=names) == [dict.fromkeys(names, True)] * size
    state = shardstore.load(f"{tmp_path}/odd_layouts")["model"]
    assert all(
        torch.equal(state[name].flatten(), values(state[name].numel())) for name in ("corners", "twice", "three")
    )
    assert torch.equal(state["columns"], values(4, 2 * size))
    assert torch.equal(state["turned"], values(3, 2).t().repeat(size, 1))
    merged = shardstore.load(f"{tmp_path}/other_order")
    assert merged["own"] == {rank: f"of {rank}" for rank in range(size)}
    assert merged["model"]["l"] == [1, 2]
    assert merged[5][1, 2] == 0.5


def test_damage_is_named_where_it_is_read(tmp_path: Path, ranks: Ranks):
    """A bit flips in what rank 1 needs.

    Its load fails by name, rank 0 reads only its own part; other dtypes and shapes are told before anything is touched.
    """
    found = ranks.run("damaged", 2, url=str(tmp_path / "c"))
    assert "error" not in found[0][0]
    assert found[1][0]["error"] == "Damaged"
    assert "model/w" in found[1][0]["text"]
    assert all("float64 (600, 3)" in one[1]["text"] and "float32 (601, 3)" in one[2]["text"] for one in found)


def test_an_optimizer_that_never_stepped(tmp_path: Path, ranks: Ranks):
    """No step is made to give it a state: it is saved as having none."""
    ranks.run("save_each", 2, url=str(tmp_path), names=["never_stepped"])
    assert shardstore.load(f"{tmp_path}/never_stepped")["optimizer"]["state"] == {}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("name", "size"), [("statistics", 2), ("statistics_in_stages", 4)])
def test_statistics_of_batch_norm_are_those_of_the_first_rank(tmp_path: Path, ranks: Ranks, name: str, size: int):
    """DDP with a BatchNorm saves by default though its running means differ, and an event says whose are kept."""
    notes: list[Any] = ranks.run("watched", size, url=str(tmp_path / "c"), name=name)
    assert len([note for note in notes[0] if "BatchNorm" in note]) == 1
    assert not [note for mine in notes[1:] for note in mine]
    means = [w for path, w in lists_of(shardstore.load(str(tmp_path / "c"))).items() if path.endswith("running_mean")]
    assert len(means) == max(1, size // 2)


def test_strings_that_are_no_unicode_in_a_per_rank(tmp_path: Path):
    """A lone surrogate comes back from a PerRank as it does from elsewhere."""
    shardstore.save({"a": "\ud800x", "b": shardstore.PerRank("\ud800x")}, str(tmp_path / "c"))
    state = shardstore.load(str(tmp_path / "c"))
    assert (state["a"], state["b"].value) == ("\ud800x", "\ud800x")


def test_numbers_of_other_types_are_not_equal(tmp_path: Path, ranks: Ranks):
    """1, True and 1.0, and the two zeros: refused like any values that differ, for one of them would get lost."""
    for mine in ranks.run("unequal_kinds", 2, url=str(tmp_path)):
        assert [one.get("error") for one in mine] == ["UnsupportedState"] * 3, mine
        assert all(one["text"].startswith("a/0") for one in mine), mine
