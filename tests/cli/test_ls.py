"""`shardstore ls`."""

from __future__ import annotations

from tests.cli import made


def test_sorted_by_step_then_time_unfinished_last(call_json, run_folder):
    """Step 9 comes before 10, equal steps by time, no step first, and saves that died come last and are called so."""
    made.checkpoint(run_folder / "again", step=10, attempt="5" * 16, time="2025-01-01T00:00:00.000000Z")
    made.checkpoint(run_folder / "nostep", step=None, attempt="6" * 16)
    code, document = call_json("ls", run_folder)
    assert code == document["exit_code"] == 0
    assert [row["path"] for row in document["checkpoints"]] == [
        "nostep",
        "step-9",
        "again",
        "step-10",
        "step-11",
        "step-12",
    ]
    assert [row["state"] for row in document["checkpoints"]] == ["committed"] * 4 + ["unfinished"] * 2


def test_one_checkpoint(call, call_json, run_folder):
    """At a checkpoint there is one row with its step, time, exact bytes, counts, hash, attempt; in text it is human."""
    folder = run_folder / "step-10"
    nbytes = sum(file.stat().st_size for file in folder.rglob("*-1*.*"))
    assert call_json("ls", folder)[1]["checkpoints"] == [
        {
            "path": ".", "state": "committed", "step": 10, "time": "2026-03-01T12:30:00.250000Z", "bytes": nbytes,
            "tensors": 4, "shards": 2, "hash": "xxh3_128", "attempt": "1" * 16, "error": None, "exit_code": 0,
        }
    ]  # fmt: skip
    head, row = call("ls", folder).stdout.splitlines()
    assert head.split() == ["STEP", "TIME", "SIZE", "TENSORS", "SHARDS", "HASH", "ATTEMPT", "STATE", "PATH"]
    assert row.split() == [
        "10",
        "2026-03-01",
        "12:30:00Z",
        "4.80",
        "MB",
        "4",
        "2",
        "xxh3_128",
        "1" * 16,
        "committed",
        ".",
    ]


def test_unfinished_save(call_json, run_folder):
    """A save without an index shows its attempt, the bytes so far and the time of its mark; that is no error of ls."""
    code, document = call_json("ls", run_folder / "step-11")
    (row,) = document["checkpoints"]
    assert code == 0
    assert (row["state"], row["attempt"], row["bytes"], row["step"]) == ("unfinished", "3" * 16, 1000, None)
    assert row["time"].endswith("Z")


def test_a_damaged_index_hides_no_other(call, call_json, run_folder):
    """Beside a damaged index all others are listed; stderr and the exit code tell of it."""
    made.flip(run_folder / "step-9" / "shardstore.json", 300)
    result = call("ls", run_folder)
    assert result.exit_code == 3
    assert "committed   step-10" in result.stdout
    assert "damaged     step-9" in result.stdout
    assert "step-9: shardstore.json is no valid index" in result.stderr
    states = {row["path"]: row["state"] for row in call_json("ls", run_folder)[1]["checkpoints"]}
    assert (states["step-9"], states["step-10"]) == ("damaged", "committed")


def test_wide_names_are_whole(call, shm_path):
    """A path far wider than a terminal is not cut."""
    name = "x" * 200
    made.checkpoint(shm_path / name)
    assert name in call("ls", shm_path).stdout


def test_data_without_index_and_mark_is_shown(call_json, run_folder):
    """A checkpoint that lost its index is not passed over: it is listed as unfinished."""
    (run_folder / "step-9" / "shardstore.json").unlink()
    states = {row["path"]: row["state"] for row in call_json("ls", run_folder)[1]["checkpoints"]}
    assert states["step-9"] == "unfinished"
