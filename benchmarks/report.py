"""The measurements as Markdown, and the page docs/benchmarks.md that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import scaling
from benchmarks.goals import TIMES, judge, value
from benchmarks.states import STATES
from benchmarks.tasks import ABOUT, TASKS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
UNRATED = ("open", "partial", "beside")  # not about all bytes
WORDS = {True: "PASS", False: "FAIL", None: "-"}


def markdown(run: dict[str, Any]) -> str:
    """The tables of a run, as `__main__` stores it."""
    return "\n".join([*_machine(run), *_goals(run), *_measured(run), *_memory(run), *_scaling(run)])


def render(run: dict[str, Any], page: Path = PAGE) -> None:
    """Put the tables between the page's two marks; what stands around them is written by hand and stays.

    Plots go into the folder `benchmarks` beside the page.
    """
    text = page.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page.name} must hold the lines {BEGIN} and {END} once each")
    head, rest = text.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{markdown(run)}\n{END}{rest.split(END)[1]}", "utf-8")
    scaling.draw(run.get("scaling", []), page.parent / "benchmarks")


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
        rows.append([goal.what, goal.state, goal.text, verdict.measured, WORDS[verdict.reached]])
    yield from _table(["work", "state", "goal", "measured", ""], rows)


def _measured(run: dict[str, Any]) -> Iterator[str]:
    for state in dict.fromkeys(row["state"] for row in run["results"]):
        yield from (f"## {state}", "", f"{STATES[state].about[0].upper()}{STATES[state].about[1:]}.", "")
        rows = [row for row in run["results"] if row["state"] == state]
        for task in dict.fromkeys(row["task"] for row in rows):
            yield from (f"### {state}: {task}", "", f"{ABOUT[task][0].upper()}{ABOUT[task][1:]}.", "")
            yield from _task(state, task, [row for row in rows if row["task"] == task])


def _task(state: str, task: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    timed = [row for row in rows if row["seconds"]]
    ours = next((value(row) for row in timed if row["kind"] == "ours"), None)
    limit = next((value(row) for row in timed if task in TASKS and row["system"] == TASKS[task].limit), None)
    rate = "" if task in UNRATED or state == "thousand" else f"µs a {each}" if (each := STATES[state].each) else "GB/s"
    head = [
        "system", "call", "of the steps' time", "median s", "least s", rate, "CPU s per GB", "of the limit",
        "shardstore is", "lacks",
    ]  # fmt: skip
    yield from _table(head, [_line(row, rate, ours, limit) for row in timed])
    for row in rows:
        yield from (line for said in _said(row) for line in (said, ""))
    yield from (line for note in dict.fromkeys(row.get("note") for row in rows) if note for line in (note, ""))


def _line(row: dict[str, Any], rate: str, ours: float | None, limit: float | None) -> list[str]:
    counted = rate in ("GB/s", "µs a tensor") and row["cpu"]
    share = f"{100 * value(row):.1f} %" if row.get("shares") else ""  # then the seconds are those of the steps
    return [
        row["system"],
        f"`{row['call']}`",
        share,
        "" if share else f"{median(row['seconds']):.3f}" + ("" if row["warm"] else " (once)"),
        "" if share else f"{min(row['seconds']):.3f}",
        _rate(row, rate),
        f"{median(row['cpu']) / row['nbytes'] * 1e9:.2f}" if counted else "",
        f"{limit / value(row):.2f}" if limit and value(row) else "",
        f"{value(row) / ours:.2f} {TIMES}" if ours and row["kind"] != "ours" else "",
        row["lacks"],
    ]


def _said(row: dict[str, Any]) -> Iterator[str]:
    """What stands below the table about a system."""
    who, traffic = row["system"], row.get("traffic") or {}
    if row["error"]:
        yield f"{who} failed: `{row['error'].splitlines()[0]}`"
    if row.get("skipped"):
        yield f"{who} was not measured: {row['skipped']}."
    if row.get("requests"):
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(row["requests"].items()))
        yield f"Requests of {who}: {sum(row['requests'].values())} ({kinds})."
    if "written" in traffic:
        yield f"{who} wrote {traffic['written'] / 1e6:,.2f} MB for {traffic['of'] / 1e6:,.2f} MB of tensors."
    if "read" in traffic:
        read, own = (f"{traffic[key] / 1e6:,.2f} MB" for key in ("read", "own"))
        yield f"{who}: no rank read more than {read}; its own are {own}."


def _rate(row: dict[str, Any], unit: str) -> str:
    seconds = median(row["seconds"])
    if unit == "GB/s":
        return f"{row['nbytes'] / seconds / 1e9:.2f}"
    return f"{seconds / row['tensors'] * 1e6:.1f}" if unit else ""


def _scaling(run: dict[str, Any]) -> Iterator[str]:
    """The plots of how cost grows, and the exponents."""
    if not run.get("scaling"):
        return
    yield from ("## Cost as work grows", "")
    rows = []
    for axis in run["scaling"]:
        spread = f"{axis['xs'][0]:,} to {axis['xs'][-1]:,}"
        slopes = [(line["name"], scaling.exponent(axis["xs"], line["values"])) for line in axis["lines"]]
        rows += [[axis["name"], spread, name, f"{slope:.2f}"] for name, slope in slopes]
    yield from _table(["what grows", "from, to", "of", "exponent"], rows)
    yield from (f"The exponent is the slope of the upper half of a line, both axes logarithmic: {scaling.MEANING}.", "")
    for axis in run["scaling"]:
        yield from (f"![{axis['about']}](benchmarks/{axis['name']}.svg)", "")


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
