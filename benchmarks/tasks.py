"""What is done with a state: the timed part, and how its result is checked outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import flat_file, long_run
from benchmarks.bucket import LATENCY_MS, MIB_PER_S
from benchmarks.portion import missed, portion
from benchmarks.states import STATES, Case, difference, zero
from benchmarks.systems import System
from benchmarks.training import beside, workers


@dataclass(frozen=True)
class Task:
    """One row of the measurements. `wrong` says what is wrong with a result, or None.

    `around` is what each go happens in, and `finish` what comes after it; neither is timed.
    """

    name: str
    about: str
    place: str  # memory, disk, fuse, s3 or s3-paced
    saves: bool  # gets an empty folder; the others get one that was saved before
    act: Callable[[System, Case, Any], Any]
    wrong: Callable[[System, Case, Any, Any], str | None]
    allocates: bool = True  # memory for a state or its files
    states: tuple[str, ...] = ()  # measured on these only by default; empty: on all
    before: Callable[[Case], None] = lambda _case: None  # only where the result is checked
    around: Callable[[System, Case, Any], AbstractContextManager[None]] = lambda _system, _case, _folder: nullcontext()
    finish: Callable[[Any], Any] = lambda _result: None
    limit: str = "bare"  # the system that shows what is possible
    patient: bool = False  # who is slow is measured as often as the others

    def suits(self, state: str) -> bool:
        """Whether it is measured on a state."""
        only = STATES[state].tasks
        return (not self.states or state in self.states) and (not only or self.name in only)

    @property
    def server(self) -> str:
        """What has to run for it: s3, fuse, or nothing."""
        return "s3" if self.place.startswith("s3") else self.place * (self.place == "fuse")


def _saved(system: System, case: Case, folder: Any, _result: Any) -> str | None:
    return system.wrong(case, folder)


def _filled(_system: System, case: Case, _folder: Any, _result: Any) -> str | None:
    return difference(case.state, case.target)


def _loaded(system: System, case: Case, _folder: Any, result: Any) -> str | None:
    return difference(case.state, system.tree(result, case))


def _counted(_system: System, case: Case, _folder: Any, result: Any) -> str | None:
    return None if result == case.tensors else f"{result} tensors instead of {case.tensors}"


def _right(_system: System, _case: Case, _folder: Any, result: Any) -> str | None:
    return None if result is True else "what was saved does not pass"


@contextmanager
def _with_workers(system: System, case: Case, _folder: Any) -> Iterator[None]:
    """Beside forked workers. What the limit fills is touched again: what a fork shares is copied at the next touch."""
    with workers():
        if system.kind == "limit":
            zero(case.target)
        yield


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
        Task(
            "partial",
            "read 1 % of the bytes, rows out of the middle of the three largest tensors, files cached",
            "memory",
            saves=False,
            act=lambda system, case, folder: system.partial(case, folder, portion(case)),
            wrong=lambda _system, case, _folder, result: missed(case, result),
            states=("gpt-124m", "one-huge", "bf16-mix", "toy", "toy-mix"),
        ),
        Task(
            "verify",
            "read and check every byte, keeping none, files cached",
            "memory",
            saves=False,
            act=lambda system, case, folder: system.verify(case, folder),
            wrong=_right,
            allocates=False,
            states=("gpt-124m", "toy"),
            limit="bare-hashed",
        ),
        Task(
            "stall",
            "begin a background save, until the training may go on; memory for the copy is there",
            "memory",
            saves=True,
            act=lambda system, case, folder: system.background(case, folder),
            wrong=_saved,
            states=("gpt-124m", "toy"),
            finish=lambda handle: handle.result(),
            limit="copy",
        ),
        Task(
            "beside",
            "a background save beside steps that use all cores: the share of their time that it takes",
            "memory",
            saves=True,
            act=lambda system, case, folder: beside(
                lambda: system.background(case, folder), lambda hold: system.held(case, folder, hold)
            ),
            wrong=_saved,
            states=("gpt-124m", "toy"),
            allocates=False,  # what is freed just before slows the steps down for a while
            finish=lambda result: result.handle.result(),
            limit="bare-niced",
            patient=True,
        ),
        Task(
            "convert",
            "make a checkpoint of the flat file of a C trainer",
            "memory",
            saves=True,
            act=lambda system, case, folder: system.convert(case, folder),
            wrong=lambda _system, case, folder, _result: flat_file.wrong(case, folder),
            states=("gpt-124m", "toy"),
            around=lambda _system, case, folder: flat_file.written(case, folder),
        ),
        Task(
            "list",
            "list the checkpoints of a run",
            "memory",
            saves=True,
            act=lambda system, case, folder: system.list(case, folder),
            wrong=_counted,
            allocates=False,
            states=("run-10k", "toy-run"),
            around=lambda _system, case, folder: long_run.written(case.tensors, folder),
        ),
    )
}

_MORE = (
    replace(
        TASKS["stall"],
        name="stall-workers",
        about="the same beside four forked workers of a DataLoader",
        around=_with_workers,
    ),
    replace(
        TASKS["list"],
        name="newest",
        about="find the newest checkpoint of a run",
        act=lambda system, case, folder: system.newest(case, folder),
        wrong=lambda _system, case, _folder, step: None if step == case.tensors - 1 else f"step {step} is the newest",
    ),
)
TASKS |= {task.name: task for task in _MORE}

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
_COLD = "which was mounted anew before each load, so that it has nothing cached"
_FUSE = (
    replace(
        _S3[0], name="fuse-save", place="fuse", about="save into a new folder on a FUSE mount, until it is flushed"
    ),
    replace(
        _S3[1],
        name="fuse-load-into",
        place="fuse",
        about=f"load into the tensors of a state that is there from a FUSE mount, {_COLD}",
    ),
    replace(_S3[2], name="fuse-load-fresh", place="fuse", about=f"load into new memory from a FUSE mount, {_COLD}"),
)
_SLOWLY = f"{LATENCY_MS} ms added to each request, {MIB_PER_S} MiB/s on each connection"
_PACED = (
    replace(task, name=name, place="s3-paced", about=f"{task.about}, {_SLOWLY}", limit="bandwidth")
    for name, task in (("s3-paced-save", _S3[0]), ("s3-paced-load", _S3[1]))
)
TASKS |= {task.name: task for task in (*_S3, *_PACED, *_FUSE)}

ABOUT = {name: task.about for name, task in TASKS.items()} | {
    "reshard": "load what one process has saved",
    "plan": "flatten, describe, plan and write this rank's part",
    "commit": "agree, then parse what all ranks say, put the index together, check it, look at all files, commit",
}

PEAKS = ("save", "load-into", "stall")  # tasks whose extra memory is measured
S3_PEAKS = ("s3-save", "s3-load-into")
