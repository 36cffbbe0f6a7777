"""`shardstore verify`."""

from __future__ import annotations

from shardstore.cli.verify import _blocks
from tests.cli import made

SHARD = f"model-00001-of-00001-{made.ATTEMPT}.safetensors"
STATE = f"state/00001-of-00001-{made.ATTEMPT}.safetensors"


def test_whole_is_0(call, call_json, shm_path):
    """A whole checkpoint exits 0 and is called so; foreign files are a note."""
    made.checkpoint(shm_path)
    (shm_path / "config.json").touch()
    result = call("verify", shm_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{shm_path}: whole; step 7, 4 tensors in 3 files, 4.80 MB" in result.stdout
    assert "note: not of shardstore, not checked: config.json" in result.stdout
    code, document = call_json("verify", shm_path)
    assert code == 0
    assert document["ok"] is True
    (found,) = document["checkpoints"]
    nbytes = sum(file.stat().st_size for file in shm_path.rglob(f"*{made.ATTEMPT}*"))
    assert found == {
        "url": str(shm_path), "state": "whole", "exit_code": 0, "attempt": made.ATTEMPT, "step": 7, "bytes": nbytes,
        "files": 3, "tensors": 4, "problems": [], "leftovers": [], "foreign": ["config.json"], "error": None,
    }  # fmt: skip


def test_damage_is_named(call, call_json, shm_path):
    """Every damaged file, block and tensor is named, one bad file does not hide the next, and the exit code is 3."""
    made.checkpoint(shm_path)
    made.flip(shm_path / SHARD, 4_500_000)
    (shm_path / STATE).unlink()
    result = call("verify", shm_path)
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert f"  {SHARD}: damaged in block 1 (of 4 MiB, from 0)" in lines
    assert {"    model/wte.weight", "    model/lm_head.weight", "    model/h.0.bias", "    optimizer/step"} <= set(
        lines
    )
    assert f"  {STATE} is missing" in lines
    assert lines[-1].startswith("1 checkpoint: 1 damaged; ")
    problems = call_json("verify", shm_path)[1]["checkpoints"][0]["problems"]
    assert [(p["kind"], p["file"], p["blocks"], p["tensors"]) for p in problems] == [
        ("damaged", SHARD, [1], ["model/wte.weight", "model/lm_head.weight", "model/h.0.bias"]),
        ("missing", STATE, [], ["optimizer/step"]),
    ]


def test_more_tensors_than_an_error_names(call, shm_path):
    """All tensors of a bad block are listed, not the first few."""
    tensors = {f"model/t{number}": ("uint8", (4,)) for number in range(50)}
    made.checkpoint(shm_path, tensors=tensors, ties={})
    made.flip(shm_path / SHARD, -1)
    lines = call("verify", shm_path).stdout.splitlines()
    assert all(f"    {path}" in lines for path in tensors)


def test_all_below(call, call_json, run_folder):
    """Below a folder every checkpoint is checked; unfinished saves make it 4, damage makes it 3."""
    code, document = call_json("verify", run_folder, "--threads", "2")
    states = {found["url"].rpartition("/")[2]: found["state"] for found in document["checkpoints"]}
    assert states == {"step-10": "whole", "step-9": "whole", "step-11": "unfinished", "step-12": "unfinished"}
    assert code == document["exit_code"] == 4
    made.flip(next((run_folder / "step-9").glob("model-*-2*")), 8)
    result = call("verify", run_folder)
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1].startswith("4 checkpoints: 1 whole, 2 unfinished, 1 damaged; ")


def test_leftovers_are_told_and_harm_nothing(call, call_json, shm_path):
    """What a dead save left beside a whole checkpoint is told; the exit code stays 0."""
    made.checkpoint(shm_path)
    made.unfinished(shm_path, hours=30)
    result = call("verify", shm_path)
    assert result.exit_code == 0
    assert "leftover 00000000deadbeef: 2 files, 1.00 kB; a save that did not end" in result.stdout
    (left,) = call_json("verify", shm_path)[1]["checkpoints"][0]["leftovers"]
    assert (left["attempt"], left["bytes"], left["removable"], len(left["files"])) == (
        "00000000deadbeef",
        1000,
        True,
        2,
    )


def test_lost_index_below_a_folder_is_not_passed_over(call_json, run_folder):
    """A checkpoint that lost its index counts as unfinished, though no mark tells of it."""
    (run_folder / "step-9" / "shardstore.json").unlink()
    states = {
        found["url"].rpartition("/")[2]: found["state"] for found in call_json("verify", run_folder)[1]["checkpoints"]
    }
    assert states["step-9"] == "unfinished"


def test_block_numbers_are_ranges():
    """Runs of blocks are written as ranges, so that a lost disk does not fill the screen."""
    assert _blocks([3]) == "block 3"
    assert _blocks([0, 7, 8, 9, 12]) == "blocks 0, 7-9, 12"
