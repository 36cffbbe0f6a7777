"""Peak extra memory of a task, measured in a process of its own.

`python -m benchmarks.peak STATE TASK SYSTEM THREADS FOLDER` is that process. Before the measured go it does the same
with a toy state, so that imported modules don't count, and it holds the state, touched.
Counted is resident memory of the process, mapped files included (Linux: VmHWM, set back through /proc/self/clear_refs).
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bucket import Remote, Where, where
from benchmarks.children import ask
from benchmarks.machine import settle
from benchmarks.states import Case
from benchmarks.systems import SYSTEMS, System
from benchmarks.tasks import TASKS, Task


def status(key: str) -> int:
    """A size of this process in bytes, as /proc/self/status tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def extra(act: Callable[[], Any]) -> tuple[int, str]:
    """How far the resident memory rises above where it stands, in bytes, and how that was found."""
    settle(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _sampled(act), "sampled each millisecond"
    before = status("VmRSS")
    act()
    return max(0, status("VmHWM") - before), "VmHWM"


def _sampled(act: Callable[[], Any]) -> int:
    stop, peak = threading.Event(), [0]
    before = status("VmRSS")

    def watch() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], status("VmRSS"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        act()
    finally:
        stop.set()
        thread.join()
    return max(0, max(peak[0], status("VmRSS")) - before)


def child(case: Case, task: Task, system: System, folder: Where) -> dict[str, Any]:
    """Measure here. `folder` is empty for a save and filled for a load."""
    with _spare(folder) as spare:
        rehearse(task, system, case.threads, spare)
    task.before(case)
    nbytes, how = extra(lambda: task.finish(task.act(system, case, folder)))
    if wrong := task.wrong(system, case, folder, None):
        raise ValueError(f"the result is wrong: {wrong}")
    return {"extra": nbytes, "how": how}


@contextmanager
def _spare(folder: Where) -> Iterator[Where]:
    """A place beside, for the rehearsal."""
    if isinstance(folder, Remote):
        yield folder / "rehearsal"
        return
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=folder.parent) as spare:
        yield Path(spare)


def rehearse(task: Task, system: System, threads: int, folder: Where) -> None:
    """The same on a toy state."""
    case = Case.of("toy", threads)
    if not task.saves:
        next(each for each in SYSTEMS.values() if each.files == system.files).save(case, folder, durable=False)
    task.finish(task.act(system, case, folder))
    system.release(case)


def peak(case: Case, task: Task, system: System, folder: Where) -> dict[str, Any]:
    """Measure in a fresh process. Never raises: a failure is told under `error`."""
    words = [
        case.name,
        task.name,
        system.name,
        str(case.threads),
        folder.word if isinstance(folder, Remote) else str(folder),
    ]
    row = _row(case, task, system)
    try:
        return {**row, **ask("benchmarks.peak", *words)}
    except RuntimeError as error:
        return {**row, "error": str(error)}


def unpeaked(case: Case, task: Task, system: System, why: str) -> dict[str, Any]:
    """The row of what isn't measured."""
    return {**_row(case, task, system), "skipped": why}


def _row(case: Case, task: Task, system: System) -> dict[str, Any]:
    return {
        "state": case.name, "task": task.name, "system": system.name, "kind": system.kind,
        "call": system.calls[task.name],
    }  # fmt: skip


def main(state: str, task: str, system: str, threads: str, folder: str) -> None:
    """What the child process does."""
    print(json.dumps(child(Case.of(state, int(threads)), TASKS[task], SYSTEMS[system], where(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
