"""Runs on the command line: `ls` of a run, `pin`, `pivot`, `fork`, `prune` by policies, `plot`."""

from __future__ import annotations

import math
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shardstore.run import Run, folder_name
from tests.cli import made
from tests.kit.runs import Trainer, new_attempt


@pytest.fixture
def folder(shm_path) -> Path:
    """A run of two owners: 10 to 50, then 20 and 30 again from 10; a save that is not finished; 10 is pinned."""
    with Run(shm_path / "run") as run:
        trainer = Trainer(run)
        with run.take_owner():
            for step in range(1, 51):
                run.record_loss(step, 100.0 - step, val=step)
                if step % 10 == 0:
                    trainer.save(step)
            run.log.flush()
        trainer.resume(10)
        with run.take_owner():
            run.log.event("resume", 10)
            for step in range(11, 31):
                run.record_loss(step, math.nan if step == 30 else step / 4)
                if step % 10 == 0:
                    trainer.save(step)
            run.log.flush()
        trainer.begin(40)
        run.pin(10, "good")
    return shm_path / "run"


def _flip(folder: Path, step: int) -> None:
    """Change one bit of the weights of the newest checkpoint of a step."""
    with Run(folder) as run:
        (shard,) = Path(run.at(step).url).glob("model-*.safetensors")
    made.flip(shard, shard.stat().st_size - 1)


def test_ls_shows_a_run(call, folder):
    """In the order of saving: step, size, loss, marks; what was left behind is called so; unfinished saves last."""
    result = call("ls", folder)
    assert result.exit_code == 0
    title, head, *rows = result.stdout.splitlines()
    assert title.startswith("run ")
    assert "owner 2: process" in title
    assert title.endswith(", ended")
    assert head.split() == ["STEP", "TIME", "SIZE", "LOSS", "ATTEMPT", "STATE", "PATH", "MARKS"]
    assert [row.split()[0] for row in rows] == ["10", "20", "30", "40", "50", "20", "30", "-"]
    assert rows[0].endswith("pinned")
    assert all(row.endswith("left behind") for row in rows[1:5])
    assert rows[5].split()[5] == "5"
    assert rows[6].split()[5] == "nan"
    assert rows[6].endswith("newest")
    assert " unfinished " in rows[7]


def test_ls_of_a_run_as_json(call_json, folder):
    """The document has the run, its owner, and beside the usual members what the run knows; nan is a string."""
    code, document = call_json("ls", folder)
    assert code == document["exit_code"] == 0
    assert document["run"]["owner"]["epoch"] == 2
    assert document["run"]["owner"]["live"] is False
    assert document["run"]["generation"] == 0
    rows = document["checkpoints"]
    assert [(row["step"], row["owner"], row["left_behind"]) for row in rows[:-1]] == [
        (10, 1, False), (20, 1, True), (30, 1, True), (40, 1, True), (50, 1, True), (20, 2, False), (30, 2, False),
    ]  # fmt: skip
    assert [row["loss"] for row in rows] == [90.0, None, None, None, None, 5.0, "nan", None]
    assert [row["newest"] for row in rows] == [False] * 6 + [True, False]
    assert rows[0]["pinned"]
    assert rows[0]["tensors"] == 1


def test_X01_steps_in_numeric_order(call_json, shm_path):
    """Steps of any number of digits are listed in the order in which they were saved."""
    with Run(shm_path / "run") as run:
        trainer = Trainer(run)
        for step in (9, 10, 100_000, 900_000, 1_000_000):
            trainer.save(step)
    assert [row["step"] for row in call_json("ls", shm_path / "run")[1]["checkpoints"]] == [
        9, 10, 100_000, 900_000, 1_000_000,
    ]  # fmt: skip


@pytest.mark.parametrize("debris", [False, True])
def test_X17_a_run_without_checkpoints(call, call_json, shm_path, debris):
    """An empty run is "not found" (5); with an unfinished save alone it is listed, but `RUN@latest` is not found."""
    with Run(shm_path / "run") as run:
        trainer = Trainer(run)
        if debris:
            trainer.begin(10)
    assert call("ls", shm_path / "run").exit_code == (0 if debris else 5)
    for command in (["show"], ["verify"], ["pin"]):
        code, document = call_json(*command, f"{shm_path}/run@latest")
        assert code == document["error"]["exit_code"] == 5
    for words in (["pivot", shm_path / "run"], ["prune", shm_path / "run", "--keep-last", 1]):
        assert call(*words).exit_code == 5


