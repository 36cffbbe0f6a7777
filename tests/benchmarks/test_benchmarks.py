"""The measuring tool: that it runs everybody, finds wrong results, and judges and renders right."""

import json
import shutil

import pytest
import torch

from benchmarks import __main__ as tool
from benchmarks import goals, report, runner, states, training
from benchmarks.peak import child, extra
from benchmarks.runner import Settings, library, measure
from benchmarks.states import Case
from benchmarks.systems import SYSTEMS
from benchmarks.tasks import TASKS

TOYS = [name for name, kind in states.STATES.items() if name.startswith("toy") and not kind.ranks]
PAIRS = [(task, name) for task in TASKS for name, system in SYSTEMS.items() if task in system.calls]
LOCAL = [
    (state, task, name)
    for state in TOYS
    for task, name in PAIRS
    if not TASKS[task].server
    and TASKS[task].suits(state)
    and (task, name) != ("beside", "torch_checkpointing")  # the same calls as in stall, and another process to start
]


def served(server):
    """The pairs of a task on that server and a system that does it."""
    return [(task, name) for task, name in PAIRS if TASKS[task].server == server]


def settings(shm_path, tmp_path):
    """A warm-up and one round, in folders of the test."""
    return Settings(rounds=1, slow=60, memory=shm_path, disk=tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # DCP warns of what it was asked to do
@pytest.mark.parametrize(("state", "task", "name"), LOCAL)
def test_every_system_does_every_task_right(state, task, name, shm_path, tmp_path, monkeypatch):
    """Each system gives back the saved bits at each of its tasks, is measured, and leaves no file."""
    if why := SYSTEMS[name].missing():
        pytest.skip(why)
    monkeypatch.setattr(training, "PHASE", 0.01)
    monkeypatch.setattr(runner, "_OFTEN", 1)  # once is enough here
    case = Case.of(state, threads=2)
    with library(case, shm_path) as shelf:
        (row,) = measure(case, TASKS[task], [SYSTEMS[name]], shelf, settings(shm_path, tmp_path))
    assert row.error is None
    assert len(row.seconds) == len(row.cpu) == 1
    assert len(row.shares) == (task == "beside")
    assert not case.cache.keys() & {"dcp-2", "torch_checkpointing"}  # what they keep for the next background save
    assert not [*shm_path.iterdir(), *tmp_path.iterdir()]


def test_quick_loads_are_measured_more_often(shm_path, tmp_path, monkeypatch):
    """Whoever is quick at a load or stall has three times as many rounds, whoever is slow, or saves, the usual."""

    class Slow(type(SYSTEMS["shardstore"])):
        name = "slow"

    monkeypatch.setattr(runner, "_QUICK_S", 60)
    monkeypatch.setattr(runner, "_timed", lambda *given, check: (90.0 if given[2].name == "slow" else 1.0, 1.0, None))
    case = Case.of("toy", threads=2)
    with library(case, shm_path) as shelf:
        for task, often in (("load-into", 3), ("stall", 3), ("save", 1)):
            rows = measure(case, TASKS[task], [SYSTEMS["shardstore"], Slow()], shelf, settings(shm_path, tmp_path))
            assert [len(each.seconds) for each in rows] == [often, 1]


class Held:
    """A save beside which steps take 20 ms by the clock; 10 while it is held, and 1 before it began."""

    hold, ended = None, False

    def begin(self, hold):
        self.hold = hold
        return self

    def step(self):
        if self.hold is None:
            return 0.001
        if self.hold._may.is_set():
            return 0.02
        self.hold._holds.set()
        return 0.01

    def done(self):
        return self.ended

    def result(self):
        self.ended = True


def test_a_save_that_can_be_held_is_timed_in_turn_with_the_steps_alone(monkeypatch):
    """Half of the time is the save's, though the steps alone have become slower since before it."""
    now = 0.0
    save = Held()

    def step(_steps):
        nonlocal now
        now += save.step()

    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    monkeypatch.setattr(training.Steps, "_step", step)
    assert training.beside(lambda: None, save.begin).share == pytest.approx(0.5, abs=0.02)
    assert save.ended
    assert save.hold._may.is_set()


def test_what_takes_little_of_the_steps_is_measured_more_often(shm_path, tmp_path, monkeypatch):
    """Small shares scatter by as much as they are."""
    shares = {"shardstore": 0.02, "bare-writer": 0.7}
    monkeypatch.setattr(
        runner, "_timed", lambda *given, check: (1.0, 1.0, training.Beside(None, shares[given[2].name]))
    )
    case = Case.of("toy", threads=2)
    with library(case, shm_path) as shelf:
        rows = measure(case, TASKS["beside"], [SYSTEMS[name] for name in shares], shelf, settings(shm_path, tmp_path))
    assert [len(each.shares) for each in rows] == [3, 1]


def test_a_wrong_result_is_an_error_and_the_others_go_on(shm_path, tmp_path):
    """A system that loads other bytes than were saved gets no figure; the next one does."""

    class Wrong(type(SYSTEMS["flat"])):
        name = "wrong"

        def load_into(self, case, folder):
            super().load_into(case, folder)
            case.target["optimizer"]["exp_avg"]["ln_f.bias"][-1] += 1

    case = Case.of("toy", threads=2)
    with library(case, shm_path) as shelf:
        systems = [Wrong(), SYSTEMS["flat"]]
        wrong, right = measure(case, TASKS["load-into"], systems, shelf, settings(shm_path, tmp_path))
    assert wrong.error is not None
    assert "optimizer.exp_avg.ln_f.bias has other bytes" in wrong.error
    assert wrong.seconds == []
    assert right.error is None


def test_a_load_that_does_nothing_is_found(shm_path, tmp_path):
    """The target is emptied before the checked round, so what an earlier system loaded does not count."""

    class Idle(type(SYSTEMS["flat"])):
        def load_into(self, case, folder):
            pass

    case = Case.of("toy", threads=2)
    with library(case, shm_path) as shelf:
        _, idle = measure(case, TASKS["load-into"], [SYSTEMS["flat"], Idle()], shelf, settings(shm_path, tmp_path))
    assert "other bytes" in str(idle.error)


def test_what_is_slow_runs_once(shm_path, tmp_path):
    """A system whose warm-up takes too long keeps that as its only figure, and its files serve the loads."""
    case = Case.of("toy", threads=2)
    impatient = Settings(rounds=3, slow=0, memory=shm_path, disk=tmp_path)
    with library(case, shm_path) as shelf:
        (row,) = measure(case, TASKS["save"], [SYSTEMS["flat"]], shelf, impatient)
        assert SYSTEMS["flat"] in shelf
    assert (len(row.seconds), row.warm) == (1, False)
    assert not list(shm_path.iterdir())


def test_the_large_state_is_what_the_goals_speak_of(monkeypatch):
    """gpt-124m has 444 tensors, 124M parameters and 1.49 GB."""
    monkeypatch.setattr(states, "_maker", lambda: lambda shape: torch.empty(shape, device="meta"))
    tree = states.STATES["gpt-124m"].build()
    tensors = [tensor for _, tensor in states.leaves(tree)]
    assert len(tensors) == 444
    assert sum(tensor.numel() for tensor in tree["model"].values()) == 124_439_808
    assert sum(tensor.nbytes for tensor in tensors) == 1_493_277_696


def test_files_that_no_later_task_reads_are_removed(shm_path):
    """What is kept stays, what is not is saved again when it is wanted."""
    case = Case.of("toy", threads=2)
    with library(case, shm_path) as shelf:
        flat, bare = shelf.of(SYSTEMS["flat"]), shelf.of(SYSTEMS["bare"])
        shelf.keep({"flat"})
        assert (flat.exists(), bare.exists()) == (True, False)
        assert shelf.of(SYSTEMS["flat"]) == flat
        assert shelf.of(SYSTEMS["bare"]).exists()
    assert not list(shm_path.iterdir())


def test_files_make_room_where_memory_is_short(shm_path, tmp_path, monkeypatch):
    """Before a load that may need the room, files of others are removed; they are saved again when they are wanted."""
    case = Case.of("toy", threads=2)
    with library(case, shm_path) as shelf:
        flat, bare = shelf.of(SYSTEMS["flat"]), shelf.of(SYSTEMS["bare"])
        monkeypatch.setattr(runner, "memory_free", lambda: 2 * case.nbytes)
        measure(case, TASKS["load-into"], [SYSTEMS["flat"]], shelf, settings(shm_path, tmp_path))
        assert (flat.exists(), bare.exists()) == (True, False)
        measure(case, TASKS["load-into"], [SYSTEMS["bare"]], shelf, settings(shm_path, tmp_path))
        assert not flat.exists()


@pytest.mark.parametrize("task", ["save", "load-into"])
def test_extra_memory_of_shardstore_is_measured(task, shm_path):
    """The child's work gives a size, and checks that what was saved or loaded is right."""
    case = Case.of("toy", threads=2)
    folder = shm_path / "folder"
    folder.mkdir()
    if task == "load-into":
        SYSTEMS["shardstore"].save(case, folder, durable=False)
    found = child(case, TASKS[task], SYSTEMS["shardstore"], folder)
    assert 0 <= found["extra"] < 1 << 30


def test_extra_memory_sees_what_is_allocated():
    """64 MiB that are touched and freed again show up as about 64 MiB."""
    found, _how = extra(lambda: torch.ones(64 << 20, dtype=torch.uint8))
    assert 56 << 20 < found < 128 << 20


def row(system, task, *seconds, state="gpt-124m", kind="peer"):
    """A result as the runner stores it: 1 GB in 100,000 tensors."""
    return {
        "state": state, "task": task, "system": system, "kind": kind, "call": f"{system}()", "lacks": "",
        "tensors": 100_000, "nbytes": 10**9, "seconds": list(seconds), "cpu": list(seconds), "warm": True,
        "error": None,
    }  # fmt: skip


def run(*results, peaks=()):
    """A whole run with these results."""
    return {
        "date": "2026-01-01", "command": "python -m benchmarks", "settings": {"rounds": 3, "threads": 2}, "machine": {},
        "versions": {}, "results": list(results), "peaks": list(peaks),
    }  # fmt: skip


def verdicts(measured):
    """Verdicts by state, task and words of the goal."""
    return {(each.goal.state, each.goal.task, each.goal.text): each for each in goals.judge(measured)}


def test_goals_are_judged_by_medians():
    """The median counts, the fastest of several others is the measure, and what was not measured is neither."""
    found = verdicts(
        run(
            row("shardstore", "save", 9.0, 1.0, 0.1, kind="ours"),
            row("bare", "save", 0.8, kind="limit"),
            row("dcp-1", "save", 1.8),
            row("dcp-2", "save", 1.6),
            peaks=[{"state": "gpt-124m", "task": "save", "system": "shardstore", "kind": "ours", "extra": 80 << 20}],
        )
    )
    limit = found["gpt-124m", "save", "≥ 0.85 \u00d7 the bare calls"]
    assert (limit.reached, limit.measured) == (False, "0.80 \u00d7 bare")
    dcp = found["gpt-124m", "save", "≥ 1.7 \u00d7 the best DCP"]
    assert (dcp.reached, dcp.measured) == (False, "1.60 \u00d7 dcp-2")
    assert found["gpt-124m", "save", "≤ 80 MiB"].reached is True
    assert found["gpt-124m", "load-into", "≤ 80 MiB"].reached is None
    assert found["gpt-124m", "load-fresh", "≥ 2 \u00d7 load_file + clone"].reached is None


def test_a_background_save_is_judged_by_what_it_takes_from_the_training():
    """The stall by seconds, the steps beside by the share of their time; both may be so many times the limit's."""
    found = verdicts(
        run(
            row("shardstore", "stall", 1.4, kind="ours"),
            row("copy", "stall", 1.0, kind="limit"),
            row("dcp-2", "stall", 0.1),
            {**row("shardstore", "beside", 5.0, kind="ours"), "shares": [0.10, 0.9, 0.08]},
            {**row("bare-niced", "beside", 50.0, kind="limit"), "shares": [0.08]},
        )
    )
    stall = found["gpt-124m", "stall", "≤ 1.3 \u00d7 one copy_ into touched memory"]
    assert (stall.reached, stall.measured) == (False, "1.40 \u00d7 copy")
    beside = found["gpt-124m", "beside", "≤ 1.3 \u00d7 a bare writer at nice 19"]
    assert (beside.reached, beside.measured) == (True, "1.25 \u00d7 bare-niced")


def test_bytes_that_ranks_move_are_judged():
    """What is written beside the unique bytes, and what is read beside what may be."""
    ours = row("shardstore", "save", 1.0, state="fsdp-2", kind="ours")
    read = row("shardstore", "reshard", 1.0, state="fsdp-2", kind="ours")
    found = verdicts(
        run({**ours, "traffic": {"written": 1002, "of": 1000}}, {**read, "traffic": {"read": 99, "own": 9, "of": 100}})
    )
    assert found["fsdp-2", "save", "≤ 1.001 \u00d7 the unique bytes"].reached is False
    assert found["fsdp-2", "reshard", "≤ 1 \u00d7 its own bytes and a block a piece"].reached is True


def test_small_tensors_are_judged_each():
    """100,000 tensors in 1.3 seconds are 13 µs a tensor, and plain numpy is no peer."""
    ours = row("shardstore", "save", 1.3, state="many-small", kind="ours")
    others = [row("torch", "save", 3.9, state="many-small"), row("flat", "save", 0.2, state="many-small", kind="plain")]
    found = verdicts(run(ours, *others))
    each = found["many-small", "save", "≤ 12 µs a tensor"]
    assert (each.reached, each.measured) == (False, "13 µs a tensor")
    assert found["many-small", "save", "≥ 3 \u00d7 the best peer"].measured == "3.00 \u00d7 torch"


def test_rendering_keeps_what_is_written_by_hand(tmp_path):
    """Only what stands between the marks changes, also the second time; without marks nothing does."""
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n\n{report.BEGIN}\nstale words\n{report.END}\n\n## Notes\n\nBy hand.\n")
    measured = run(row("shardstore", "save", 1.0, kind="ours"), row("torch", "save", 2.5))
    for _ in range(2):
        report.render([json.loads(json.dumps(measured))], page)
        text = page.read_text()
        assert text.startswith(f"# Head\n\n{report.BEGIN}\n")
        assert text.endswith(f"{report.END}\n\n## Notes\n\nBy hand.\n")
        assert "stale words" not in text
        assert text.count("| torch | `torch()` | 2.500 | 2.500 | 0.40 | 2.50 | 2.50 \u00d7 |") == 1
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="must hold the lines"):
        report.render([measured], page)
    assert page.read_text() == "no marks\n"


