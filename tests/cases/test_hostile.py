"""Hostile or broken input: refused with a typed error, before anything that it asks for is allocated, opened or run."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch

import shardstore
from shardstore import header
from shardstore.errors import Damaged, InvalidArgument, Mismatch, ShardstoreError, StoreError, UnsupportedVersion
from shardstore.memory.fresh import TORCH_DTYPES
from tests.kit.damage import (
    INDEX,
    edit_index,
    edit_meta,
    edit_text,
    files_of,
    index_of,
    meta_of,
    parts_of,
    replace_file,
    shard,
    shards_of,
    sign,
    write_index,
)
from tests.kit.same import assert_same

STATE = {"model": {"w": torch.arange(1000.0), "b": torch.ones(3, 4)}, "optimizer": {"m": torch.zeros(5)}, "n": 3}
MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint with two shards of weights, one of other tensors, and plain values."""
    shardstore.save(STATE, tmp_path / "c", step=7, shards=3)
    return tmp_path / "c"


def readers(place: Path, cli: Any) -> dict[str, Callable[[], Any]]:
    """Every way to read a checkpoint; those that report give back the kind of the problem, else they raise."""

    def verify() -> None:
        (found,) = shardstore.verify(place).checkpoints
        if found.error is not None:
            raise found.error
        if found.problems:
            raise Damaged(found.problems[0].message, file=found.problems[0].file)

    def command(name: str) -> Callable[[], None]:
        def run() -> None:
            result = cli(name, place, "--json")
            document = json.loads(result.stdout)
            if result.exit_code:
                raise AssertionError(f"exit {result.exit_code}: {document}")

        return run

    return {
        "load": lambda: shardstore.load(place),
        "map": lambda: shardstore.load(place, mode="map"),
        "only": lambda: shardstore.load(place, only="model/w"),
        "into": lambda: shardstore.load(place, into={"model": {"w": torch.zeros(1000), "b": torch.zeros(3, 4)}}),
        "open": lambda: shardstore.open(place),
        "verify": verify,
        "overwrite": lambda: shardstore.save(STATE, place, overwrite=True),
    }


def refused(place: Path, cli: Any, error: type[ShardstoreError], *, match: str = "", exit_code: int = 3) -> None:
    """All readers refuse a checkpoint with the same type of error, and the commands with the exit code that it has."""
    before = files_of(place)
    for name, read in readers(place, cli).items():
        with pytest.raises(error, match=match or None) as caught:
            read()
        assert str(caught.value), name
    for command in ("verify", "show"):
        assert cli(command, place).exit_code == exit_code, command
    assert cli("migrate", place, "--yes").exit_code in {0, exit_code}  # what shards hold is none of its business
    assert cli("diff", place, place).exit_code in {0, exit_code}  # nor where digests are equal
    assert cli("ls", place).exit_code in {0, exit_code}
    assert cli("prune", "--leftovers", "--yes", place).exit_code in {0, exit_code}
    assert files_of(place) == before


# ------------------------------------------------------------------------------------------------ Z01: paths

PATHS = {
    "parent": "../x", "absolute": "/etc/hostname", "parent inside": "a/../../b", "drive": "C:\\x", "nul": "a\0b",
    "empty": "", "dot": ".", "long": "x" * 300, "dots": "..", "url": "file:///etc/hostname", "drive slash": "c:/x",
    "backslash": "state\\x", "newline": "a\nb", "double": "state//x", "end": "state/", "dot inside": "state/./x",
    "surrogate": "\ud800", "long sum": "/".join(["x" * 100] * 11), "unc": "\\\\host\\share",
    "the index": "shardstore.json", "the derived index": "model.safetensors.index.json", "delete": "a\x7f",
    "parent end": "state/..",
}  # fmt: skip


