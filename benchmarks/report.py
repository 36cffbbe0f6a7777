"""The measurements as Markdown, and the page docs/benchmarks.md that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import scaling
from benchmarks.goals import TIMES, judge, value
from benchmarks.merging import merged
from benchmarks.notes import note
from benchmarks.states import STATES
from benchmarks.tasks import ABOUT, TASKS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
UNRATED = ("open", "partial", "beside")  # not about all bytes
WORDS = {True: "PASS", False: "FAIL", None: "-"}
EVEN = 0.97  # of the best peer's speed: so much scatters


def markdown(run: dict[str, Any]) -> str:
    """The tables of a run, as `__main__` stores it, or of merged ones."""
    return "\n".join([*_machine(run), *_goals(run), *_best(run), *_details(run)])


def printed(run: dict[str, Any]) -> str:
    """The same for a terminal, where what counts most comes last."""
    return "\n".join([*_machine(run), *_details(run), *_best(run), *_goals(run)])


def _details(run: dict[str, Any]) -> Iterator[str]:
    yield from (*_measured(run), *_memory(run), *_scaling(run))


def render(runs: Sequence[dict[str, Any]], page: Path = PAGE) -> None:
    """Put the tables of all runs between the page's two marks; what stands around them is written by hand and stays.

    Plots go into the folder `benchmarks` beside the page.
    """
    text = page.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page.name} must hold the lines {BEGIN} and {END} once each")
    head, rest = text.split(BEGIN)
    run = merged(runs)
    page.write_text(f"{head}{BEGIN}\n\n{markdown(run)}\n{END}{rest.split(END)[1]}", "utf-8")
    scaling.draw(run["scaling"], page.parent / "benchmarks")


def _machine(run: dict[str, Any]) -> Iterator[str]:
    for part in run.get("parts", [run]):
        how = f"rounds after a warm-up: {part['settings']['rounds']}, threads: {part['settings']['threads']}"
        yield from (f"Measured on {part['date']} by `{part['command']}`: {how}.", "")
    yield from _table(["what", "which"], [[key, value] for key, value in (run["machine"] | run["versions"]).items()])


def _goals(run: dict[str, Any]) -> Iterator[str]:
    if not run["results"]:
        return
    yield from ("## Goals", "")
    verdicts = judge(run)
    rows = [[each.goal.what, each.goal.state, each.goal.text, each.measured, WORDS[each.reached]] for each in verdicts]
    yield from _table(["work", "state", "goal", "measured", ""], rows)
    missed = dict.fromkeys((each.goal.task, each.goal.state) for each in verdicts if each.reached is False)
    yield from (line for task, state in missed for line in (f"*{task}, {state}*: {note(state, task)}", ""))


def _best(run: dict[str, Any]) -> Iterator[str]:
    """Every task beside the fastest of those who are no limit."""
    rows = []
    for state, task in dict.fromkeys((row["state"], row["task"]) for row in run["results"]):
        if found := _beside(_of(run, state, task)):
            best, ratio = found
            lost = f"[lost](#{state}-{task})" if ratio < EVEN else ""
            rows.append([task, state, f"{best['system']}: `{best['call']}`", f"{ratio:.2f} {TIMES}", lost])
    if rows:
        yield from ("## Beside the best peer", "")
        yield from _table(["work", "state", "the best peer", "shardstore is", ""], rows)
        yield from (f"A task counts as lost below {EVEN}; nearer to 1 is noise. Why stands below its table.", "")


def _of(run: dict[str, Any], state: str, task: str) -> list[dict[str, Any]]:
    return [row for row in run["results"] if (row["state"], row["task"]) == (state, task)]


def _beside(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], float] | None:
    """The best peer, and how many times as fast shardstore is; None where one of the two is not measured."""
    timed = [row for row in rows if row["seconds"]]
    ours = [row for row in timed if row["kind"] == "ours"]
    peers = [row for row in timed if row["kind"] in ("peer", "plain")]
    if not ours or not peers:
        return None
    best = min(peers, key=value)
    return best, value(best) / max(value(ours[0]), 1e-9)


def _measured(run: dict[str, Any]) -> Iterator[str]:
    for state in dict.fromkeys(row["state"] for row in run["results"]):
        yield from (f"## {state}", "", f"{STATES[state].about[0].upper()}{STATES[state].about[1:]}.", "")
        for task in dict.fromkeys(row["task"] for row in run["results"] if row["state"] == state):
            yield from (f"### {state}: {task}", "", f"{ABOUT[task][0].upper()}{ABOUT[task][1:]}.", "")
            yield from _task(state, task, _of(run, state, task))


def _task(state: str, task: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    timed = [row for row in rows if row["seconds"]]
    ours = next((value(row) for row in timed if row["kind"] == "ours"), None)
    limit = next((value(row) for row in timed if task in TASKS and row["system"] == TASKS[task].limit), None)
    rate = "" if task in UNRATED or state == "thousand" else f"µs a {each}" if (each := STATES[state].each) else "GB/s"
    head = [
        "system", "call", "of the steps' time", "median s", "least s", rate, "CPU s per GB", "of the limit",
        "shardstore is", "lacks",
    ]  # fmt: skip
    lines = [_line(row, rate, ours, limit) for row in timed]
    lines += [
        [row["system"], f"`{row['call']}`: not measured", *[""] * 7, row["lacks"]] for row in rows if _skipped(row)
    ]
    yield from _table(head, lines)
    yield from _absent(rows)
    if (found := _beside(rows)) and found[1] < EVEN:
        yield from (f"*Why {found[0]['system']} is faster*: {note(state, task)}", "")
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


def _skipped(row: dict[str, Any]) -> str | None:
    """Why it was not measured."""
    return row.get("skipped")


def _absent(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Who was not measured, and why."""
    for why in filter(None, dict.fromkeys(map(_skipped, rows))):
        names = ", ".join(dict.fromkeys(row["system"] for row in rows if _skipped(row) == why))
        yield from (f"Not measured: {names}; {why}.", "")


