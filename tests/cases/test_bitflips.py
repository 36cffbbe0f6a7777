"""One wrong bit anywhere, files that are cut, missing, swapped, or none at all: always an error with the place."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.errors import CheckpointNotFound, Damaged, StoreError
from tests.kit.damage import files_of, flip, index_of, meta_of, parts_of, shards_of
from tests.kit.faults import FlippingStore, Wrapper
from tests.kit.inject import injected
from tests.kit.same import assert_same

BLOCK = 4 * 1024 * 1024
HF = "model.safetensors.index.json"
INDEX = "shardstore.json"
SMALL = {
    "model": {"w": torch.arange(6.0), "b": torch.ones(3, dtype=torch.int16), "e": torch.zeros(0)},
    "optimizer": {"m": torch.zeros(2), "step": torch.tensor(3)},
    "n": 3,
}


def large() -> dict[str, Any]:
    """A state of several blocks in two shards: large tensors, small ones beside them, and one that crosses blocks."""
    made = torch.Generator().manual_seed(5)
    return {
        "model": {
            "a": torch.randn(2_600_000, generator=made), "b": torch.randn(50, generator=made),
            "c": torch.randn(1_100, 1_000, generator=made), "d": torch.randn(3, generator=made).to(torch.bfloat16),
        },
        "optimizer": {"m": torch.randn(700_000, generator=made), "v": torch.arange(9)},
        "step": 4,
    }  # fmt: skip


def zeros(state: Any) -> Any:
    """A target like a state, with other values."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 77)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return None


def tensors_of(folder: Path, file: str) -> dict[str, tuple[int, int]]:
    """Path -> (begin, end) in the file of every tensor in a shard, from the shard's own header."""
    head, data = parts_of((folder / file).read_bytes())
    start = (folder / file).stat().st_size - len(data)
    prefix = "" if "/" in file else "model/"
    return {
        prefix + name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in head.items()
        if name != "__metadata__"
    }


def in_block(folder: Path, file: str, block: int) -> set[str]:
    """Paths of the tensors that have bytes in a block of a file."""
    if not file.endswith("safetensors"):
        return set()
    first, last = block * BLOCK, (block + 1) * BLOCK
    return {
        path for path, (begin, end) in tensors_of(folder, file).items() if begin < end and begin < last and end > first
    }


def data_files(folder: Path) -> list[str]:
    """Shards and meta."""
    return [*shards_of(folder), meta_of(folder)]


def failing_verify(folder: Path, cli: Any = None) -> Any:
    """The one problem that verify finds."""
    report = shardstore.verify(folder)
    assert not report.ok
    assert report.exit_code == 3
    (problem,) = report.checkpoints[0].problems
    if cli:
        result = cli("verify", folder)
        assert result.exit_code == 3
        assert problem.file in result.output
        assert all(tensor in result.output for tensor in problem.tensors)
        document = json.loads(cli("verify", folder, "--json").stdout)
        assert document["checkpoints"][0]["problems"][0]["file"] == problem.file
    return problem