@pytest.mark.parametrize("which", ["shard", "meta"])
@pytest.mark.parametrize("name", PATHS)
def test_Z01_paths_that_leave_the_checkpoint_are_refused_unopened(place: Path, cli, name: str, which: str):
    """A bad file name in an index whose digest is right: refused before that file is looked at, by every reader."""
    outside = place.parent / "x"
    outside.write_bytes(b"secret")

    def change(document: dict[str, Any]) -> None:
        at = document["meta"] if which == "meta" else 0
        document["files"][at]["path"] = PATHS[name]

    edit_index(place, change)
    real = os.open
    opened: list[str] = []

    def watch(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(os.path.basename(str(path)))
        return real(path, *args, **kwargs)

    with mock.patch.object(os, "open", watch):
        refused(place, cli, Damaged, match=INDEX)
    assert {"x", "hostname"}.isdisjoint(opened)
    assert outside.read_bytes() == b"secret"


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("where", ["shard", "meta", "state"])
def test_Z01_links_out_of_the_checkpoint_are_not_followed(place: Path, cli, where: str, kind: str):
    """A file, or the folder `state`, replaced by a link to the right bytes elsewhere: refused, and named."""
    names = {"shard": shards_of(place)[0], "meta": meta_of(place), "state": "state"}
    at = place / names[where]
    away = place.parent / "away"
    at.rename(away)
    at.symlink_to(away if kind == "file" else os.path.relpath(away, at.parent))
    with pytest.raises((Damaged, StoreError), match="state" if where != "shard" else names["shard"]):
        shardstore.load(place)
    with pytest.raises((Damaged, StoreError)):
        shardstore.load(place, mode="map")
    report = shardstore.verify(place)
    assert not report.ok
    assert any(names[where] in problem.file for problem in report.checkpoints[0].problems)
    assert cli("verify", place).exit_code != 0


def test_Z01_a_checkpoint_may_be_reached_through_links(place: Path):
    """The root itself is the user's choice, and may be a link."""
    (place.parent / "link").symlink_to(place)
    assert_same(shardstore.load(place.parent / "link"), STATE)
    assert shardstore.verify(place.parent / "link").ok


# ------------------------------------------------------------------------------------------------ Z03: pickles

KNOWN = [
    "pytorch_model.bin", "model.pt", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth",
    "training_args.bin", "scaler.pt", "trainer_state.json", "state/meta.pkl", "state/00001-of-00001.pt", "data.pkl",
    ".metadata",
    "__0_0.distcp", "random_states_0.pkl", "mp_rank_00_model_states.pt", "model.safetensors", "adapter_model.bin",
    "attempt-0123456789abcdef.json", "run.json", "latest.json", "config.json", "pickle",
    "state/meta-0123456789abcdef.json",
]  # fmt: skip


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@contextlib.contextmanager
def no_pickle() -> Iterator[None]:
    """Any use of pickle for reading is an error."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    with (
        mock.patch.object(pickle, "load", never),
        mock.patch.object(pickle, "loads", never),
        mock.patch.object(pickle, "Unpickler", never),
        mock.patch.object(torch, "load", never),
    ):
        yield


def test_Z03_pickles_under_known_names_are_never_read(place: Path, cli):
    """Every name under which somebody keeps a pickle, with code in it: load, verify and the commands run none."""
    marker = place.parent / "it ran"
    bomb = pickle.dumps(Bomb(marker))
    for name in KNOWN:
        (place / name).write_bytes(bomb)
    with no_pickle():
        assert_same(shardstore.load(place), STATE)
        assert_same(shardstore.load(place, mode="map"), STATE)
        shardstore.load(place, into={"model": {"w": torch.zeros(1000), "b": torch.zeros(3, 4)}})
        assert shardstore.verify(place).ok
        for words in (["show"], ["verify"], ["prune", "--leftovers", "--yes"]):
            assert cli(*words, place).exit_code == 0
        assert cli("ls", place).exit_code in {0, 3}  # run.json is no JSON: the folder may be taken for a damaged run
        shardstore.save(STATE, place, overwrite=True)
    assert not marker.exists()


@pytest.mark.parametrize("signed", [False, True], ids=["as found", "with right digests"])
@pytest.mark.parametrize("which", ["shard", "meta", "index"])
def test_Z03_a_pickle_in_place_of_a_file_is_not_run(place: Path, cli, which: str, signed: bool):
    """The same for the files of the checkpoint themselves, also when their digests are made right."""
    marker = place.parent / "it ran"
    bomb = pickle.dumps(Bomb(marker))
    with no_pickle():
        if which == "index":
            (place / INDEX).write_bytes(sign(bomb) if signed else bomb)
        elif which == "meta" and signed:
            replace_file(place, meta_of(place), bomb)
        else:
            name = meta_of(place) if which == "meta" else shards_of(place)[0]
            data = (place / name).read_bytes()
            made = bomb + data[len(bomb) :]
            if signed:
                replace_file(place, name, made)
            else:
                (place / name).write_bytes(made)
        assert cli("verify", place).exit_code == 3
        for read in readers(place, cli).values():
            with contextlib.suppress(ShardstoreError):
                read()
    assert not marker.exists()


# ------------------------------------------------------------------------------------------------ Z04 to Z09: headers


def first_shard(place: Path) -> tuple[str, dict[str, Any], bytes]:
    """Path, header and data of the shard that holds `w`."""
    for path in shards_of(place):
        head, data = parts_of((place / path).read_bytes())
        if "w" in head:
            return path, head, data
    raise AssertionError("no shard holds w")


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**31, 0, 1, 7, 10**8 + 1, "more", "less"])
def test_Z04_a_header_of_absurd_length_is_refused_without_allocation(place: Path, cli, size: Any):
    """The first eight bytes of a shard lie, its digests are right: a typed error that names it, little memory."""
    path, _, _ = first_shard(place)
    data = (place / path).read_bytes()
    (real,) = struct.unpack("<Q", data[:8])
    made = {"more": real + 64, "less": real - 64}.get(size, size)
    replace_file(place, path, struct.pack("<Q", made) + data[8:])
    tracemalloc.start()
    try:
        report = shardstore.verify(place)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (problem,) = report.checkpoints[0].problems
    assert (problem.kind, problem.file) == ("header", path)
    assert peak < 16 * MIB
    assert cli("verify", place).exit_code == 3
    if size not in {0, 1, 7, "less"}:
        with pytest.raises(Damaged, match="claims"):
            header.length(struct.pack("<Q", max(made, 2**60)), path, len(data))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(place / path, "pt")


@pytest.mark.parametrize("start", [0, 8, 63, "a page on", 2**62, None, -64, 10**8 + 128])
def test_Z04_an_index_with_an_absurd_start_of_data_is_refused(place: Path, cli, start: Any):
    """Where data begins must fit the file and its tensors, before any of it is read."""

    def change(document: dict[str, Any]) -> None:
        entry = document["files"][0]
        entry["start"] = entry["start"] + 4096 if start == "a page on" else start

    edit_index(place, change)
    refused(place, cli, Damaged, match=INDEX)


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape too large": lambda w: w.update(shape=[1000, 1000]),
    "shape overflows": lambda w: w.update(shape=[2**40, 2**40]),
    "begin after end": lambda w: w.update(data_offsets=[8, 4]),
    "end past the file": lambda w: w.update(data_offsets=[0, 10**9]),
    "three offsets": lambda w: w.update(data_offsets=[0, 4000, 4000]),
    "one offset": lambda w: w.update(data_offsets=[0]),
    "negative": lambda w: w.update(data_offsets=[-4000, 0]),
    "negative shape": lambda w: w.update(shape=[-1000]),
    "a hole": lambda w: w.update(data_offsets=[4, 4004]),
    "float offsets": lambda w: w.update(data_offsets=[0.0, 4000.0]),
    "bool shape": lambda w: w.update(shape=[True]),
    "text": lambda w: w.update(shape="1000"),
    "null": lambda w: w.update(data_offsets=None),
    "another type": lambda w: w.update(dtype="F64"),
    "unknown type": lambda w: w.update(dtype="F33"),
    "no type": lambda w: w.pop("dtype"),
    "a member more": lambda w: w.update(extra=1),
    "a number for a type": lambda w: w.update(dtype=3),
    "65 dimensions": lambda w: w.update(shape=[1] * 64 + [1000]),
    "huge number": lambda w: w.update(shape=[10**30]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_Z06_offsets_that_do_not_fit_are_refused_naming_the_tensor(place: Path, cli, name: str):
    """A header that contradicts itself, in a shard with right digests: refused, and the tensor is named.

    The header reader refuses it for foreign files; a checkpoint of ours is read by its index, and verify compares both.
    """
    path, head, data = first_shard(place)
    HEADERS[name](head["w"])
    made = shard(head, data)
    with pytest.raises(Damaged, match="'w'") as caught:
        header.parse(made[8 : len(made) - len(data)], path, len(made))
    assert caught.value.tensors == ("w",)
    assert caught.value.file == path
    replace_file(place, path, made, start=len(made) - len(data))
    report = shardstore.verify(place)
    (problem,) = report.checkpoints[0].problems
    assert (problem.kind, problem.file, report.exit_code) == ("header", path, 3)
    assert "w" in problem.message
    assert cli("verify", place).exit_code == 3
    assert_same(shardstore.load(place), STATE)


@pytest.mark.parametrize("what", ["other name", "other order", "missing", "extra", "no object", "no json", "not utf-8"])
def test_Z06_a_header_that_names_other_tensors_than_the_index_is_found(place: Path, what: str):
    """Valid by itself or not: what the header shows to other tools must be what the index says."""
    path, head, data = first_shard(place)
    texts: dict[str, Any] = {
        "other name": {"v": head["w"], **{k: v for k, v in head.items() if k != "w"}},
        "missing": {k: v for k, v in head.items() if k != "w"},
        "extra": {**head, "x": {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}},
        "other order": {**head, "w": {**head["w"], "shape": [10, 100]}},
        "no object": b"[1, 2]", "no json": b"{" * 5, "not utf-8": b'{"\xff": 1}',
    }  # fmt: skip
    made = shard(texts[what], data)
    replace_file(place, path, made, start=len(made) - len(data))
    (problem,) = shardstore.verify(place).checkpoints[0].problems
    assert (problem.kind, problem.file) == ("header", path)


def test_Z09_a_name_that_stands_twice_in_a_header_is_refused(place: Path):
    """The last one must not win."""
    path, head, data = first_shard(place)
    text = json.dumps(head)[:-1] + ', "w": ' + json.dumps(head["w"]) + "}"
    made = shard(text.encode(), data)
    replace_file(place, path, made, start=len(made) - len(data))
    (problem,) = shardstore.verify(place).checkpoints[0].problems
    assert problem.kind == "header"
    assert "twice" in problem.message
    assert "'w'" in problem.message
    for twice in ('"dtype":"F32","dtype":"F32"', '"shape":[1],"shape":[1]'):
        text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).replace(" ", "")
        bad = re.sub(twice.split(",")[0].replace("[", r"\["), lambda _, twice=twice: twice, text).encode()
        with pytest.raises(Damaged, match="twice"):
            header.parse(bad, path, 8 + len(bad) + 4)


@pytest.mark.parametrize(
    "member",
    ["schema", "attempt", "step", "hash", "files", "tensors", "path", "digest", "blocks", "kinds", "aliases", "pieces"],
)
def test_Z09_a_key_that_stands_twice_in_the_index_is_refused(place: Path, cli, member: str):
    """At every level of the index, also with the same value."""
    text = (place / INDEX).read_text()
    match = re.search(rf'"{member}":', text)
    assert match
    decoder = json.JSONDecoder()
    value, end = decoder.raw_decode(text, match.end())
    again = text[match.start() : end]
    edit_text(place, again, f"{again},{again}")
    refused(place, cli, Damaged, match="twice")
    assert value is not ...


def test_Z09_a_key_that_stands_twice_in_the_meta_is_refused(place: Path, cli):
    """The structure, too."""
    data = (place / meta_of(place)).read_bytes()
    for old, new in ((b'"n":3', b'"n":3,"n":4'), (b'"flat":false', b'"flat":false,"flat":true')):
        assert old in data
        replace_file(place, meta_of(place), data.replace(old, new))
        with pytest.raises(Damaged, match="twice") as caught:
            shardstore.load(place)
        assert caught.value.file == meta_of(place)
        (problem,) = shardstore.verify(place).checkpoints[0].problems
        assert (problem.kind, problem.file) == ("meta", meta_of(place))
        assert cli("verify", place).exit_code == 3


# ------------------------------------------------------------------------------------------------ Z10: deep and large


@contextlib.contextmanager
def modest(mebibytes: int) -> Iterator[None]:
    """What is done within takes at most so much memory more, as Python sees it."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < mebibytes * MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("levels", [300, 10_000, 1_000_000])
@pytest.mark.parametrize("kind", ["lists", "dicts"])
def test_Z10_deep_json_is_a_typed_error(place: Path, cli, kind: str, levels: int):
    """In the index, in the meta, in a header, at any depth: an error of ours, and the process lives on."""
    deep = "[" * levels + "]" * levels if kind == "lists" else '{"a":' * levels + "1" + "}" * levels
    index, meta = (place / INDEX).read_bytes(), (place / meta_of(place)).read_bytes()
    replace_file(place, meta_of(place), meta.replace(b'"n":3', b'"n":' + deep.encode()))
    if levels > 300:  # what is less is only deep for a checkpoint that save would have refused
        with pytest.raises(Damaged, match="deep") as caught:
            shardstore.load(place)
        assert caught.value.file == meta_of(place)
    else:
        with contextlib.suppress(Damaged):
            shardstore.load(place)
    (place / INDEX).write_bytes(index)
    edit_text(place, '"run":null', f'"run":{deep}')
    refused(place, cli, Damaged, match=INDEX)
    for text in (deep, f'{{"w":{deep}}}', f'{{"__metadata__":{deep}}}'):
        with pytest.raises(Damaged):
            header.parse(text.encode(), "x", 8 + len(text))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spaces", "zeros", "signed"])
def test_Z10_a_large_index_takes_bounded_memory(place: Path, kind: str):
    """200 MB of nothing, also with a right digest: a typed error, with little memory beside the file itself."""
    size = 200_000_000
    if kind == "signed":
        (place / INDEX).write_bytes(sign(b'{"schema":"shardstore/1",' + b" " * size))
    else:
        (place / INDEX).write_bytes((b" " if kind == "spaces" else b"\0") * size)
    with modest(1000), pytest.raises(Damaged):
        shardstore.load(place)
    with modest(1000):
        assert shardstore.verify(place).exit_code == 3


def test_Z10_an_index_over_the_limit_is_not_read(place: Path, cli):
    """More than 256 MiB are refused by their size alone; so is a meta that claims to be larger than any may be."""
    with (place / INDEX).open("r+b") as file:
        file.truncate(2**40)
    with modest(8), pytest.raises(ShardstoreError, match=str(2**40)):
        shardstore.load(place)
    with modest(8):
        assert not shardstore.verify(place).ok
    assert cli("verify", place).exit_code != 0


def test_Z10_sizes_in_an_index_are_not_allocated_before_they_are_compared(place: Path, cli):
    """An index that says that a tensor, or the meta, has a terabyte: an error before memory for it is asked for."""
    text = json.dumps(index_of(place))

    def large_meta(document: dict[str, Any]) -> None:
        entry = document["files"][document["meta"]]
        entry["bytes"] = 2**40
        entry["blocks"] = base64.b64encode(bytes(16 * 2**18)).decode()

    edit_index(place, large_meta)
    with modest(200), pytest.raises((Damaged, StoreError)):
        shardstore.load(place)
    write_index(place, json.loads(text))

    def large_tensor(document: dict[str, Any]) -> None:
        document["tensors"]["kinds"][0][1] = [2**38]

    edit_index(place, large_tensor)
    with modest(64):
        refused(place, cli, Damaged, match=INDEX)

    write_index(place, json.loads(text))
    number = next(n for n, entry in enumerate(json.loads(text)["files"]) if entry["start"] is not None)

    def sparse_shard(document: dict[str, Any]) -> None:
        entry = document["files"][number]
        tensor = entry["pieces"][0]
        kind = document["tensors"]["kinds"][document["tensors"]["kind"][tensor]]
        rest = entry["bytes"] - entry["start"] - 4 * int(torch.Size(kind[1]).numel())
        document["tensors"]["kinds"].append([kind[0], [2**38]])
        document["tensors"]["kind"][tensor] = len(document["tensors"]["kinds"]) - 1
        entry["bytes"] = entry["start"] + 2**40 + rest
        entry["blocks"] = base64.b64encode(bytes(16 * -(-entry["bytes"] // (4 * MIB)))).decode()

    edit_index(place, sparse_shard)
    with modest(200), pytest.raises(Damaged, match="bytes"):
        shardstore.load(place)
    with modest(200), pytest.raises(Damaged, match="bytes"):
        shardstore.load(place, mode="map")
    with modest(200):
        assert not shardstore.verify(place).ok


# ------------------------------------------------------------------------------------------------ Z11: hashes

HASHES: dict[str, Any] = {
    "null": None, "empty": "", "short": "ab", "not hex": "zz" * 16, "too long": "ab" * 17, "number": 3, "list": [],
}  # fmt: skip


@pytest.mark.parametrize("name", [*HASHES, "gone"])
@pytest.mark.parametrize("member", ["digest", "blocks"])
def test_Z11_a_missing_digest_is_a_failure_never_a_pass(place: Path, cli, member: str, name: str):
    """Without the digests of a file nothing is loaded and nothing verifies; there is no way to switch that off."""
    for number in range(len(index_of(place)["files"])):
        text = (place / INDEX).read_bytes()

        def change(document: dict[str, Any], number: int = number) -> None:
            if name == "gone":
                del document["files"][number][member]
            else:
                document["files"][number][member] = HASHES[name]

        edit_index(place, change)
        refused(place, cli, Damaged, match=INDEX)
        (place / INDEX).write_bytes(text)


def test_Z11_too_few_or_too_many_block_digests_are_refused(tmp_path: Path, cli):
    """The table of a file of several blocks must be complete, block by block."""
    shardstore.save(
        {"model": {"w": torch.arange(1000.0), "b": torch.zeros(3, 4), "x": torch.zeros(3_000_000)}}, tmp_path / "c"
    )
    number = max(range(2), key=lambda n: index_of(tmp_path / "c")["files"][n]["bytes"])
    text = (tmp_path / "c" / INDEX).read_bytes()
    raw = base64.b64decode(index_of(tmp_path / "c")["files"][number]["blocks"])
    assert len(raw) == 3 * 16
    for wrong in (b"", raw[:16], raw[:-1], raw[:-16], raw + b"\0", raw + raw[:16]):

        def change(document: dict[str, Any], wrong: bytes = wrong) -> None:
            document["files"][number]["blocks"] = base64.b64encode(wrong).decode()

        edit_index(tmp_path / "c", change)
        refused(tmp_path / "c", cli, Damaged, match=INDEX)
        (tmp_path / "c" / INDEX).write_bytes(text)
    for wrong_text in ("!!!!", "AAA", base64.b64encode(raw).decode() + "\n", base64.b64encode(raw).decode()[:-1] + "é"):
        edit_index(tmp_path / "c", lambda d, w=wrong_text: d["files"][number].update(blocks=w))
        refused(tmp_path / "c", cli, Damaged, match=INDEX)
        (tmp_path / "c" / INDEX).write_bytes(text)


@pytest.mark.parametrize(
    "name", ["gone", "null", "empty", "short", "upper case", "of something else", "not last", "no newline"]
)
def test_Z11_the_digest_of_the_index_itself_must_be_there_and_right(place: Path, cli, name: str):
    """Without its closing sha256, in exactly its form, an index is damaged."""
    text = (place / INDEX).read_bytes()
    body, digest = text[: text.rindex(b'"sha256"')], text[-67:-3].decode()
    made = {
        "gone": body[:-1] + b"}\n", "null": body + b'"sha256":null}\n', "empty": body + b'"sha256":""}\n',
        "short": body + f'"sha256":"{digest[:-1]}"}}\n'.encode(),
        "upper case": body + f'"sha256":"{digest.upper()}"}}\n'.encode(),
        "of something else": body + f'"sha256":"{"0" * 64}"}}\n'.encode(),
        "not last": f'{{"sha256":"{digest}",'.encode() + body[1:-1] + b"}\n", "no newline": text[:-1],
    }[name]  # fmt: skip
    (place / INDEX).write_bytes(made)
    refused(place, cli, Damaged, match=INDEX)


@pytest.mark.parametrize("value", ["md5", "", "xxh64", "SHA256", "none"])
def test_Z11_an_unknown_hash_is_an_unsupported_version(place: Path, cli, value: str):
    """An algorithm that is not known here can't be checked, so nothing is loaded."""
    edit_index(place, lambda document: document.update(hash=value))
    refused(place, cli, UnsupportedVersion, exit_code=7)


@pytest.mark.parametrize("value", [None, 3, [], {}, True])
def test_Z11_a_hash_of_another_type_is_damage(place: Path, cli, value: Any):
    """No algorithm at all."""
    edit_index(place, lambda document: document.update(hash=value))
    refused(place, cli, Damaged, match=INDEX)


def test_Z11_expect_is_refused_where_it_proves_nothing(tmp_path: Path):
    """`expect=` goes with sha256 only; a wrong one is damage; the right one authenticates the index."""
    plain = shardstore.save(STATE, tmp_path / "x")
    with pytest.raises(InvalidArgument, match="sha256"):
        shardstore.load(tmp_path / "x", expect=plain.digest)
    saved = shardstore.save(STATE, tmp_path / "s", hash="sha256")
    assert_same(shardstore.load(tmp_path / "s", expect=saved.digest), STATE)
    for wrong in ("0" * 64, saved.digest[:-1], "", saved.digest[::-1]):
        with pytest.raises((Damaged, InvalidArgument)):
            shardstore.load(tmp_path / "s", expect=wrong)
    edit_index(tmp_path / "s", lambda document: document.update(step=9))
    shardstore.load(tmp_path / "s")
    with pytest.raises(Damaged, match=INDEX):
        shardstore.load(tmp_path / "s", expect=saved.digest)
    with pytest.raises(Damaged):
        shardstore.open(tmp_path / "s", expect=saved.digest)


# ------------------------------------------------------------------------------------------------ Z13, Z14: arguments

STEPS = [
    "../../x", "a/b", "x\0y", "con", "7", "", "latest", 7.0, -1, True, 2**63, 10**5000, float("nan"), float("inf"),
    -0.5, b"7", [7],
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
def test_Z13_Z14_a_step_is_a_whole_number_from_0_on(tmp_path: Path, step: Any):
    """No text, no float, no bool, no path: refused before anything is made. Names come with runs."""
    with pytest.raises(InvalidArgument, match="step") as caught:
        shardstore.save({"w": torch.ones(1)}, tmp_path / "c", step=step)
    assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0, 1, 2**63 - 1, None])
def test_Z14_steps_at_the_edges(tmp_path: Path, step: Any):
    """The smallest, the largest, and none."""
    assert shardstore.save({"w": torch.ones(1)}, tmp_path / "c", step=step).step == step
    assert shardstore.verify(tmp_path / "c").checkpoints[0].step == step


ARGUMENTS: list[dict[str, Any]] = [
    {"shards": 0}, {"shards": -1}, {"shards": 10**9}, {"shards": 10**5000}, {"shards": 2.0}, {"shards": "2"},
    {"shards": True}, {"shards": 100_000}, {"shard_bytes": 0}, {"shard_bytes": -5}, {"shard_bytes": 1.5},
    {"shard_bytes": "1GB"}, {"shards": 2, "shard_bytes": 100}, {"layout": "zigzag"}, {"layout": None},
    {"layout": ["x"]}, {"group_by": ["*"]}, {"hash": "md5"}, {"hash": None}, {"hash": ["sha256"]}, {"threads": 0},
    {"threads": -1},
    {"threads": 10**9}, {"threads": 1.5}, {"threads": "2"}, {"threads": True}, {"layout": "by_group", "group_by": 3},
    {"storage_options": {"key": "x"}}, {"shards": float("nan")}, {"hash": "sha256\0"}, {"threads": 10**5000},
]  # fmt: skip


@pytest.mark.parametrize("options", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_Z14_nonsense_arguments_of_save_are_refused(tmp_path: Path, options: dict[str, Any]):
    """Typed errors that name the argument, before anything is made."""
    with pytest.raises(InvalidArgument) as caught:
        shardstore.save({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "c", **options)
    assert any(name in str(caught.value) for name in options)
    assert list(tmp_path.iterdir()) == []


LOADS: list[dict[str, Any]] = [
    {"mode": "mmap"}, {"mode": None}, {"device": "nowhere"}, {"threads": 0}, {"threads": 1.5}, {"threads": "x"},
    {"threads": True}, {"only": 3}, {"only": [3]}, {"only": b"w"}, {"into": 3}, {"into": []}, {"into": {}},
    {"mode": "map", "into": {"w": torch.zeros(1)}}, {"rename": {"a": "b"}}, {"expect": "00"}, {"expect": 3},
    {"storage_options": {"x": 1}}, {"allow_missing": 3, "into": {"w": torch.zeros(1)}},
    {"mode": "map", "device": "meta"},
    {"into": torch.zeros(1)}, {"rename": 3, "into": {"w": torch.zeros(1)}}, {"threads": 10**9}, {"threads": 10**5000},
]  # fmt: skip


@pytest.mark.parametrize("options", LOADS, ids=range(len(LOADS)))
def test_Z14_nonsense_arguments_of_load_are_refused(tmp_path: Path, options: dict[str, Any]):
    """Typed errors here as well."""
    shardstore.save({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "c")
    with pytest.raises((InvalidArgument, Mismatch)):
        shardstore.load(tmp_path / "c", **options)


URLS = [
    "", "a\0b", b"/tmp/x", 3, None, "s4://bucket/x", "memory://../x", "memory://a/../../b",
    "x" * 5000, "y/" * 3000, "z" * 300, Path("s3://bucket/key"),
]  # fmt: skip


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_Z13_places_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any, cli):
    """NUL, bytes, unknown schemes, names too long, URLs folded by pathlib: refused by the API and the command."""
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: shardstore.save({"w": torch.ones(1)}, url),
        lambda: shardstore.load(url),
        lambda: shardstore.open(url),
        lambda: shardstore.verify(url),
    ):
        with pytest.raises(ShardstoreError) as caught:
            call()
        assert len(str(caught.value)) < 12_000
    if isinstance(url, str) and len(url) < 1000:
        for command in ("verify", "show", "ls"):
            assert cli(command, url).exit_code in {1, 2, 5}
    assert list(tmp_path.iterdir()) == []


LINES = [
    ["verify"], ["ls", "x", "y"], ["show", "x", "--nope"], ["explode"], ["verify", "--threads", "0", "x"],
    ["verify", "--threads", "9" * 5000, "x"], ["prune", "x"], ["prune", "--leftovers", "--older-than", "-1", "x"],
]  # fmt: skip


@pytest.mark.parametrize("words", LINES, ids=range(len(LINES)))
def test_Z13_command_lines_that_make_no_sense(cli, words: list[str]):
    """Exit code 2 and a message."""
    result = cli(*words)
    assert result.exit_code == 2
    assert result.output


NUMBERS = ["9" * 5000, "1e400", "-1", "true", '"7"', "7.0", "7.5", "1e3", "[7]", "{}", "NaN", "Infinity", "07", "0x7",
           str(2**63), str(2**64), "- 1"]  # fmt: skip
MEMBERS = ['"step":7', '"seq":0', '"owner":0', '"world":1', '"roots":1', '"block":4194304', '"meta":3', '"root":0']


@pytest.mark.parametrize("member", MEMBERS)
def test_Z14_numbers_in_the_index_are_whole_and_in_range(place: Path, cli, member: str):
    """Digits without end, floats, bools, text, NaN in any number of the index: a typed error from all readers."""
    text = (place / INDEX).read_bytes()
    name, _, _ = member.partition(":")
    for number in NUMBERS:
        edit_text(place, member, f"{name}:{number}")
        with pytest.raises((Damaged, UnsupportedVersion), match=INDEX):
            shardstore.load(place)
        assert not shardstore.verify(place).ok
        (place / INDEX).write_bytes(text)
    edit_text(place, member, f"{name}:{'9' * 5000}")
    refused(place, cli, Damaged, match=INDEX)


def test_Z14_minus_zero_is_zero_or_refused(place: Path):
    """`-0` is valid JSON for an integer: taken as 0, or refused; never something else."""
    edit_text(place, '"seq":0', '"seq":-0')
    with contextlib.suppress(Damaged):
        assert_same(shardstore.load(place), STATE)


def _part(tensors: dict[str, Any], file: int, row: list[int], origin: list[int], shape: list[int]) -> None:
    """Say that pieces of a file are parts, by the numbers of their boxes."""
    tensors["boxes"].append([origin, shape])
    tensors["parts"].append([file, row])


TENSORS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "negative shape": lambda t: t["kinds"][0].__setitem__(1, [-1]),
    "float shape": lambda t: t["kinds"][0].__setitem__(1, [1000.0]),
    "bool shape": lambda t: t["kinds"][0].__setitem__(1, [True]),
    "shape is null": lambda t: t["kinds"][0].__setitem__(1, None),
    "overflowing shape": lambda t: t["kinds"][0].__setitem__(1, [2**62, 2**62]),
    "65 dimensions": lambda t: t["kinds"][0].__setitem__(1, [1] * 64 + [1000]),
    "larger shape": lambda t: t["kinds"][0].__setitem__(1, [1000, 1000]),
    "smaller shape": lambda t: t["kinds"][0].__setitem__(1, [1]),
    "kind out of range": lambda t: t["kind"].__setitem__(0, 99),
    "negative kind": lambda t: t["kind"].__setitem__(0, -1),
    "a kind less": lambda t: t["kind"].pop(),
    "a kind more": lambda t: t["kind"].append(0),
    "a path less": lambda t: t["path"].pop(),
    "a path more": lambda t: t["path"].append("model/x"),
    "path twice": lambda t: t["path"].__setitem__(1, t["path"][0]),
    "path is a number": lambda t: t["path"].__setitem__(0, 5),
    "alias of itself": lambda t: t["aliases"].append([0, 0]),
    "alias out of range": lambda t: t["aliases"].append([0, 99]),
    "alias of an unknown": lambda t: t["aliases"].append([99, 0]),
    "alias of a stored one": lambda t: t["aliases"].append([1, 0]),
    "alias chain": lambda t: t["aliases"].extend([[0, 1], [1, 2]]),
    "alias of three": lambda t: t["aliases"].append([0, 1, 2]),
    "part out of range": lambda t: _part(t, 0, [0, 0], [0], [1000]),
    "part of no file": lambda t: _part(t, 99, [0], [0], [1000]),
    "part of the meta": lambda t: _part(t, 3, [0], [0], [1]),
    "part beyond the tensor": lambda t: _part(t, 0, [0], [1], [1000]),
    "part that leaves a hole": lambda t: _part(t, 0, [0], [0], [1]),
    "part of two dimensions": lambda t: _part(t, 0, [0], [0, 0], [1, 1000]),
    "part with a negative origin": lambda t: _part(t, 0, [0], [-1], [1000]),
    "part with an unknown box": lambda t: _part(t, 0, [1], [0], [1000]),
    "part with a negative box": lambda t: _part(t, 0, [-2], [0], [1000]),
    "no part in a row": lambda t: _part(t, 0, [-1], [0], [1000]),
    "two rows of a file": lambda t: [_part(t, 0, [0], [0], [1000]), _part(t, 0, [0], [0], [1000])],
    "unknown member": lambda t: t.update(extra=[]),
    "member gone": lambda t: t.pop("aliases"),
    "columns are objects": lambda t: t.update(path={}),
}


@pytest.mark.parametrize("name", TENSORS)
def test_Z06_tables_of_tensors_that_do_not_fit_are_refused(place: Path, cli, name: str):
    """Shapes, kinds, aliases and parts that contradict each other or the files: refused before any data is read."""
    edit_index(place, lambda document: TENSORS[name](document["tensors"]) and None)
    refused(place, cli, Damaged, match=INDEX)


FILES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "piece twice": lambda d: d["files"][0]["pieces"].append(d["files"][0]["pieces"][0]),
    "piece in two files": lambda d: d["files"][1]["pieces"].append(d["files"][0]["pieces"][0]),
    "piece gone": lambda d: d["files"][0]["pieces"].pop(),
    "unknown piece": lambda d: d["files"][0]["pieces"].append(99),
    "pieces of the meta": lambda d: d["files"][d["meta"]]["pieces"].append(0),
    "file gone": lambda d: d["files"].pop(0),
    "file twice": lambda d: d["files"].append(d["files"][0]),
    "no files": lambda d: d.update(files=[]),
    "no tensors": lambda d: d.update(
        tensors={"path": [], "kinds": [], "kind": [], "boxes": [], "parts": [], "aliases": []}
    ),
    "meta is a shard": lambda d: d.update(meta=0),
    "meta out of range": lambda d: d.update(meta=99),
    "root out of range": lambda d: d["files"][0].update(root=1),
    "a byte more": lambda d: d["files"][0].update(bytes=d["files"][0]["bytes"] + 1),
    "a byte less": lambda d: d["files"][0].update(bytes=d["files"][0]["bytes"] - 1),
    "no bytes": lambda d: d["files"][0].update(bytes=0, blocks=""),
    "unknown member": lambda d: d.update(extra=1),
    "unknown member of a file": lambda d: d["files"][0].update(extra=1),
    "member gone": lambda d: d.pop("time"),
    "attempt too short": lambda d: d.update(attempt="abc"),
    "attempt in upper case": lambda d: d.update(attempt=d["attempt"].upper()[:15] + "F"),
    "attempt with a newline": lambda d: d.update(attempt=d["attempt"][:-1] + "\n"),
    "attempt is a path": lambda d: d.update(attempt="../../../../../x"),
    "parent is a path": lambda d: d.update(parent="../../../../../x"),
    "time is a number": lambda d: d.update(time=5),
    "versions are a list": lambda d: d.update(versions=[]),
    "a version is a number": lambda d: d.update(versions={"torch": 2}),
    "run is a list": lambda d: d.update(run=[]),
    "run without end": lambda d: d.update(run="x" * 1000),
    "another block": lambda d: d.update(block=1024),
    "a list": lambda d: [],
}


@pytest.mark.parametrize("name", FILES)
def test_Z06_tables_of_files_that_do_not_fit_are_refused(place: Path, cli, name: str):
    """The same for the table of files and the head of the index."""
    document = index_of(place)
    made = FILES[name](document)
    if made == []:
        (place / INDEX).write_bytes(sign(b"[1,"))
    else:
        write_index(place, document)
    error, code = (UnsupportedVersion, 7) if name == "another block" else (Damaged, 3)
    refused(place, cli, error, match=INDEX, exit_code=code)


METAS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tensor out of range": lambda m: m["state"]["optimizer"].update(m={"$t": 99}),
    "negative tensor": lambda m: m["state"]["optimizer"].update(m={"$t": -1}),
    "float tensor": lambda m: m["state"]["optimizer"].update(m={"$t": 2.0}),
    "bool tensor": lambda m: m["state"]["optimizer"].update(m={"$t": True}),
    "tensor twice": lambda m: m["state"]["optimizer"].update(x=m["state"]["optimizer"]["m"]),
    "unknown tag": lambda m: m["state"].update(n={"$": "exec", "code": "x"}),
    "tag is a number": lambda m: m["state"].update(n={"$": 3}),
    "unknown member": lambda m: m["state"].update(n={"$": "int", "text": "99999999999999999999", "x": 1}),
    "int that is none": lambda m: m["state"].update(n={"$": "int", "text": "1e9"}),
    "int without end": lambda m: m["state"].update(n={"$": "int", "text": "9" * 1_000_000}),
    "float that is none": lambda m: m["state"].update(n={"$": "float", "bits": "xyz"}),
    "bytes that are none": lambda m: m["state"].update(n={"$": "bytes", "data": "!"}),
    "numpy of objects": lambda m: m["state"].update(n={"$": "numpy", "dtype": "|O", "data": ""}),
    "numpy without end": lambda m: m["state"].update(n={"$": "numpy", "dtype": "<U999999999", "data": ""}),
    "dtype that is code": lambda m: m["state"].update(n={"$": "dtype", "name": "load"}),
    "device that is none": lambda m: m["state"].update(n={"$": "device", "name": "$(reboot)"}),
    "size of text": lambda m: m["state"].update(n={"$": "Size", "items": ["a"]}),
    "date that is none": lambda m: m["state"].update(n={"$": "datetime", "text": "yesterday"}),
    "set with twins": lambda m: m["state"].update(n={"$": "set", "items": [1, 1]}),
    "set of lists": lambda m: m["state"].update(n={"$": "set", "items": [[1]]}),
    "dict with twin keys": lambda m: m["state"].update(n={"$": "dict", "items": [[1, 2], [1, 3]]}),
    "dict with list keys": lambda m: m["state"].update(n={"$": "dict", "items": [[[1], 2]]}),
    "dict with half a pair": lambda m: m["state"].update(n={"$": "dict", "items": [[1]]}),
    "sparse without parts": lambda m: m["state"].update(
        n={"$": "sparse", "layout": "sparse_coo", "shape": [2], "parts": {}}
    ),
    "array out of range": lambda m: m["state"].update(n={"$": "ndarray", "t": 99, "dtype": "<f4"}),
    "array of another type": lambda m: m["state"]["optimizer"].update(m={"$": "ndarray", "t": 2, "dtype": "<i2"}),
    "object of no kind": lambda m: m["state"].update(n={"$": "object", "kind": "x", "class": "y", "value": 1}),
    "a reserved key": lambda m: m["state"].update(n={"a": 1, "$b": 2}),
    "a run out of range": lambda m: m["state"].update(n={"$tensors": {"prefix": "", "first": 0, "count": 99}}),
    "state is a list": lambda m: m.update(state=[]),
    "state is a number": lambda m: m.update(state=3),
    "member gone": lambda m: m.pop("left"),
    "member more": lambda m: m.update(extra=1),
    "attempt of another": lambda m: m.update(attempt="0" * 16),
    "flat is a number": lambda m: m.update(flat=1),
    "left is a text": lambda m: m.update(left="x"),
    "big int plain": lambda m: m["state"].update(n=2**60),
    "requires grad for ints": lambda m: m["state"]["optimizer"].update(m={"$t": 2, "g": "yes"}),
}


@pytest.mark.parametrize("name", METAS)
def test_Z06_a_structure_that_does_not_fit_is_refused(place: Path, name: str):
    """A meta with right digests that breaks the format: Damaged, naming the file, with little memory."""
    edit_meta(place, lambda meta: METAS[name](meta) and None)
    model, other = {"w": torch.zeros(1000), "b": torch.zeros(3, 4)}, {"m": torch.zeros(5)}
    into = {"model": model, "optimizer": None if name == "array of another type" else other, "n": 0}
    with modest(64):
        for options in ({}, {"into": into}):
            with pytest.raises(Damaged) as caught:
                shardstore.load(place, **options)
            assert caught.value.file == meta_of(place)
            assert meta_of(place) in str(caught.value)


def test_Z06_the_meta_of_another_checkpoint_is_refused(place: Path, tmp_path: Path):
    """Right digests, right form, but of another attempt: a mixture is never loaded."""
    shardstore.save(STATE, tmp_path / "d")
    replace_file(place, meta_of(place), (tmp_path / "d" / meta_of(tmp_path / "d")).read_bytes())
    with pytest.raises(Damaged, match="another checkpoint") as caught:
        shardstore.load(place)
    assert caught.value.file == meta_of(place)
    (problem,) = shardstore.verify(place).checkpoints[0].problems
    assert (problem.kind, problem.file) == ("meta", meta_of(place))


# ------------------------------------------------------------------------------------------------ Z16: versions


SCHEMAS = [
    "shardstore/999", "shardstore/2", "shardstore/0", "shardstore/1.0", "1", 1, 1.0, 999, "", None, [], "SHARDSTORE/1",
    "shardstore/1 ", "safetensors/1",
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
def test_Z16_another_schema_is_an_unsupported_version(place: Path, cli, schema: Any):
    """A newer or unknown version is never guessed at: typed, exit code 7, and the files stay as they are."""
    edit_index(place, lambda document: document.update(schema=schema))
    refused(place, cli, UnsupportedVersion, match="schema", exit_code=7)


def test_Z16_an_index_without_a_schema_is_damaged(place: Path, cli):
    """There is nothing to go by."""
    edit_index(place, lambda document: document.pop("schema") and None)
    refused(place, cli, Damaged, match="schema")


def test_Z16_a_newer_index_of_another_form_is_still_called_newer(place: Path, cli):
    """A version that closes differently, or has other members, is not taken for damage."""
    (place / INDEX).write_bytes(b'{"schema": "shardstore/7", "blake3": "...", "everything": "different"}')
    refused(place, cli, UnsupportedVersion, match="shardstore/7", exit_code=7)


@pytest.mark.parametrize("schema", ["shardstore-meta/2", "shardstore-meta/999", None, 1, "", "shardstore/1"])
def test_Z16_another_schema_of_the_meta_is_an_unsupported_version(place: Path, schema: Any):
    """The same for the structure."""
    edit_meta(place, lambda meta: meta.update(schema=schema))
    with pytest.raises(UnsupportedVersion, match="schema"):
        shardstore.load(place)
    (problem,) = shardstore.verify(place).checkpoints[0].problems
    assert (problem.kind, problem.file) == ("meta", meta_of(place))


@pytest.mark.parametrize("dtype", ["float6", "qint8", "", "torch.float32", "object", "load"])
def test_Z16_an_unknown_dtype_is_an_unsupported_version(place: Path, cli, dtype: str):
    """A dtype of a later version."""
    edit_index(place, lambda document: document["tensors"]["kinds"][0].__setitem__(0, dtype))
    refused(place, cli, UnsupportedVersion, match="dtype", exit_code=7)


@pytest.mark.parametrize("options", [{}, {"mode": "map"}, {"only": "model/w"}], ids=str)
def test_Z16_a_dtype_that_this_torch_lacks_is_an_unsupported_version(
    place: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    """A known dtype, but an older torch: the error says so, and what has other dtypes still loads."""
    monkeypatch.delitem(TORCH_DTYPES, "float32")
    with pytest.raises(UnsupportedVersion, match="float32"):
        shardstore.load(place, **options)
    with shardstore.open(place) as ckpt, pytest.raises(UnsupportedVersion, match="float32"):
        ckpt["model/w"]
    assert shardstore.load(place, only="n") == {"n": 3}
    assert shardstore.verify(place).ok


def test_a_damaged_checkpoint_costs_little_time(place: Path):
    """A million levels, and digits without end, are refused in about linear time: this ends at all within the limit."""
    began = time.perf_counter()
    for text in (
        b'{"schema":"shardstore/1","step":' + b"9" * 3_000_000 + b",",
        b'{"schema":"shardstore/1","x":' + b"[" * 3_000_000,
    ):
        (place / INDEX).write_bytes(sign(text))
        with pytest.raises(Damaged):
            shardstore.load(place)
    assert time.perf_counter() - began < 100
