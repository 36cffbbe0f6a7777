"""What is measured in processes of its own: ranks, a thousand of them. And how cost grows."""

import json

import pytest
import torch
import torch.distributed as dist

from benchmarks import __main__ as tool
from benchmarks import gpt_ranks, portion, ranks, report, scaling, thousand
from benchmarks.children import ask, ask_all
from benchmarks.states import Case, leaves
from tests.benchmarks.test_benchmarks import run


@pytest.mark.ranks
def test_ranks_save_and_load_in_turn(shm_path):
    """Two ranks do every task with both systems; results are checked there, the bytes counted, no file is left."""
    found = {(row.task, row.system): row for row in ranks.measure("toy-fsdp", 1, shm_path)}
    assert found.keys() == {(task, who) for task in ("save", "load-into", "reshard") for who in ("shardstore", "dcp")}
    assert all(len(row.seconds) == len(row.cpu) == 1 for row in found.values())
    nbytes = found["save", "shardstore"].nbytes
    assert nbytes <= found["save", "shardstore"].traffic["written"] < 1.1 * nbytes
    assert found["load-into", "shardstore"].traffic["own"] == nbytes // 2
    assert nbytes // 2 <= found["load-into", "shardstore"].traffic["read"] < nbytes
    assert not list(shm_path.iterdir())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_rank_that_loads_other_bytes_fails(shm_path, monkeypatch):
    """What is loaded is compared with what was saved, on every rank."""

    class Wrong(ranks.Ours):
        def load(self, state, place):
            super().load(state, place)
            next(gpt_ranks.parts(state))[0] += 1

    monkeypatch.setattr(ranks, "SYSTEMS", (Wrong(),))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="shardstore: load-into: the result is wrong on a rank"):
            ranks.Rank("toy-fsdp", shm_path).measure(1)
    finally:
        dist.destroy_process_group()


def test_what_fails_in_a_process_of_its_own_is_told():
    """The last line that it said; of several processes, none is left behind."""
    with pytest.raises(RuntimeError, match="invalid literal"):
        ask("benchmarks.thousand", "many", "1", "1", "nowhere")
    with pytest.raises(RuntimeError):
        ask_all("benchmarks.ranks", [["no-such-state", "1", "nowhere"]] * 2)


def test_simulated_ranks_make_a_checkpoint(shm_path):
    """Plan, commit and open are measured; the process checks what it opens."""
    found = {row.task: row for row in thousand.measure(16, 10, 2, shm_path)}
    assert found.keys() == {"plan", "commit", "open"}
    assert all(len(row.seconds) == 2 and min(row.seconds) > 0 for row in found.values())
    assert found["open"].note.startswith("The index has ")
    assert not list(shm_path.iterdir())


def test_a_partial_read_is_of_one_percent():
    """1 % of the bytes, and other rows than the wanted ones are found."""
    case = Case.of("toy", threads=2)
    wanted, tensors = portion.portion(case), dict(leaves(case.state))
    rows = {name: tensors[name][cut] for name, cut in wanted.items()}
    assert sum(row.nbytes for row in rows.values()) == pytest.approx(0.01 * case.nbytes, rel=0.05)
    assert portion.missed(case, rows) is None
    name = next(iter(rows))
    assert portion.missed(case, rows | {name: torch.roll(tensors[name], 1, 0)[wanted[name]]}) == f"other rows of {name}"


def test_the_exponent_is_that_of_a_power():
    """It is found from the upper half, where a fixed cost no longer counts."""
    xs = [10**at for at in range(6)]
    assert scaling.exponent(xs, [x**1.5 for x in xs]) == pytest.approx(1.5)
    assert scaling.exponent(xs, [max(x, 1000) for x in xs]) > 0.9
    assert scaling.exponent(xs, [0.0] * 6) == 0


def test_growth_is_measured_and_drawn(shm_path, tmp_path, monkeypatch):
    """All axes at toy size; the same figures make the same plots, to which the page leads."""
    for name in ("TENSORS", "SHARDS", "CHECKPOINTS"):
        monkeypatch.setattr(scaling, name, [1, 4])
    monkeypatch.setattr(scaling, "BYTES", [10**4, 10**5])
    monkeypatch.setattr(scaling, "THREADS", [1, 2])
    monkeypatch.setattr(scaling, "GIGA", 10**5)
    axes = json.loads(json.dumps(scaling.measure(shm_path, 1)))
    assert [axis["name"] for axis in axes] == ["tensors", "bytes", "shards", "threads", "checkpoints"]
    assert not list(shm_path.iterdir())
    page = tmp_path / "page.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    plots = []
    for _ in range(2):
        report.render([run(), {**run(), "scaling": axes}], page)
        plots.append({path.name: path.read_bytes() for path in (tmp_path / "benchmarks").iterdir()})
    assert plots[0] == plots[1]
    assert all(f"](benchmarks/{name})" in page.read_text() for name in plots[0])
    assert len(plots[0]) == len(axes)
    for axis in axes:
        assert all(f"- {scaling.sentence(axis, line)}\n" in page.read_text() for line in axis["lines"])


def test_what_an_exponent_means_is_said():
    """How much more twice the work takes, and from where to where; memory that is no more than noise does not grow."""
    axis = {"name": "tensors", "xs": [100, 1000, 10000]}
    line = {"name": "save", "unit": "s", "values": [0.5, 1.0, 10.0]}
    want = "save: exponent 1.00, twice the tensors take 2.00 \u00d7 as long; 0.5 s at 100, 10 s at 10,000."
    assert scaling.sentence(axis, line) == want
    assert scaling.slope_of(axis, {"name": "memory", "unit": "MiB", "values": [0.0, 0.001, 0.9]}) == 0


def test_ranks_that_fail_leave_a_row(shm_path, monkeypatch):
    """The others are measured all the same, and the report says why."""

    def fail(*_):
        raise RuntimeError("a rank died")

    monkeypatch.setattr(ranks, "measure", fail)
    options = tool.arguments(["--states", "toy-fsdp", "--memory", str(shm_path)])
    results = tool.run(options)["results"]
    assert [row["error"] for row in results] == ["a rank died"]
    assert "shardstore failed: `a rank died`" in report.markdown(run(*results))
