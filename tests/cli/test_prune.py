"""`shardstore prune`."""

from __future__ import annotations

import pytest

from shardstore.cli import prune
from tests.cli import made


def everything(folder):
    """All files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_without_yes_nothing_is_removed(call, call_json, run_folder):
    """A dry run tells per leftover which files would go and why others stay, and removes nothing."""
    before = everything(run_folder)
    result = call("prune", run_folder, "--leftovers")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"would remove {'3' * 16} in step-11: 2 files, 1.00 kB; a save that did not end, ")
    assert lines[1] == f"  model-00001-of-00002-{'3' * 16}.safetensors"
    assert any(line.startswith(f"keep {'4' * 16} in step-12: ") and "kept until" in line for line in lines)
    assert lines[-1] == "to remove: 1 leftover, 1.00 kB; nothing was removed, --yes does it"
    code, document = call_json("prune", run_folder, "--leftovers")
    assert (code, document["dry_run"]) == (0, True)
    assert [(left["path"], left["removable"], left["removed"]) for left in document["leftovers"]] == [
        ("step-11", True, False),
        ("step-12", False, False),
    ]
    assert everything(run_folder) == before


def test_yes_removes_old_leftovers_and_nothing_else(call, run_folder):
    """--yes removes the files of the save that died 30 hours ago; the young one and the checkpoints stay whole."""
    made.unfinished(run_folder / "step-9", attempt="7" * 16, hours=30)
    before = everything(run_folder)
    result = call("prune", run_folder, "--leftovers", "--yes")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "removed: 2 leftovers, 2.00 kB"
    gone = set(before) - set(everything(run_folder))
    assert gone == {name for name in before if "3" * 16 in name or "7" * 16 in name}
    for step in ("step-9", "step-10"):
        assert call("verify", run_folder / step).exit_code == 0
    again = call("prune", run_folder, "--leftovers")
    assert again.stdout.splitlines()[-1] == "to remove: nothing"


@pytest.mark.parametrize(("hours", "removed"), [(25, True), (31, False)])
def test_older_than_raises_the_limit(call_json, shm_path, hours, removed):
    """--older-than spares what is younger than it."""
    made.unfinished(shm_path, hours=30)
    _, document = call_json("prune", shm_path, "--leftovers", "--yes", "--older-than", hours)
    assert [left["removed"] for left in document["leftovers"]] == [removed]
    assert bool(everything(shm_path)) is not removed


def test_older_than_can_not_lower_the_limit(call, shm_path):
    """Less than 24 hours is a usage error, and nothing is removed."""
    made.unfinished(shm_path, hours=3)
    assert call("prune", shm_path, "--leftovers", "--yes", "--older-than", 2).exit_code == 2
    assert len(everything(shm_path)) == 2


def test_replaced_files_go_after_a_minute_unless_spared(call_json, shm_path):
    """What an overwrite replaced goes at once, but --older-than spares it, too."""
    made.checkpoint(shm_path)
    made.unfinished(shm_path, hours=1, state="superseded")
    _, document = call_json("prune", shm_path, "--leftovers", "--older-than", 24)
    assert [left["removable"] for left in document["leftovers"]] == [False]
    _, document = call_json("prune", shm_path, "--leftovers", "--yes")
    assert [left["removed"] for left in document["leftovers"]] == [True]


def test_without_a_mark_nothing_is_touched(call_json, shm_path):
    """Files under no mark are told, and stay."""
    made.unfinished(shm_path, hours=30)
    (shm_path / "attempt-00000000deadbeef.json").unlink()
    code, document = call_json("prune", shm_path, "--leftovers", "--yes")
    (left,) = document["leftovers"]
    assert (code, left["removable"], left["removed"], left["age"]) == (0, False, False, None)
    assert len(everything(shm_path)) == 1


def test_a_damaged_index_keeps_its_folder_and_no_other(call_json, run_folder):
    """Where an index can't be read nothing goes, other places are cleaned, and the exit code is 3."""
    made.unfinished(run_folder / "step-9", attempt="7" * 16, hours=30)
    made.flip(run_folder / "step-9" / "shardstore.json", 300)
    before = everything(run_folder / "step-9")
    code, document = call_json("prune", run_folder, "--leftovers", "--yes")
    assert code == document["exit_code"] == 3
    assert [skipped["path"] for skipped in document["skipped"]] == ["step-9"]
    assert everything(run_folder / "step-9") == before
    assert not (run_folder / "step-11" / f"attempt-{'3' * 16}.json").exists()


def test_what_can_not_be_removed_is_an_error(call, monkeypatch, run_folder):
    """An error of the store while removing is told, and the exit code is 1."""
    monkeypatch.setattr(prune, "remove", lambda store, left: ["removing 'x' failed: permission is denied"])
    result = call("prune", run_folder, "--leftovers", "--yes")
    assert result.exit_code == 1
    assert result.stdout.startswith("FAILED ")
    assert result.stdout.splitlines()[-1] == "removed: 0 leftovers, 0 bytes"
    assert "not removed: removing 'x' failed" in result.stderr
