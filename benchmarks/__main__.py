"""The command line: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from benchmarks import bucket, choice, machine, mount, ranks, report, scaling, thousand
from benchmarks.goals import judge
from benchmarks.options import arguments, command
from benchmarks.peak import peak, unpeaked
from benchmarks.runner import Library, Place, Result, Settings, library, measure, new_folder, remove, unmeasured
from benchmarks.states import STATES, Case
from benchmarks.systems import SYSTEMS, System
from benchmarks.tasks import PEAKS, S3_PEAKS, TASKS, Task

RANKS = 1024, 1000  # simulated ranks, and tensors, of the state `thousand`
SERVERS: dict[str, Any] = {"s3": bucket, "fuse": mount}

Rows = tuple[list[Any], list[Any]]  # results and peaks


def run_state(name: str, options: argparse.Namespace, settings: Settings) -> Rows:
    """All tasks on one state: results and peaks."""
    if STATES[name].ranks or name == "thousand":
        return _apart(name, options, settings), []
    tasks = [TASKS[word] for word in TASKS if word in options.tasks and TASKS[word].suits(name)]
    peaks = [word for word in ("peak", "s3-peak") if word in options.tasks and name in ("gpt-124m", "toy")]
    results, sizes = [], []
    if "peak" in peaks:  # first: memory that peers keep in this process would be missing there
        case, wanted = Case.of(name, options.threads), (PEAKS, ("ours", "peer"), name, options)
        with library(case, options.memory) as shelf:
            sizes += _peaks(case, shelf, options.memory, _peak_work(*wanted))
        sizes += [unpeaked(case, *work, choice.WHY) for work in _peak_work(*wanted, left_out=True)]
    local = [task for task in tasks if not task.server]
    if local:
        case = Case.of(name, options.threads)
        with library(case, options.memory) as shelf:
            results += _measured(case, local, shelf, options, settings)
    for server in SERVERS:
        remote, heavy = [task for task in tasks if task.server == server], f"{server}-peak" in peaks
        if remote or heavy:
            more, extra = _served(server, Case.of(name, options.threads), remote, options, settings, peaks=heavy)
            results += more
            sizes += extra
    return results, sizes


def _apart(name: str, options: argparse.Namespace, settings: Settings) -> list[Any]:
    """What is measured in processes of its own."""
    if ("thousand" if name == "thousand" else "ranks") not in options.tasks:
        return []
    began = time.perf_counter()
    try:
        if name == "thousand":
            found = thousand.measure(*RANKS, settings.rounds, settings.memory)
        else:
            found = ranks.measure(name, settings.rounds, settings.memory)
    except RuntimeError as error:
        found = [Result(name, "save", "shardstore", "ours", "", "", 0, 0, error=str(error))]
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return [row.json() for row in found]


def _served(
    server: str, case: Case, tasks: list[Task], options: argparse.Namespace, settings: Settings, *, peaks: bool
) -> Rows:
    """The tasks that need that server, which runs as long."""
    if why := SERVERS[server].missing():
        rows = [row for task in tasks for row in unmeasured(case, task, _systems(task, case.name, options), why)]
        return [row.json() for row in rows], []
    with SERVERS[server].started(options.memory) as place, library(case, place) as shelf:
        results = _measured(case, tasks, shelf, options, replace(settings, server=place))
        work = _peak_work(S3_PEAKS, ("ours",), case.name, options) if peaks else []
        return results, _peaks(case, shelf, place, work)


def _measured(
    case: Case, tasks: list[Task], shelf: Library, options: argparse.Namespace, settings: Settings
) -> list[Any]:
    results = []
    for at, task in enumerate(tasks):
        left = [later for later in tasks[at:] if not later.saves]
        shelf.keep({system.files for later in left for system in _systems(later, case.name, options)})
        began = time.perf_counter()
        rows = measure(case, task, _systems(task, case.name, options), shelf, settings)
        rows += unmeasured(case, task, _systems(task, case.name, options, left_out=True), choice.WHY)
        results += [row.json() for row in rows]
        print(f"{case.name}: {task.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def _systems(
    task: Task, state: str, options: argparse.Namespace, what: str = "", *, left_out: bool = False
) -> list[System]:
    """Who does a task, or who is left out of a plain run. `what` of it is measured, if that is not its time."""
    chosen = [SYSTEMS[name] for name in SYSTEMS if name in options.systems and task.name in SYSTEMS[name].calls]
    rare = () if options.everybody else choice.left_out(state, what or task.name)
    return [system for system in chosen if (system.name in rare) == left_out]


def _peak_work(
    tasks: Sequence[str], kinds: Sequence[str], state: str, options: argparse.Namespace, *, left_out: bool = False
) -> list[tuple[Task, System]]:
    each = [
        (TASKS[name], system)
        for name in tasks
        for system in _systems(TASKS[name], state, options, "peak", left_out=left_out)
    ]
    return [(task, system) for task, system in each if system.kind in kinds]


def _peaks(case: Case, shelf: Library, place: Place, work: list[tuple[Task, System]]) -> list[Any]:
    for task, system in work:
        if not task.saves:
            shelf.of(system)
    case.clear()  # the child needs the room
    rows = []
    for task, system in work:
        folder = new_folder(place, case) if task.saves else shelf.of(system)
        try:
            rows.append(peak(case, task, system, folder))
        finally:
            if task.saves:
                remove(place, folder)
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as what --out holds."""
    settings = Settings(options.rounds, options.slow, options.memory, options.disk)
    results, peaks = [], []
    for name in options.states:
        more, extra = run_state(name, options, settings)
        results += more
        peaks += extra
    return {
        "schema": "shardstore-benchmarks/1",
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(options),
        "settings": {"rounds": settings.rounds, "threads": options.threads},
        "machine": machine.facts(options.memory, options.disk),
        "versions": machine.versions(),
        "results": results,
        "peaks": peaks,
        "scaling": scaling.measure(options.memory, settings.rounds) if "scaling" in options.tasks else [],
    }


def main() -> int:
    """0 if all that was measured worked and reached its goal, 1 if not."""
    options = arguments()
    if options.render:
        report.render([json.loads(path.read_text("utf-8")) for path in options.render])
        return 0
    done = run(options)
    options.out.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
    print(report.printed(done))
    failed = any(row.get("error") for row in done["results"] + done["peaks"])
    return int(failed or any(verdict.reached is False for verdict in judge(done)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the peers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders are removed
    sys.exit(main())