def _said(row: dict[str, Any]) -> Iterator[str]:
    """What stands below the table about a system."""
    who, traffic = row["system"], row.get("traffic") or {}
    if row["error"]:
        yield f"{who} failed: `{row['error'].splitlines()[0]}`"
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
    """The plots of how cost grows, and what each exponent says."""
    if not run.get("scaling"):
        return
    yield from ("## Cost as work grows", "")
    yield from (f"The exponent is the slope of the upper half of a line, both axes logarithmic: {scaling.MEANING}.", "")
    for axis in run["scaling"]:
        yield from (f"### {axis['about']}", "", f"![{axis['about']}](benchmarks/{axis['name']}.svg)", "")
        yield from (f"- {scaling.sentence(axis, line)}" for line in axis["lines"])
        yield ""


def _memory(run: dict[str, Any]) -> Iterator[str]:
    if not run["peaks"]:
        return
    yield from ("## Peak extra memory", "")
    rows = []
    for row in run["peaks"]:
        found = f"{row['extra'] / 2**20:.1f}" if "extra" in row else f"failed: {row.get('error')}"
        found = "not measured" if _skipped(row) else found
        rows.append([row["task"], row["state"], row["system"], f"`{row['call']}`", found])
    yield from _table(["work", "state", "system", "call", "MiB"], rows)
    how = sorted({row["how"] for row in run["peaks"] if "how" in row})
    yield from (f"In a fresh process, above what the state itself takes ({', '.join(how)}); mapped files count.", "")
    yield from _absent(run["peaks"])


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table without the columns that are empty everywhere, except its last one if that has no heading."""
    kept = [at for at, name in enumerate(head) if name == head[-1] or any(row[at] for row in rows)]
    yield "| " + " | ".join(head[at] for at in kept) + " |"
    yield "|" + "---|" * len(kept)
    for row in rows:
        yield "| " + " | ".join(row[at].replace("|", "\\|") for at in kept) + " |"
    yield ""