# ------------------------------------------------------------------------------------------------ every byte


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint; tests leave it as it was."""
    place = tmp_path_factory.mktemp("small") / "c"
    shardstore.save(SMALL, place, shards=2)
    return place


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("which", ["shard of weights", "other shard", "meta", "index", "derived"])
def test_every_byte_of_a_small_checkpoint(shm_path: Path, which: str, part: int):
    """Each byte of each file with one bit flipped: load and verify fail and name file, block and tensors.

    The derived index is for others only: loading doesn't need it, but verify names it as well.
    """
    place = shm_path / "c"
    shardstore.save(SMALL, place, shards=2)
    shards = shards_of(place)
    weights, others = {"model/w", "model/b"}, {"optimizer/m", "optimizer/step"}
    names = {
        "shard of weights": (shards[0], weights),
        "other shard": (shards[1], others),
        "meta": (meta_of(place), set()),
    }
    name, inside = {**names, "index": (INDEX, set()), "derived": (HF, set())}[which]
    assert in_block(place, name, 0) == inside
    size = (place / name).stat().st_size
    for byte in range(part, size, 4):
        flip(place / name, byte, byte // 4 % 8)
        if which == "derived":
            assert_same(shardstore.load(place), SMALL)
        else:
            with pytest.raises(Damaged, match=re.escape(name)) as caught:
                shardstore.load(place)
            assert caught.value.file == name
            assert set(caught.value.tensors) == inside, byte
            assert caught.value.blocks == (() if which == "index" else (0,))
        problem = failing_verify(place)
        assert problem.file == name
        assert set(problem.tensors) == inside
        assert problem.kind == {"index": "index", "derived": "derived"}.get(which, "damaged")
        flip(place / name, byte, byte // 4 % 8)
    assert shardstore.verify(place).ok
    assert_same(shardstore.load(place), SMALL)


@pytest.mark.parametrize("bit", range(8))
def test_every_bit_of_some_bytes(small: Path, tmp_path: Path, bit: int):
    """No bit is special."""
    place = tmp_path / "c"
    shutil.copytree(small, place)
    for name in (*data_files(place), INDEX):
        for byte in (0, 7, 9, (place / name).stat().st_size - 1):
            flip(place / name, byte, bit)
            with pytest.raises(Damaged, match=re.escape(name)):
                shardstore.load(place)
            assert failing_verify(place).file == name
            flip(place / name, byte, bit)


# ------------------------------------------------------------------------------------------------ every block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several blocks; tests leave it as it was."""
    place = tmp_path_factory.mktemp("large") / "c"
    shardstore.save(large(), place, shards=2)
    return place


