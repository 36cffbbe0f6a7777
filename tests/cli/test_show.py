"""`shardstore show`."""

from __future__ import annotations

import hashlib

import pytest

from tests.cli import made

SHARD = f"model-00001-of-00001-{made.ATTEMPT}.safetensors"


@pytest.fixture
def folder(shm_path):
    """One whole checkpoint."""
    return made.checkpoint(shm_path, left=["optimizer/hook"])


def test_head(call_json, folder):
    """The head holds what the index says, what was left to the user, and the digest that `expect=` takes."""
    code, document = call_json("show", folder)
    assert code == 0
    assert document["digest"] == hashlib.sha256((folder / "shardstore.json").read_bytes()).hexdigest()
    assert document["left"] == ["optimizer/hook"]
    head = {name: document[name] for name in ("step", "time", "attempt", "hash", "world", "versions", "owner", "seq")}
    assert head == {
        "step": 7, "time": "2026-03-01T12:30:00.250000Z", "attempt": made.ATTEMPT, "hash": "xxh3_128", "world": 1,
        "versions": {"shardstore": "0.1.0", "torch": "2.13.0"}, "owner": 0, "seq": 0,
    }  # fmt: skip


def test_tensors_ties_and_sections(call_json, folder):
    """Every tensor is shown with its place; a tied one names the other, and its bytes count once in the sum."""
    _, document = call_json("show", folder)
    tensors = {tensor["path"]: tensor for tensor in document["tensors"]}
    assert list(tensors) == list(made.TENSORS)
    tied, stored = tensors["model/lm_head.weight"], tensors["model/wte.weight"]
    assert (tied["tied_to"], tied["pieces"]) == ("model/wte.weight", stored["pieces"])
    assert stored == {
        "path": "model/wte.weight", "dtype": "float32", "shape": [1200, 1000], "bytes": 4_800_000, "tied_to": None,
        "pieces": [{"file": SHARD, "offset": stored["pieces"][0]["offset"], "origin": [0, 0], "shape": [1200, 1000]}],
    }  # fmt: skip
    assert document["sections"] == [
        {"name": "model", "tensors": 3, "bytes": 4_800_032},
        {"name": "optimizer", "tensors": 1, "bytes": 8},
    ]
    assert (document["shards"][0]["file"], document["shards"][0]["tensors"]) == (SHARD, 2)
    assert all((folder / shard["file"]).stat().st_size == shard["bytes"] for shard in document["shards"])


def test_text(call, folder):
    """The text has head, sections, tensors with their tie, and shards."""
    lines = call("show", folder).stdout.splitlines()
    assert "step        7" in lines
    assert "left out    optimizer/hook" in lines
    assert ["model", "3", "4.80", "MB"] in map(str.split, lines)
    assert "model/lm_head.weight  float32   1200x1000   4.80 MB  = model/wte.weight" in lines
    assert "optimizer/step        int64     scalar      8 bytes  state/00001-of-00001" in lines
    assert lines[-2].split() == [SHARD, "4.80", "MB", "2"]


def test_selected_tables(call, call_json, folder):
    """--tensors and --shards show that table alone, and don't need the structure."""
    (folder / f"state/meta-{made.ATTEMPT}.json").unlink()
    text = call("show", folder, "--tensors")
    assert (text.exit_code, text.stdout.split()[0], len(text.stdout.splitlines())) == (0, "TENSOR", 5)
    assert set(call_json("show", folder, "--shards")[1]) == {"url", "shards"}
    assert set(call_json("show", folder, "--shards", "--tensors")[1]) == {"url", "tensors", "shards"}


def test_only(call, call_json, folder):
    """--only picks tensors by pattern, and the shards and sections that hold them; without a match it is an error."""
    _, document = call_json("show", folder, "--only", "model/h.*", "--only", "optimizer")
    assert [tensor["path"] for tensor in document["tensors"]] == ["model/h.0.bias", "optimizer/step"]
    assert [section["name"] for section in document["sections"]] == ["model", "optimizer"]
    _, document = call_json("show", folder, "--only", "model/lm_head.weight")
    assert [shard["file"] for shard in document["shards"]] == [SHARD]
    result = call("show", folder, "--only", "nope/*")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'nope/*'; the sections are model, optimizer" in result.stderr


def test_wide_names_are_whole(call, shm_path):
    """A tensor's name far wider than a terminal is not cut."""
    name = "model/" + "x" * 300
    made.checkpoint(shm_path, tensors={name: ("uint8", (1,))}, ties={})
    assert name in call("show", shm_path).stdout


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_damaged_structure_hides_no_table(call, call_json, folder, how):
    """Where meta is damaged or gone, the tables still come, and the exit code is 3."""
    meta = folder / f"state/meta-{made.ATTEMPT}.json"
    made.flip(meta, 3) if how == "damaged" else meta.unlink()
    result = call("show", folder)
    assert result.exit_code == 3
    assert "model/wte.weight" in result.stdout
    assert meta.name in result.stderr
    code, document = call_json("show", folder)
    assert (code, document["left"], document["error"]["kind"]) == (3, None, "Damaged")


def test_unfinished_is_4(call, shm_path):
    """A save that is not finished can't be shown."""
    result = call("show", made.unfinished(shm_path))
    assert (result.exit_code, result.stdout) == (4, "")
