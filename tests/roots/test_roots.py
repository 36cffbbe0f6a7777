"""One checkpoint over several roots."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import shardstore
from shardstore.check import plan_leftovers, remove
from shardstore.cli import main
from shardstore.errors import CheckpointExists, CommitUnknown, Damaged, InvalidArgument, StoreError, Unfinished
from shardstore.storage import LocalStore, Store
from tests.kit.faults import Fault, FaultyStore
from tests.kit.inject import injected


def state(value: float = 1.0) -> dict[str, Any]:
    """A dozen tensors in two sections, and plain data."""
    model = {f"h.{n}.weight": torch.full((50, n + 1), value + n) for n in range(9)}
    return {"model": model, "moments": {name: tensor * 2 for name, tensor in model.items()}, "step": 3}


def same(loaded: Any, wanted: Any) -> bool:
    """Whether a state came back."""
    sections = ("model", "moments")
    tensors = all(torch.equal(loaded[s][name], t) for s in sections for name, t in wanted[s].items())
    return bool(tensors and loaded["step"] == wanted["step"])


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three places on three disks, as it were."""
    for name in "abc":
        (tmp_path / name).mkdir()
    return [tmp_path / name / "ckpt" for name in "abc"]


def test_every_root_holds_a_part_and_any_order_reads_it(roots: list[Path]):
    """Shards are spread by bytes; the index lies in the first; all six orders of the roots load, open and verify."""
    shardstore.save(state(), roots, shards=6)
    assert [(root / "shardstore.json").exists() for root in roots] == [True, False, False]
    sizes = [sum(f.stat().st_size for f in root.rglob("*.safetensors")) for root in roots]
    assert min(sizes) > 0.5 * max(sizes)
    assert str(roots[0]) not in (roots[0] / "shardstore.json").read_text()  # no root is named by its path
    for order in itertools.permutations(roots):
        assert same(shardstore.load(list(order)), state())
        assert shardstore.verify(list(order)).ok
        with shardstore.open(list(order)) as checkpoint:
            assert torch.equal(checkpoint["model/h.8.weight"][:2], state()["model"]["h.8.weight"][:2])


def test_the_folders_may_be_moved(roots: list[Path], tmp_path: Path):
    """Marks tell which root is which, not paths."""
    shardstore.save(state(), roots, shards=6)
    moved = [tmp_path / f"new-{n}" for n in range(3)]
    for old, new in zip(roots, moved, strict=True):
        shutil.move(old, new)
    assert same(shardstore.load(moved[::-1]), state())


WRONG: dict[str, Callable[[list[Path]], Any]] = {
    "one missing": lambda r: r[:2],
    "the first missing": lambda r: r[1:],
    "the first alone": lambda r: r[0],
    "the second alone": lambda r: r[1],
    "one twice": lambda r: [r[0], r[1], r[1]],
    "one twice, by another name": lambda r: [r[0], r[1], r[1].parent / "." / "ckpt"],
    "a wrong one": lambda r: [r[0], r[1], r[2].parent],
    "none": lambda r: [],
}


@pytest.mark.parametrize("choice", WRONG.values(), ids=WRONG)
def test_wrong_missing_and_doubled_roots_are_refused(roots: list[Path], choice: Callable[[list[Path]], Any]):
    """Refused by load and open, with a message that says which or how many."""
    shardstore.save(state(), roots, shards=6)
    for call in (shardstore.load, shardstore.open):
        with pytest.raises(InvalidArgument) as caught:
            call(choice(roots))
        assert any(word in str(caught.value) for word in ("ckpt", "at least one", str(roots[2].parent)))


def test_a_root_that_is_given_twice_is_refused_by_save(roots: list[Path]):
    """Before a byte is written."""
    with pytest.raises(InvalidArgument, match="twice"):
        shardstore.save(state(), [roots[0], roots[0]])
    assert not roots[0].exists()


def test_parts_of_two_checkpoints_are_told_apart(roots: list[Path], tmp_path: Path):
    """A root of another striped checkpoint is a wrong one."""
    (tmp_path / "d").mkdir()
    other = [tmp_path / "d" / name for name in "xyz"]
    shardstore.save(state(), roots)
    shardstore.save(state(2.0), other)
    with pytest.raises(InvalidArgument, match="no part"):
        shardstore.load([roots[0], roots[1], other[2]])
    with pytest.raises(InvalidArgument, match="of their own"):
        shardstore.load([roots[0], other[0], roots[1]])


def test_a_checkpoint_in_any_root_is_in_the_way(roots: list[Path]):
    """Nothing is overwritten by being made a root."""
    shardstore.save(state(), roots[1])
    with pytest.raises(CheckpointExists, match=str(roots[1])):
        shardstore.save(state(), roots)
    assert same(shardstore.load(roots[1]), state())


def test_overwrite_in_another_order(roots: list[Path]):
    """The same roots in another order are recognised; readers get the new state; what was replaced goes everywhere."""
    shardstore.save(state(), roots, shards=6)
    shardstore.save(state(5.0), [roots[2], roots[0], roots[1]], shards=5, overwrite=True)
    assert same(shardstore.load(roots), state(5.0))
    stores = [LocalStore(root) for root in roots]
    old = [left for left in plan_leftovers(*stores, grace=0.0) if left.removable]
    assert {left.root for left in old} == {0, 1, 2}
    assert [error for left in old for error in remove(left, *stores, grace=0.0)] == []
    assert plan_leftovers(*stores, grace=0.0) == []
    assert same(shardstore.load(roots), state(5.0))