def test_rows_say_what_counts_beside_their_seconds():
    """The share of the steps' time, the bytes that ranks moved, and what else is to be said."""
    beside = {**row("shardstore", "beside", 5.0, kind="ours"), "shares": [0.125]}
    ranked = row("shardstore", "reshard", 1.0, state="fsdp-2", kind="ours")
    ranked |= {"traffic": {"read": 3_000_000, "own": 2_000_000, "of": 9}, "note": "By the way."}
    text = report.markdown(run(beside, ranked))
    assert "| shardstore | `shardstore()` | 12.5 % |  |" in text
    assert "shardstore: no rank read more than 3.00 MB; its own are 2.00 MB." in text
    assert "By the way." in text


def test_all_is_everything_but_toys():
    """`--all` takes servers, peers and every state that is no toy, and says so in a word; what is named wins."""
    options = tool.arguments(["--all"])
    assert {"s3-save", "fuse-save", "ranks", "beside", "scaling"} <= set(options.tasks)
    assert options.everybody
    assert tool.arguments(["--all", "--states", "many-small"]).states == ["many-small"]
    assert set(options.states) == {name for name in states.STATES if not name.startswith("toy")}
    assert tool.command(options) == "python -m benchmarks --all"


def test_the_page_can_be_rendered(tmp_path):
    """docs/benchmarks.md has the marks that the tool looks for."""
    page = tmp_path / "benchmarks.md"
    shutil.copy(report.PAGE, page)
    report.render([run(row("shardstore", "save", 1.0, kind="ours"))], page)
    assert "## Notes" in page.read_text()


def test_the_command_line_writes_figures_and_tables(shm_path, tmp_path, capsys, monkeypatch):
    """One task on a toy: the figures are in --out without any path, and the tables on stdout."""
    out = tmp_path / "figures.json"
    words = ["--states", "toy", "--tasks", "save", "load-into", "--systems", "shardstore", "bare", "--rounds", "1"]
    places = ["--memory", str(shm_path), "--disk", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words, *places])
    assert tool.main() == 0
    measured = json.loads(out.read_text())
    assert {(each["task"], each["system"]) for each in measured["results"]} == {
        (task, system) for task in ("save", "load-into") for system in ("shardstore", "bare")
    }
    assert str(tmp_path) not in out.read_text()
    assert str(shm_path) not in out.read_text()
    assert "### toy: load-into" in capsys.readouterr().out