def places_in(folder: Path, seed: int) -> Iterator[tuple[str, int]]:
    """File and byte: both ends of every block, of every tensor, of header and padding, and places at random."""
    chance = random.Random(seed)
    for name in data_files(folder):
        size = (folder / name).stat().st_size
        bytes_ = {0, 7, 8, size - 1, *(chance.randrange(size) for _ in range(6))}
        for block in range(-(-size // BLOCK)):
            first, end = block * BLOCK, min(size, (block + 1) * BLOCK)
            bytes_ |= {first, end - 1, chance.randrange(first, end)}
        if name.endswith("safetensors"):
            extents = tensors_of(folder, name)
            bytes_ |= {begin for begin, _ in extents.values()} | {end - 1 for _, end in extents.values()}
            bytes_.add(min(begin for begin, _ in extents.values()) - 1)  # padding
        for byte in sorted(bytes_):
            yield name, byte


def test_both_ends_of_every_block_tensor_and_region(checkpoint: Path, cli):
    """Copied, mapped and into a target: the error names exactly the file, the block, and the tensors that lie in it.

    Tensors of the target that `overwritten` does not name are as they were. Those in other blocks load, and are right.
    """
    state = large()
    everything = {f"{s}/{k}": t for s in ("model", "optimizer") for k, t in state[s].items()}
    found = set()
    for number, (name, byte) in enumerate(places_in(checkpoint, 3)):
        block = byte // BLOCK
        inside = in_block(checkpoint, name, block)
        found.add((name, block))
        flip(checkpoint / name, byte, number % 8)
        try:
            target = zeros(state)
            for options in ({}, {"mode": "map"}, {"into": target})[number % 3 :][:1]:
                with pytest.raises(Damaged, match=re.escape(name)) as caught:
                    shardstore.load(checkpoint, **options)
                error = caught.value
                assert (error.file, error.blocks, set(error.tensors)) == (name, (block,), inside)
                for path in everything:
                    section, _, key = path.partition("/")
                    if path not in error.overwritten:
                        assert (target[section][key] == 77).all(), path
                if options.get("into") and inside and name != meta_of(checkpoint):
                    assert set(error.overwritten) & inside
            if name == meta_of(checkpoint):
                continue
            touched, other = min(inside), min(path for path in everything if path not in inside)
            with pytest.raises(Damaged):
                shardstore.load(checkpoint, only=touched)
            section, _, key = other.partition("/")
            assert_same(shardstore.load(checkpoint, only=other), {section: {key: everything[other]}})
            problem = failing_verify(checkpoint, cli if number % 5 == 0 else None)
            assert (problem.kind, problem.file, problem.blocks, set(problem.tensors)) == (
                "damaged",
                name,
                (block,),
                inside,
            )
        finally:
            flip(checkpoint / name, byte, number % 8)
    assert len(found) == sum(-(-(checkpoint / name).stat().st_size // BLOCK) for name in data_files(checkpoint))
    assert shardstore.verify(checkpoint).ok


@pytest.mark.parametrize("options", [{}, {"mode": "map"}, {"into": True}, {"threads": 1}], ids=str)
def test_a_header_of_several_blocks(shm_path: Path, options: dict[str, Any]):
    """Blocks that hold nothing but header, or the header of a file without data: a whole load finds a wrong bit there.

    A load of a part does not read them.
    """
    names = ["n" * 1_100_000 + str(number) for number in range(8)]
    state = {
        "model": {name: torch.full((3,), float(at)) for at, name in enumerate(names)},
        "empty": {"e": torch.zeros(0)},
    }
    shardstore.save(state, shm_path / "c")
    weights, empty = shards_of(shm_path / "c")
    start = index_of(shm_path / "c")["files"][0]["start"]
    assert start > 2 * BLOCK
    for name, byte in ((weights, 5), (weights, BLOCK + 5), (weights, start - 1), (empty, 20)):
        flip(shm_path / "c" / name, byte)
        target = {"into": zeros(state)} if "into" in options else options
        with pytest.raises(Damaged) as caught:
            shardstore.load(shm_path / "c", **target)
        assert (caught.value.file, caught.value.blocks) == (name, (byte // BLOCK,))
        assert failing_verify(shm_path / "c").blocks == (byte // BLOCK,)
        if byte < 2 * BLOCK and name == weights:
            assert_same(
                shardstore.load(shm_path / "c", only=f"model/{names[3]}"),
                {"model": {names[3]: state["model"][names[3]]}},
            )
        flip(shm_path / "c" / name, byte)
    assert_same(shardstore.load(shm_path / "c"), state)


def test_slices_are_verified_by_the_blocks_that_they_touch(checkpoint: Path):
    """Each part of a tensor of several blocks: an error if it touches the bad block, else the right values."""
    state = large()
    name = next(path for path in shards_of(checkpoint) if "model/a" in tensors_of(checkpoint, path))
    begin, end = tensors_of(checkpoint, name)["model/a"]
    bad = begin // BLOCK + 1
    flip(checkpoint / name, bad * BLOCK + 5)
    try:
        with shardstore.open(checkpoint) as ckpt:
            for first in range(0, (end - begin) // 4, 100_000):
                last = min(first + 50_000, (end - begin) // 4)
                hit = (begin + 4 * first) // BLOCK <= bad <= (begin + 4 * last - 1) // BLOCK
                if hit:
                    with pytest.raises(Damaged) as caught:
                        ckpt["model/a"][first:last]
                    assert caught.value.blocks == (bad,)
                    assert "model/a" in caught.value.tensors
                else:
                    assert torch.equal(ckpt["model/a"][first:last], state["model"]["a"][first:last])
            with pytest.raises(Damaged):
                ckpt["model/a"].load()
            assert torch.equal(ckpt["optimizer/m"][:], state["optimizer"]["m"])
    finally:
        flip(checkpoint / name, bad * BLOCK + 5)


def test_several_bad_blocks_are_all_named_by_verify(checkpoint: Path, cli):
    """Verify goes on after the first one: every damaged block and tensor of every file."""
    names = shards_of(checkpoint)
    sizes = {name: (checkpoint / name).stat().st_size for name in names}
    places = [(name, byte) for name, size in sizes.items() for byte in range(99, size, BLOCK)]
    for name, byte in places:
        flip(checkpoint / name, byte)
    try:
        report = shardstore.verify(checkpoint)
        assert {problem.file for problem in report.checkpoints[0].problems} == set(names)
        for problem in report.checkpoints[0].problems:
            assert list(problem.blocks) == [byte // BLOCK for name, byte in places if name == problem.file]
            assert set(problem.tensors) == {p for p, (a, b) in tensors_of(checkpoint, problem.file).items() if a < b}
        assert cli("verify", checkpoint).output.count("damaged in block") == len(names)
    finally:
        for name, byte in places:
            flip(checkpoint / name, byte)


def test_damage_on_the_way_to_the_disk_is_found(tmp_path: Path):
    """A bit that flips after it was hashed, while it is written: no load, and verify names the place."""
    with injected(BrokenWay) as stores:
        shardstore.save({"model": {"w": torch.arange(5000.0)}, "n": 1}, tmp_path / "c")
    (name,) = stores[0].broken
    with pytest.raises(Damaged) as caught:
        shardstore.load(tmp_path / "c")
    assert caught.value.file == name
    assert caught.value.tensors == ("model/w",)
    assert failing_verify(tmp_path / "c").file == name


class BrokenWay(Wrapper):
    """Flips a bit of each shard of weights."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.broken: list[str] = []

    def put(self, key: str, body: Any, **conditions: Any) -> None:
        if key.startswith("model-"):
            self.broken.append(key)
            FlippingStore(self.inner, key, 8 * body.nbytes - 3).put(key, body, **conditions)
        else:
            self.inner.put(key, body, **conditions)


# ------------------------------------------------------------------------------------------------ whole files

LENGTHS = {
    "cut to nothing": lambda data: b"", "cut to one byte": lambda data: data[:1],
    "cut to its half": lambda data: data[: len(data) // 2], "cut by one byte": lambda data: data[:-1],
    "longer by one byte": lambda data: data + b"\0",
    "longer by a block": lambda data: data + bytes(BLOCK), "begins later": lambda data: data[1:],
}  # fmt: skip


@pytest.mark.parametrize("how", LENGTHS)
def test_files_of_another_length(small: Path, tmp_path: Path, how: str, cli):
    """Cut or longer, shard, meta or index: both sizes in the message; nothing of the target is touched."""
    place = tmp_path / "c"
    shutil.copytree(small, place)
    for name in (*data_files(place), INDEX):
        data = (place / name).read_bytes()
        made = LENGTHS[how](data)
        (place / name).write_bytes(made)
        target = zeros(SMALL)
        for options in ({}, {"mode": "map"}, {"into": target}):
            with pytest.raises(Damaged, match=re.escape(name)) as caught:
                shardstore.load(place, **options)
            assert caught.value.file == name
            if name != INDEX:
                assert f"{len(made)} bytes, {len(data)} were saved" in str(caught.value)
        assert all((t == 77).all() for section in ("model", "optimizer") for t in target[section].values())
        assert failing_verify(place, cli).file == name
        (place / name).write_bytes(data)


def test_missing_files(small: Path, tmp_path: Path, cli):
    """A shard or the meta is not there: Damaged and FileNotFoundError at once, with the tensors that are lost."""
    place = tmp_path / "c"
    shutil.copytree(small, place)
    for name in data_files(place):
        data = (place / name).read_bytes()
        inside = set(tensors_of(place, name)) if name.endswith("safetensors") else set()
        (place / name).unlink()
        target = zeros(SMALL)
        for options in ({}, {"mode": "map"}, {"into": target}):
            with pytest.raises(Damaged, match=re.escape(name)) as caught:
                shardstore.load(place, **options)
            assert isinstance(caught.value, FileNotFoundError)
            assert not isinstance(caught.value, CheckpointNotFound)
            assert caught.value.file == name
            assert set(caught.value.tensors) == inside
        assert all((t == 77).all() for section in ("model", "optimizer") for t in target[section].values())
        problem = failing_verify(place, cli)
        assert (problem.kind, problem.file, set(problem.tensors)) == ("missing", name, inside)
        if "/" in name and name != meta_of(place):
            assert_same(shardstore.load(place, only="model"), {"model": SMALL["model"]})
        (place / name).write_bytes(data)
    (place / HF).unlink()
    assert shardstore.verify(place).ok
    assert_same(shardstore.load(place), SMALL)


def test_swapped_and_renamed_files(tmp_path: Path, cli):
    """Two shards of the same size swapped, or one under another's name: both are named, whatever their headers say."""
    state = {"model": {"a": torch.zeros(100), "b": torch.ones(100), "c": torch.full((100,), 2.0)}}
    shardstore.save(state, tmp_path / "c", shards=3)
    one, two, three = shards_of(tmp_path / "c")
    sizes = {(tmp_path / "c" / name).stat().st_size for name in (one, two, three)}
    assert len(sizes) == 1
    saved = files_of(tmp_path / "c")
    (tmp_path / "c" / one).write_bytes(saved[two])
    (tmp_path / "c" / two).write_bytes(saved[one])
    with pytest.raises(Damaged) as caught:
        shardstore.load(tmp_path / "c")
    assert caught.value.file in {one, two}
    found = shardstore.verify(tmp_path / "c").checkpoints[0].problems
    assert [problem.file for problem in found] == [one, two]
    (tmp_path / "c" / one).write_bytes(saved[one])
    (tmp_path / "c" / two).rename(tmp_path / "c" / "other.safetensors")
    with pytest.raises(Damaged, match=re.escape(two)):
        shardstore.load(tmp_path / "c")
    assert failing_verify(tmp_path / "c", cli).file == two
    assert "other.safetensors" in shardstore.verify(tmp_path / "c").checkpoints[0].foreign


def test_files_and_index_of_another_checkpoint(tmp_path: Path, cli):
    """Its index, its shard or its meta in this place: never a mixture."""
    state, other = {"model": {"w": torch.zeros(100)}, "n": 1}, {"model": {"w": torch.ones(100)}, "n": 2}
    shardstore.save(state, tmp_path / "a")
    shardstore.save(other, tmp_path / "b")
    a, b = tmp_path / "a", tmp_path / "b"
    saved = files_of(a)
    for ours, theirs in zip(data_files(a), data_files(b), strict=True):
        (a / ours).write_bytes((b / theirs).read_bytes())
        with pytest.raises(Damaged, match=re.escape(ours)):
            shardstore.load(a)
        assert failing_verify(a, cli).file == ours
        (a / ours).write_bytes(saved[ours])
    (a / INDEX).write_bytes((b / INDEX).read_bytes())
    with pytest.raises(Damaged) as caught:
        shardstore.load(a)
    assert caught.value.file in data_files(b)
    report = shardstore.verify(a).checkpoints[0]
    assert {problem.file for problem in report.problems if problem.kind == "missing"} == set(data_files(b))
    assert cli("verify", a).exit_code == 3
    for theirs in data_files(b):
        shutil.copy(b / theirs, a / theirs)
    assert_same(shardstore.load(a), other)


IMPOSTERS = ["folder", "fifo", "link", "dangling link", "link to itself", "socket", "link to a folder"]


@pytest.mark.parametrize("kind", IMPOSTERS)
def test_something_else_in_place_of_a_file(small: Path, tmp_path: Path, kind: str, cli):
    """A folder, a fifo (without waiting for its other end), a socket, a link of any kind: refused and named."""
    place = tmp_path / "c"
    shutil.copytree(small, place)
    for name in (*data_files(place), INDEX):
        at, away = place / name, tmp_path / "away"
        at.rename(away)
        make(kind, at, away)
        for options in ({}, {"mode": "map"}, {"into": zeros(SMALL)}):
            with pytest.raises((Damaged, StoreError), match=re.escape(name)):
                shardstore.load(place, **options)
        report = shardstore.verify(place)
        assert not report.ok
        found = report.checkpoints[0]
        assert (found.problems and found.problems[0].file == name) or name in str(found.error)
        assert cli("verify", place).exit_code in {1, 3, 5}
        shutil.rmtree(at) if kind == "folder" else at.unlink()
        away.rename(at)
    assert_same(shardstore.load(place), SMALL)


def make(kind: str, at: Path, away: Path) -> None:
    """Put something at a place; the file itself has been moved away."""
    if kind == "folder":
        at.mkdir()
        (at / "x").write_bytes(b"x")
    elif kind == "fifo":
        os.mkfifo(at)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(at.parent)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(at.name[-90:])
            Path(at.name[-90:]).rename(at.name)
        finally:
            os.chdir(here)
    else:
        targets = {"link": away, "dangling link": "nowhere", "link to itself": at.name, "link to a folder": away.parent}
        at.symlink_to(targets[kind])


def test_the_index_says_what_was_measured(checkpoint: Path):
    """The tests above look at several blocks and files: what they take for granted about this checkpoint."""
    files = index_of(checkpoint)["files"]
    assert max(entry["bytes"] for entry in files) > 2 * BLOCK
    assert len(files) == 3