def test_marks_damage_and_foreigners_in_ls(call_json, folder):
    """A checkpoint in quarantine, one under a wrong name, one of another run are told; the damaged index gives 3."""
    with Run(folder) as run:
        run.quarantine(30, "block 0")
        other = run.at(20)
        Trainer(run).save(60, run="0123456789abcdef")
    shutil.copytree(other.url, folder / folder_name(70, new_attempt()))
    code, document = call_json("ls", folder)
    found = {(row["step"], row["state"]): row for row in document["checkpoints"]}
    assert (60, "foreign") in found
    assert (20, "damaged") in found  # what the index in the wrong folder says
    assert found[30, "committed"]["quarantined"] or any(row["quarantined"] for row in document["checkpoints"])
    assert code == 0


def test_addresses(call, call_json, folder):
    """`show`, `verify` and `ls` take RUN@STEP and RUN@latest; a step that is not there is 5."""
    assert call_json("show", f"{folder}@latest")[1]["step"] == 30
    assert call_json("show", f"{folder}@20")[1]["owner"] == 2
    assert call_json("verify", f"{folder}@10")[1]["ok"] is True
    assert len(call_json("ls", f"{folder}@10")[1]["checkpoints"]) == 1
    result = call("show", f"{folder}@60")
    assert result.exit_code == 5
    assert "no checkpoint of step 60; it has 10, 20, 30, 40, 50" in result.stderr


def test_pin(call, call_json, folder):
    """A pin by step, by attempt, and its removal; a checkpoint that is no address is a usage error."""
    code, document = call_json("pin", f"{folder}@20", "--reason", "paper")
    assert (code, document["step"], document["pinned"]) == (0, 20, True)
    assert "is pinned" in call("pin", f"{folder}@latest").stdout
    assert call("pin", f"{folder}@{document['attempt']}", "--remove").exit_code == 0
    with Run(folder) as run:
        assert {one.step for one in run.checkpoints() if one.pinned} == {10, 30}
    assert call("pin", folder).exit_code == 2
    assert call("pin", f"{folder}@99").exit_code == 5


def test_pivot(call, call_json, folder):
    """A pivot tells its generation and step, and shows in `ls`; a damaged newest checkpoint refuses it with 3."""
    code, document = call_json("pivot", folder)
    assert (code, document["generation"], document["step"]) == (0, 1, 30)
    assert "generation 2 begins at step 30" in call("pivot", folder).stdout
    assert "generation 2, since step 30" in call("ls", folder).stdout
    _flip(folder, 30)
    assert call("pivot", folder).exit_code == 3


def test_pivot_while_somebody_trains(call_json, folder):
    """A living owner refuses it, by name, with 1."""
    with Run(folder) as run, run.take_owner():
        code, document = call_json("pivot", folder)
    assert (code, document["error"]["kind"], document["error"]["by"]) == (1, "Fenced", 3)


def test_fork(call, call_json, folder):
    """A fork is a run with one checkpoint and its origin; a place that is taken is 6, a damaged checkpoint 3."""
    new = folder.parent / "new"
    code, document = call_json("fork", f"{folder}@20", new)
    assert (code, document["origin"]["step"]) == (0, 20)
    title = call("ls", new).stdout.splitlines()[0]
    assert f"run {document['run']}; forked from" in title
    assert title.endswith("at step 20")
    assert call("verify", new).exit_code == 0
    assert call("fork", f"{folder}@20", new).exit_code == 6
    assert call("fork", folder, folder.parent / "x").exit_code == 2
    _flip(folder, 30)
    assert call("fork", f"{folder}@latest", folder.parent / "x").exit_code == 3
    assert "is the run" in call("fork", f"{folder}@10", folder.parent / "x").stdout


