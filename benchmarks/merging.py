"""Several runs as one: the parts of a page are measured apart, each in a quiet moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.states import STATES
from benchmarks.tasks import ABOUT

Run = dict[str, Any]
Rows = list[dict[str, Any]]


def merged(runs: Sequence[Run]) -> Run:
    """One run with what all have measured. A task is taken whole, from the last run that has measured it at a state.

    Raises ValueError where the runs differ in their threads, by which goals are judged.
    """
    if len({run["settings"]["threads"] for run in runs}) > 1:
        raise ValueError("the runs differ in their threads")
    return {
        **runs[0],
        "parts": [{key: run[key] for key in ("date", "command", "settings")} for run in runs],
        "machine": _united([run["machine"] for run in runs]),
        "versions": _united([run["versions"] for run in runs]),
        "results": _ordered([run["results"] for run in runs]),
        "peaks": _ordered([run["peaks"] for run in runs]),
        "scaling": next((run["scaling"] for run in reversed(runs) if run.get("scaling")), []),
    }


def _united(facts: Sequence[dict[str, str]]) -> dict[str, str]:
    """Each fact once; all its values, where runs differ."""
    keys = dict.fromkeys(key for each in facts for key in each)
    return {key: ", ".join(dict.fromkeys(each[key] for each in facts if key in each)) for key in keys}


def _ordered(parts: Sequence[Rows]) -> Rows:
    """The rows of the last run that has measured something of a task, in the order of states and tasks."""
    taken: dict[tuple[str, str], Rows] = {}
    for rows in parts:
        for key in dict.fromkeys((row["state"], row["task"]) for row in rows):
            these = [row for row in rows if (row["state"], row["task"]) == key]
            if key not in taken or not all(row.get("skipped") for row in these):
                taken[key] = these
    states, tasks = list(STATES), list(ABOUT)
    return [
        row for key in sorted(taken, key=lambda key: (states.index(key[0]), tasks.index(key[1]))) for row in taken[key]
    ]
