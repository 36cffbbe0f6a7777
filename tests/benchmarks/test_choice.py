"""What a plain run leaves out, runs put together, and what the report says of peers that are faster."""

import pytest

from benchmarks import __main__ as tool
from benchmarks import choice, goals, notes, report, states
from benchmarks.merging import merged
from benchmarks.systems import SYSTEMS
from benchmarks.tasks import TASKS
from tests.benchmarks.test_benchmarks import row, run


def test_a_plain_run_measures_all_that_goals_name():
    """Each goal of a state that is measured by default keeps shardstore and whoever it is judged against."""
    for goal in (each for each in goals.goals(2) if each.task in choice.DEFAULT_TASKS):
        out = choice.left_out(goal.state, "peak" if goal.unit == "MiB" else goal.task)
        assert goal.state in choice.DEFAULT_STATES
        assert "shardstore" not in out
        judges = [name for name in goal.than if name in SYSTEMS and goal.task in SYSTEMS[name].calls]
        assert not judges or set(judges) - set(out)
        if goal.than == goals.PEERS:  # many small tensors, where safetensors and torch are the fastest
            assert not {"torch", "safetensors", "safetensors-clone", "fastsafetensors", "runai"} & set(out)


def test_who_is_left_out_does_that_task():
    """No name in the choice is stale: each is a system that takes part in that task at that state."""
    for (state, task), names in choice._LEFT_OUT.items():
        assert state in states.STATES
        for name in names:
            assert task == "peak" or (task in SYSTEMS[name].calls and TASKS[task].suits(state))


def test_who_is_left_out_has_a_row_that_says_so(shm_path, monkeypatch):
    """In a plain run; with `--all`, or where it is named, it is measured."""
    monkeypatch.setitem(choice._LEFT_OUT, ("toy", "save"), ("flat",))
    monkeypatch.setitem(choice._LEFT_OUT, ("toy", "peak"), tuple(name for name in SYSTEMS if name != "shardstore"))
    words = ["--states", "toy", "--rounds", "1", "--memory", str(shm_path), "--tasks"]
    done = tool.run(tool.arguments([*words, "save", "peak"]))
    flat = next(each for each in done["results"] if each["system"] == "flat")
    assert (flat["seconds"], flat["skipped"]) == ([], choice.WHY)
    assert all(("extra" in each) == (each["system"] == "shardstore") for each in done["peaks"])
    text = report.markdown(done)
    assert "| flat | `tofile`: not measured |" in text
    assert f"Not measured: flat; {choice.WHY}." in text
    assert "| save | toy | torch | `torch.save` | not measured |" in text
    named = tool.run(tool.arguments([*words, "save", "--systems", "flat"]))
    assert [bool(each["seconds"]) for each in named["results"]] == [True]


def test_runs_are_put_together_by_whole_tasks():
    """The last run that measured a task counts, with all its rows; each part says when and how it was measured."""
    first = run(
        row("shardstore", "save", 1.0, kind="ours"),
        row("torch", "save", 2.0),
        row("shardstore", "open", 1.0, kind="ours"),
        peaks=[
            {"state": "gpt-124m", "task": "save", "system": "shardstore", "call": "save()", "extra": 1, "how": "VmHWM"}
        ],
    )
    skipped = {**row("shardstore", "open", kind="ours"), "skipped": "needs a server"}
    second = run(skipped, row("shardstore", "save", 0.5, kind="ours"))
    second |= {"date": "2026-02-02", "command": "python -m benchmarks --tasks save"}
    both = merged([first, second])
    found = {(each["task"], each["system"]): each["seconds"] for each in both["results"]}
    assert found == {("save", "shardstore"): [0.5], ("open", "shardstore"): [1.0]}
    assert both["peaks"] == first["peaks"]
    text = report.markdown(both)
    assert "Measured on 2026-01-01 by `python -m benchmarks`" in text
    assert "Measured on 2026-02-02 by `python -m benchmarks --tasks save`" in text
    with pytest.raises(ValueError, match="threads"):
        merged([first, {**second, "settings": {"rounds": 3, "threads": 4}}])


def test_a_task_that_a_peer_wins_is_explained(monkeypatch):
    """Below its table, and linked from the list of all; not where shardstore wins, or is as fast."""
    monkeypatch.setattr(notes, "NOTES", {("", "open"): "It reads less."})
    faster = [row("shardstore", "open", 1.0, kind="ours"), row("flat", "open", 0.5, kind="plain")]
    even = [row("shardstore", "save", 1.0, kind="ours"), row("torch", "save", 0.98)]
    limit = row("bare", "save", 0.1, kind="limit")
    text = report.markdown(run(*faster, *even, limit))
    assert "| open | gpt-124m | flat: `flat()` | 0.50 \u00d7 | [lost](#gpt-124m-open) |" in text
    assert "| save | gpt-124m | torch: `torch()` | 0.98 \u00d7 |  |" in text
    assert text.count("*Why flat is faster*: It reads less.") == 1
    assert "*Why torch is faster*" not in text


def test_a_goal_that_is_missed_is_explained_at_the_end(monkeypatch):
    """A terminal shows the goals last; a miss that has no note is told as such."""
    monkeypatch.setattr(notes, "NOTES", {})
    missed = run(row("shardstore", "save", 9.0, kind="ours"), row("bare", "save", 1.0, kind="limit"))
    text = report.printed(missed)
    assert text.index("### gpt-124m: save") < text.index("## Goals") < text.index(f"*save, gpt-124m*: {notes.MISSING}")
