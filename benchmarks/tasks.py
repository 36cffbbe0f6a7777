"""What is done with a state: the timed part, and how its result is checked outside of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.bucket import LATENCY_MS, MIB_PER_S
from benchmarks.states import Case, difference, zero
from benchmarks.systems import System


@dataclass(frozen=True)
class Task:
    """One row of the measurements. `wrong` says what is wrong with a result, or None."""

    name: str
    about: str
    place: str  # memory, disk, s3 or s3-paced
    saves: bool  # gets an empty folder; the others get one that was saved before
    act: Callable[[System, Case, Any], Any]
    wrong: Callable[[System, Case, Any, Any], str | None]
    allocates: bool = True  # memory for a state or its files
    states: tuple[str, ...] = ()  # measured on these only by default; empty: on all
    before: Callable[[Case], None] = lambda _case: None  # only where the result is checked

    @property
    def remote(self) -> bool:
        """Whether it needs the S3 server."""
        return self.place.startswith("s3")


def _saved(system: System, case: Case, folder: Any, _result: Any) -> str | None:
    return system.wrong(case, folder)


def _filled(_system: System, case: Case, _folder: Any, _result: Any) -> str | None:
    return difference(case.state, case.target)


def _loaded(system: System, case: Case, _folder: Any, result: Any) -> str | None:
    return difference(case.state, system.tree(result, case))


def _counted(_system: System, case: Case, _folder: Any, result: Any) -> str | None:
    return None if result == case.tensors else f"{result} tensors instead of {case.tensors}"


TASKS = {
    task.name: task
    for task in (
        Task(
            "save",
            "save into a new folder on the memory file system",
            "memory",
            saves=True,
            act=lambda system, case, folder: system.save(case, folder, durable=False),
            wrong=_saved,
        ),
        Task(
            "save-durable",
            "save into a new folder on disk, until it is flushed",
            "disk",
            saves=True,
            act=lambda system, case, folder: system.save(case, folder, durable=True),
            wrong=_saved,
            states=("gpt-124m", "toy"),
        ),
        Task(
            "load-into",
            "load into the tensors of a state that is there, files cached",
            "memory",
            saves=False,
            act=lambda system, case, folder: system.load_into(case, folder),
            wrong=_filled,
            before=lambda case: zero(case.target),
        ),
        Task(
            "load-fresh",
            "load into new memory, files cached",
            "memory",
            saves=False,
            act=lambda system, case, folder: system.load_fresh(case, folder),
            wrong=_loaded,
        ),
        Task(
            "load-mapped",
            "load without a copy, files cached",
            "memory",
            saves=False,
            act=lambda system, case, folder: system.load_mapped(case, folder),
            wrong=_loaded,
        ),
        Task(
            "open",
            "open and learn all names, types and shapes, files cached",
            "memory",
            saves=False,
            act=lambda system, case, folder: system.open(case, folder),
            wrong=_counted,
            allocates=False,
        ),
    )
}

_S3 = (
    Task(
        "s3-save",
        "save into an empty bucket",
        "s3",
        saves=True,
        act=lambda system, case, folder: system.save(case, folder, durable=True),
        wrong=_saved,
        states=("gpt-124m", "toy"),
    ),
    Task(
        "s3-load-into",
        "load from a bucket into the tensors of a state that is there",
        "s3",
        saves=False,
        act=lambda system, case, folder: system.load_into(case, folder),
        wrong=_filled,
        states=("gpt-124m", "toy"),
        before=lambda case: zero(case.target),
    ),
    Task(
        "s3-load-fresh",
        "load from a bucket into new memory",
        "s3",
        saves=False,
        act=lambda system, case, folder: system.load_fresh(case, folder),
        wrong=_loaded,
        states=("gpt-124m", "toy"),
    ),
)
_SLOWLY = f"{LATENCY_MS} ms added to each request, {MIB_PER_S} MiB/s on each connection"
_PACED = (
    replace(task, name=name, place="s3-paced", about=f"{task.about}, {_SLOWLY}")
    for name, task in (("s3-paced-save", _S3[0]), ("s3-paced-load", _S3[1]))
)
TASKS |= {task.name: task for task in (*_S3, *_PACED)}

PEAKS = ("save", "load-into")  # tasks whose extra memory is measured
S3_PEAKS = ("s3-save", "s3-load-into")