def test_prune_tells_why_and_removes_nothing(call, call_json, folder):
    """Without --yes each checkpoint is told with its reasons, and nothing goes."""
    before = sorted(folder.rglob("*"))
    result = call("prune", folder, "--keep-last", "2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert sum(line.startswith("keep step-00000010-") and line.endswith(": pinned") for line in lines) == 1
    assert sum(line.startswith("would remove step-000000") and "no policy keeps it" in line for line in lines) == 4
    assert any(line.startswith("keep step-00000040-") and "unfinished: not touched" in line for line in lines)
    assert "nothing was removed" in lines[-1]
    code, document = call_json("prune", folder, "--keep-last", "2")
    assert (code, document["dry_run"]) == (0, True)
    assert sorted(folder.rglob("*")) == before


def test_prune_by_policies(call_json, folder):
    """With --yes what no policy keeps goes, and all else is whole; a second time there is nothing to do."""
    words = ["prune", folder, "--keep-last", "1", "--keep-every", "50", "--yes"]
    code, document = call_json(*words)
    assert code == 0
    gone = [row["step"] for row in document["decisions"] if row["removed"]]
    assert sorted(gone) == [20, 20, 30, 40]
    with Run(folder) as run:
        left = [(one.step, one.owner) for one in run.checkpoints() if one.state == "committed"]
        assert left == [(10, 1), (50, 1), (30, 2)]
        assert all(run.verify(one).ok for one in run.checkpoints() if one.state == "committed")
    assert not any(row["removed"] or not row["keep"] for row in call_json(*words)[1]["decisions"])


def test_prune_by_metric_and_age(call_json, folder):
    """The best of a metric, recorded at its step, and what is young."""

    def keeps(*words) -> set[int]:
        rows = call_json("prune", folder, *words)[1]["decisions"]
        return {row["step"] for row in rows if row["keep"] and row["state"] == "committed"}

    assert keeps("--keep-best", "loss") == {10, 20, 30}
    assert keeps("--keep-best", "val:1:max") == {10, 30}
    assert keeps("--keep-for", "1s") == {10, 30}
    assert keeps("--keep-for", "9000w") == {10, 20, 30, 40, 50}


def test_X06_prune_with_a_damaged_newest(call, folder):
    """A damaged newest checkpoint lets nothing go that no other whole one replaces; the exit code is 3."""
    _flip(folder, 30)
    result = call("prune", folder, "--keep-last", "1", "--yes")
    assert result.exit_code == 3
    assert "is not whole" in result.stderr
    with Run(folder) as run:
        assert {(one.step, one.owner) for one in run.checkpoints() if one.usable} == {(10, 1), (20, 2), (30, 2)}
        assert run.verify(run.checkpoints()[1]).ok


@pytest.mark.parametrize(
    "words",
    [
        ["--keep-last", "0"],
        ["--keep-last", "-1"],
        ["--keep-every", "0"],
        ["--keep-best", "loss:0"],
        ["--keep-best", "loss:1:best"],
        ["--keep-for", "0d"],
        ["--keep-for", "7"],
        ["--keep-last", "1", "--leftovers"],
        ["--quarantined"],
    ],
    ids=" ".join,
)
def test_X18_policies_that_make_no_sense(call, folder, words):
    """Zero, negative and malformed ones are usage errors, and nothing goes."""
    assert call("prune", folder, *words, "--yes").exit_code == 2
    with Run(folder) as run:
        assert len(run.checkpoints()) == 8


def test_plot(call, call_json, folder):
    """Two branches in one picture, as PNG and SVG; the document has what was drawn."""
    pytest.importorskip("matplotlib")
    new = folder.parent / "new"
    assert call("pivot", folder).exit_code == 0
    assert call("fork", f"{folder}@20", new).exit_code == 0
    out = folder.parent / "losses"
    assert call("plot", folder, new, "-o", f"{out}.svg").exit_code == 0
    labels = {text for element in ET.parse(f"{out}.svg").iter() for text in [str(element.tag)]}
    assert "{http://www.w3.org/2000/svg}path" in labels
    code, document = call_json("plot", folder, new, "-o", f"{out}.png")
    assert code == 0
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")
    first, second = document["runs"]
    assert (first["values"], first["last"], first["last_value"]) == (30, 30, "nan")
    assert first["checkpoints"] == [10, 20, 30]
    assert [(event["kind"], event["step"]) for event in first["events"]] == [("resume", 10), ("pivot", 30)]
    assert (second["values"], second["last_value"]) == (20, 5.0)
    assert ("fork", 20) in [(event["kind"], event["step"]) for event in second["events"]]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["losses.png", "losses.svg", "new", "run"]


def test_plot_of_nothing(call, folder):
    """A metric that nobody recorded gives an empty picture and a remark; a place that is no run is 5."""
    pytest.importorskip("matplotlib")
    result = call("plot", folder, "--metric", "accuracy", "-o", folder.parent / "x.png")
    assert result.exit_code == 0
    assert "nothing was recorded" in result.stderr
    assert call("plot", folder.parent / "gone", "-o", folder.parent / "y.png").exit_code == 5
    assert call("plot", folder, "-o", folder.parent / "x.gif").exit_code == 2
    assert call("plot", folder, "-o", folder.parent / "gone" / "x.png").exit_code == 5


def test_plot_without_matplotlib(call, folder, monkeypatch):
    """Without the extra the error says how to get it, and no file is made."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = call("plot", folder, "-o", folder.parent / "x.png")
    assert result.exit_code == 2
    assert "pip install 'shardstore[plot]'" in result.stderr
    assert not (folder.parent / "x.png").exists()