def test_damage_in_any_root_is_named(roots: list[Path]):
    """A flipped bit, and a missing file, in a root that is not the first."""
    shardstore.save(state(), roots, shards=6)
    shard = next(roots[2].rglob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Damaged, match=shard.name):
        shardstore.load(roots)
    assert [p.file.rpartition("/")[2] for p in shardstore.verify(roots).checkpoints[0].problems] == [shard.name]
    shard.unlink()
    with pytest.raises(Damaged, match=shard.name):
        shardstore.load(roots)


def test_prune_looks_at_all_roots_or_none(roots: list[Path]):
    """A dead striped save: each root alone is refused and keeps everything; all together they are cleaned."""
    faults: list[FaultyStore] = []

    def wrap(store: Store) -> Store:
        faulty = FaultyStore(store, Fault(1, calls=frozenset({"delete"}), times=99))  # nothing can be cleaned up
        faults.append(faulty)
        return FaultyStore(faulty, Fault(1, calls=frozenset({"put"}), key="shardstore.json", times=99, errno=28))

    with injected(wrap), pytest.raises(StoreError):
        shardstore.save(state(), roots, shards=6)
    files = sorted(path for root in roots for path in root.rglob("*") if path.is_file())
    assert len(files) >= 9
    long_ago = files[0].stat().st_mtime - 30 * 3600
    for mark in (path for path in files if path.name.startswith("attempt-")):
        os.utime(mark, (long_ago, long_ago))
    run = CliRunner().invoke
    for root in roots:
        refused = run(main, ["prune", "--leftovers", "--yes", str(root)])
        assert refused.exit_code == 2, refused.output
        assert "together" in refused.output
    assert sorted(path for root in roots for path in root.rglob("*") if path.is_file()) == files
    cleaned = run(main, ["prune", "--leftovers", "--yes", "--json", *map(str, roots[::-1])])
    assert cleaned.exit_code == 0, cleaned.output
    assert all(left["removed"] for left in json.loads(cleaned.stdout)["leftovers"])
    assert [path for root in roots for path in root.rglob("*") if path.is_file()] == []


def test_the_command_verifies_all_roots(roots: list[Path]):
    """`verify` takes the roots in any order; one of them alone is refused."""
    shardstore.save(state(), roots, shards=6)
    run = CliRunner().invoke
    assert run(main, ["verify", *map(str, roots[::-1])]).exit_code == 0
    assert run(main, ["verify", str(roots[0])]).exit_code == 2
    assert run(main, ["verify", str(roots[1])]).exit_code == 2


def test_a_mix_of_stores(tmp_path: Path):
    """A folder and another kind of store."""
    places = [tmp_path / "x", "memory://roots/x"]
    shardstore.save(state(), places, shards=4)
    assert same(shardstore.load(places[::-1]), state())


def test_a_failed_save_leaves_no_root_behind(roots: list[Path]):
    """A save that fails in one root is cleaned up in all."""
    shutil.rmtree(roots[2].parent)
    with pytest.raises(StoreError, match=str(roots[2])):
        shardstore.save(state(), roots, shards=6)
    assert [path for root in roots if root.exists() for path in root.rglob("*") if path.is_file()] == []


def test_a_foreign_index_of_another_tool_is_left_alone(tmp_path: Path):
    """A Hugging Face folder that is saved into keeps its own index, and the listener hears of it."""
    place = tmp_path / "hf"
    place.mkdir()
    foreign = '{"weight_map": {"a": "b.safetensors"}}'
    (place / "model.safetensors.index.json").write_text(foreign)
    heard: list[Any] = []
    shardstore.save(state(), place, listener=heard.append)
    assert (place / "model.safetensors.index.json").read_text() == foreign
    assert any("another tool" in str(event) for event in heard)
    assert same(shardstore.load(place), state())


@pytest.mark.parametrize("unclear_first", [False, True])
def test_a_no_after_an_unclear_answer_removes_nothing(tmp_path: Path, unclear_first: bool):
    """The first put of the index got no answer and may land late; a later definite "no" must leave its shards.

    A "no" to the first put is the last word: then all that was written goes.
    """

    def wrap(store: Store) -> Store:
        full = FaultyStore(store, Fault(1, errno=28, calls=frozenset({"put"}), key="shardstore.json"))
        return FaultyStore(full, Fault(1, calls=frozenset({"put"}), key="shardstore.json")) if unclear_first else full

    with injected(wrap), pytest.raises(StoreError):
        shardstore.save(state(), tmp_path / "x", shards=4)
    left = [path for path in (tmp_path / "x").rglob("*.safetensors") if path.is_file()]
    assert len(left) == (4 if unclear_first else 0)


def test_a_striped_save_without_its_commit_is_unfinished(roots: list[Path]):
    """All roots given, and no index: an unfinished save, not a wrong choice of roots; the store may answer later."""
    with (
        injected(lambda s: FaultyStore(s, Fault(1, calls=frozenset({"put"}), key="shardstore.json", times=99))),
        pytest.raises(CommitUnknown),
    ):
        shardstore.save(state(), roots, shards=6)
    with pytest.raises(Unfinished):
        shardstore.load(roots)
    assert shardstore.verify(roots).exit_code == Unfinished.exit_code
    shardstore.save(state(3.0), roots, shards=6)
    assert same(shardstore.load(roots[::-1]), state(3.0))
