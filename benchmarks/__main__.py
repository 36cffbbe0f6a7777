"""The command line: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import bucket, machine, ranks, report, scaling, thousand
from benchmarks.bucket import Buckets
from benchmarks.goals import judge
from benchmarks.peak import peak
from benchmarks.runner import Library, Result, Settings, library, measure, new_folder, remove, unmeasured
from benchmarks.states import STATES, Case
from benchmarks.systems import SYSTEMS, System
from benchmarks.tasks import PEAKS, S3_PEAKS, TASKS, Task

RANKS = 1024, 1000  # simulated ranks, and tensors, of the state `thousand`
DEFAULT_STATES = ["gpt-124m", "many-small", "run-10k", "fsdp-2", "fsdp-4", "thousand"]
ALL_STATES = [name for name in STATES if not name.startswith("toy")]
DEFAULT_TASKS = [*(name for name, task in TASKS.items() if not task.remote), "peak", "ranks", "thousand"]
S3_TASKS = [*(name for name, task in TASKS.items() if task.remote), "s3-peak"]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The options. Names may be given several at a time."""
    about = "Measure shardstore beside its peers and beside the bare system calls."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    every = [*DEFAULT_TASKS, *S3_TASKS]
    parser.add_argument("--tasks", nargs="+", choices=every, default=DEFAULT_TASKS, help="default: all without s3-")
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=DEFAULT_STATES)
    parser.add_argument("--all", action="store_true", help="all tasks, those on S3, too; all states; --scaling")
    parser.add_argument("--scaling", action="store_true", help="also how cost grows with the work")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up round (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of shardstore and of the bare calls (default 2)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory (default /dev/shm)")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on disk (default /var/tmp)")
    parser.add_argument("--slow", type=float, default=4.0, help="a peer that takes more seconds runs once (default 4)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="where the figures go (default bench.json)"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, without what takes minutes")
    parser.add_argument(
        "--render", type=Path, metavar="JSON", help="measure nothing; put these figures into docs/benchmarks.md"
    )
    options = parser.parse_args(words)
    if options.all:
        options.tasks, options.states, options.scaling = every, ALL_STATES, True
    return options


Rows = tuple[list[Any], list[Any]]  # results and peaks


def run_state(name: str, options: argparse.Namespace, settings: Settings) -> Rows:
    """All tasks on one state: results and peaks."""
    if STATES[name].ranks or name == "thousand":
        return _apart(name, options, settings), []
    tasks = [TASKS[word] for word in TASKS if word in options.tasks and TASKS[word].suits(name)]
    peaks = [word for word in ("peak", "s3-peak") if word in options.tasks and name in ("gpt-124m", "toy")]
    results, sizes = [], []
    local = [task for task in tasks if not task.remote]
    if local or "peak" in peaks:
        case = Case.of(name, options.threads)
        with library(case, options.memory) as shelf:
            results += _measured(case, local, shelf, options, settings)
            if "peak" in peaks:
                sizes += _peaks(case, shelf, options.memory, _peak_work(PEAKS, ("ours", "peer"), name, options))
    if len(local) < len(tasks) or "s3-peak" in peaks:
        remote = [task for task in tasks if task.remote]
        more, extra = _on_s3(Case.of(name, options.threads), remote, options, settings, peaks="s3-peak" in peaks)
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


def _on_s3(case: Case, tasks: list[Task], options: argparse.Namespace, settings: Settings, *, peaks: bool) -> Rows:
    """The tasks that need the server, which runs as long."""
    if why := bucket.missing():
        rows = [row for task in tasks for row in unmeasured(case, task, _systems(task, case.name, options), why)]
        return [row.json() for row in rows], []
    with bucket.started(options.memory) as buckets, library(case, buckets) as shelf:
        results = _measured(case, tasks, shelf, options, replace(settings, buckets=buckets))
        work = _peak_work(S3_PEAKS, ("ours",), case.name, options) if peaks else []
        return results, _peaks(case, shelf, buckets, work)


def _measured(
    case: Case, tasks: list[Task], shelf: Library, options: argparse.Namespace, settings: Settings
) -> list[Any]:
    results = []
    for at, task in enumerate(tasks):
        left = [later for later in tasks[at:] if not later.saves]
        shelf.keep({system.files for later in left for system in _systems(later, case.name, options)})
        began = time.perf_counter()
        results += [row.json() for row in measure(case, task, _systems(task, case.name, options), shelf, settings)]
        print(f"{case.name}: {task.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def _systems(task: Task, state: str, options: argparse.Namespace) -> list[System]:
    chosen = [SYSTEMS[name] for name in SYSTEMS if name in options.systems and task.name in SYSTEMS[name].calls]
    return [system for system in chosen if not (options.quick and state in system.slow)]


def _peak_work(
    tasks: Sequence[str], kinds: Sequence[str], state: str, options: argparse.Namespace
) -> list[tuple[Task, System]]:
    work = [(TASKS[name], system) for name in tasks for system in _systems(TASKS[name], state, options)]
    return [(task, system) for task, system in work if system.kind in kinds]


def _peaks(case: Case, shelf: Library, place: Path | Buckets, work: list[tuple[Task, System]]) -> list[Any]:
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


def command(options: argparse.Namespace) -> str:
    """The command line that was given, without paths."""
    words = ["python", "-m", "benchmarks", *(["--all"] if options.all else [])]
    default = arguments(words[3:])
    for key in ("tasks", "states", "systems", "rounds", "threads", "slow", "quick", "scaling"):
        value = getattr(options, key)
        if value != getattr(default, key):
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{key}", *map(str, values)]
    return shlex.join(words)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as what --out holds."""
    settings = Settings(2 if options.quick else options.rounds, options.slow, options.memory, options.disk)
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
        "scaling": scaling.measure(options.memory, settings.rounds) if options.scaling else [],
    }


def main() -> int:
    """0 if all that was measured worked and reached its goal, 1 if not."""
    options = arguments()
    if options.render:
        report.render(json.loads(options.render.read_text("utf-8")))
        return 0
    done = run(options)
    options.out.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
    print(report.markdown(done))
    failed = any(row.get("error") for row in done["results"] + done["peaks"])
    return int(failed or any(verdict.reached is False for verdict in judge(done)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the peers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders are removed
    sys.exit(main())
