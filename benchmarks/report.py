"""The measurements as Markdown, and the page docs/benchmarks.md that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.goals import TIMES, judge
from benchmarks.states import STATES
from benchmarks.tasks import TASKS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WORDS = {True: "PASS", False: "FAIL", None: "-"}


def markdown(run: dict[str, Any]) -> str:
    """The tables of a run, as `__main__` stores it."""
    return "\n".join([*_machine(run), *_goals(run), *_measured(run), *_memory(run)])


def render(run: dict[str, Any], page: Path = PAGE) -> None:
    """Put the tables between the page's two marks; what stands around them is written by hand and stays."""
    text = page.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page.name} must hold the lines {BEGIN} and {END} once each")
    head, rest = text.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{markdown(run)}\n{END}{rest.split(END)[1]}", "utf-8")


def _machine(run: dict[str, Any]) -> Iterator[str]:
    settings = run["settings"]
    how = f"{settings['rounds']} rounds, {settings['threads']} threads"
    yield f"Measured on {run['date']} by `{run['command']}`: {how}."
    yield ""
    yield from _table(["what", "which"], [[key, value] for key, value in (run["machine"] | run["versions"]).items()])


def _goals(run: dict[str, Any]) -> Iterator[str]:
    yield from ("## Goals", "")
    rows = []
    for verdict in judge(run):
        goal = verdict.goal
        what = f"{goal.task}, extra memory" if goal.unit == "MiB" else goal.task
        rows.append([what, goal.state, goal.text, verdict.measured, WORDS[verdict.reached]])
    yield from _table(["work", "state", "goal", "measured", ""], rows)


def _measured(run: dict[str, Any]) -> Iterator[str]:
    for state in dict.fromkeys(row["state"] for row in run["results"]):
        yield from (f"## {state}", "", f"{STATES[state].about[0].upper()}{STATES[state].about[1:]}.", "")
        rows = [row for row in run["results"] if row["state"] == state]
        for task in dict.fromkeys(row["task"] for row in rows):
            yield from (f"### {state}: {task}", "", f"{TASKS[task].about[0].upper()}{TASKS[task].about[1:]}.", "")
            yield from _task(state, task, [row for row in rows if row["task"] == task])


def _task(state: str, task: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    timed = [row for row in rows if row["seconds"]]
    ours = next((median(row["seconds"]) for row in timed if row["kind"] == "ours"), None)
    limit = next((median(row["seconds"]) for row in timed if row["system"] in ("bare", "bandwidth")), None)
    rate = "" if task == "open" else "µs a tensor" if STATES[state].per_tensor else "GB/s"
    head = ["system", "call", "median s", "least s", rate, "CPU s per GB", "of the limit", "shardstore is", "lacks"]
    lines = []
    for row in timed:
        middle = median(row["seconds"])
        lines.append(
            [
                row["system"],
                f"`{row['call']}`",
                f"{middle:.3f}" + ("" if row["warm"] else " (once)"),
                f"{min(row['seconds']):.3f}",
                _rate(row, middle, rate),
                f"{median(row['cpu']) / row['nbytes'] * 1e9:.2f}",
                f"{limit / middle:.2f}" if limit else "",
                f"{middle / ours:.2f} {TIMES}" if ours and row["kind"] != "ours" else "",
                row["lacks"],
            ]
        )
    yield from _table(head, lines)
    for row in rows:
        if row["error"]:
            yield from (f"{row['system']} failed: `{row['error'].splitlines()[0]}`", "")
        if row.get("skipped"):
            yield from (f"{row['system']} was not measured: {row['skipped']}.", "")
        if row.get("requests"):
            kinds = ", ".join(f"{count} {name}" for name, count in sorted(row["requests"].items()))
            yield from (f"Requests of {row['system']}: {sum(row['requests'].values())} ({kinds}).", "")


def _rate(row: dict[str, Any], seconds: float, unit: str) -> str:
    if unit == "GB/s":
        return f"{row['nbytes'] / seconds / 1e9:.2f}"
    return f"{seconds / row['tensors'] * 1e6:.1f}" if unit else ""


def _memory(run: dict[str, Any]) -> Iterator[str]:
    if not run["peaks"]:
        return
    yield from ("## Peak extra memory", "")
    rows = []
    for row in run["peaks"]:
        found = f"{row['extra'] / 2**20:.1f}" if "extra" in row else f"failed: {row['error']}"
        rows.append([row["task"], row["state"], row["system"], f"`{row['call']}`", found])
    yield from _table(["work", "state", "system", "call", "MiB"], rows)
    how = sorted({row["how"] for row in run["peaks"] if "how" in row})
    yield from (f"In a fresh process, above what the state itself takes ({', '.join(how)}); mapped files count.", "")


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table without the columns that are empty everywhere, except its last one if that has no heading."""
    kept = [at for at, name in enumerate(head) if name == head[-1] or any(row[at] for row in rows)]
    yield "| " + " | ".join(head[at] for at in kept) + " |"
    yield "|" + "---|" * len(kept)
    for row in rows:
        yield "| " + " | ".join(row[at].replace("|", "\\|") for at in kept) + " |"
    yield ""
