"""Measures: all systems of a task in turn, round by round, so that a noisy minute hits them all."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.bucket import CONNECTIONS, LATENCY_MS, MIB, MIB_PER_S, Buckets, Where
from benchmarks.machine import memory_free, settle
from benchmarks.mount import Mount
from benchmarks.states import Case
from benchmarks.systems import SYSTEMS, System
from benchmarks.tasks import Task
from benchmarks.training import Beside

Place = Path | Buckets | Mount  # where folders are made
_ROOM = 5  # sizes of the state that must be free before a load


@dataclass
class Result:
    """One system at one task on one state. `seconds` has an entry for each round; it is empty where it failed."""

    state: str
    task: str
    system: str
    kind: str
    call: str
    lacks: str
    tensors: int
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds of all threads, user and system
    warm: bool = True  # False: the warm-up took so long that it is the only round
    error: str | None = None
    skipped: str | None = None  # why it was not measured
    requests: dict[str, int] | None = None  # of one go, by S3's names
    shares: list[float] = field(default_factory=list)  # beside steps: of their time, instead of seconds that matter
    traffic: dict[str, int] = field(default_factory=dict)  # bytes `written` or `read`, and how many they may be: `of`
    note: str = ""  # what else is to be said

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """How to measure. A peer whose warm-up takes more than `slow` seconds is not measured again."""

    rounds: int
    slow: float
    memory: Path
    disk: Path
    server: Buckets | Mount | None = None

    def place(self, task: Task) -> Place:
        """Where what a task saves or loads lies."""
        if task.server:
            if self.server is None:
                raise ValueError(f"{task.name} needs a server")
            return self.server
        return self.memory if task.place == "memory" else self.disk


class Library:
    """Folders, or places in buckets, that loads read from: saved once for all systems that read the same files."""

    def __init__(self, case: Case, place: Place) -> None:
        self._case = case
        self._place = place
        self._folders: dict[str, Where] = {}

    def __contains__(self, system: System) -> bool:
        return system.files in self._folders

    def of(self, system: System) -> Any:
        """The folder with what this system reads. Saves it where it isn't there yet."""
        if system.files not in self._folders:
            writer = next(each for each in SYSTEMS.values() if each.files == system.files)
            folder = new_folder(self._place, self._case)
            try:
                writer.save(self._case, folder, durable=False)
            except BaseException:
                remove(self._place, folder)
                raise
            self._folders[system.files] = folder
        return self._folders[system.files]

    def adopt(self, system: System, folder: Where) -> None:
        """Keep what was saved, because saving it again would take long."""
        self._folders[system.files] = folder

    def make_room(self, system: System) -> None:
        """Before a load of that system: where memory is short, what others read goes.

        A peer may need the state's size several times over. What is wanted again is saved again.
        """
        if isinstance(self._place, Path) and memory_free() < _ROOM * self._case.nbytes:
            self.keep({system.files})

    def keep(self, files: set[str]) -> None:
        """Remove all but these, for the room that they take; what is wanted again is saved again."""
        for name in self._folders.keys() - files:
            remove(self._place, self._folders.pop(name))

    def close(self) -> None:
        self.keep(set())


@contextmanager
def library(case: Case, place: Place) -> Iterator[Library]:
    """A library that is removed afterwards, whatever happens."""
    made = Library(case, place)
    try:
        yield made
    finally:
        made.close()


def new_folder(place: Place, case: Case) -> Any:
    """An empty folder or bucket. Raises OSError where a folder has no room for another copy of the state."""
    if not isinstance(place, Path):
        return place.new()
    free = shutil.disk_usage(place).free
    if place.resolve().is_relative_to("/dev/shm"):  # its bytes are memory, whatever its size allows
        free = min(free, memory_free())
    if free < 1.2 * case.nbytes:
        raise OSError(f"{place} has {free >> 20} MiB free; a save of {case.name} takes {case.nbytes >> 20} MiB")
    return Path(tempfile.mkdtemp(prefix="shardstore-bench-", dir=place))


def remove(place: Place, folder: Any) -> None:
    """Remove what `new_folder` has made."""
    if isinstance(place, Path):
        shutil.rmtree(folder)
    else:
        place.remove(folder)


_OFTEN = 3  # what scatters most is measured so many times as often:
_QUICK_S = 0.3  # loads and stalls that take less,
_SLIGHT = 0.2  # and saves that take less of the time of the steps beside them
_BACKGROUND = {"stall", "stall-workers", "beside"}
_MOST_ROUNDS = {
    "s3-save": 2, "s3-load-into": 3, "s3-load-fresh": 3,  # the server takes six core seconds to store a GB
    "s3-paced-save": 2, "s3-paced-load": 2,  # a clock makes no noise
    "fuse-save": 2, "fuse-load-into": 3, "fuse-load-fresh": 3,
}  # fmt: skip


def measure(case: Case, task: Task, systems: list[System], shelf: Library, settings: Settings) -> list[Result]:
    """All rounds of a task. A system that fails is out, with its error; the others go on."""
    rows = [(system, _result(case, task, system)) for system in systems]
    rounds = min(settings.rounds, _MOST_ROUNDS.get(task.name, settings.rounds))
    often = task.name in _BACKGROUND or not (task.saves or task.server)
    for turn in range(1 + rounds * (_OFTEN if often else 1)):
        shift = turn % max(len(rows), 1)
        for system, row in rows[shift:] + rows[:shift]:  # nobody is always first
            active = row.error is None and row.skipped is None and row.warm
            if active and (turn <= rounds or _scatters(row)):
                try:
                    _round(case, task, system, row, shelf, settings, first=turn == 0)
                except Exception as error:  # noqa: BLE001 - told in the report
                    row.error = f"{type(error).__name__}: {error}"
                    row.seconds.clear()
                    traceback.print_exc(limit=-4)
    for system, row in rows:
        if task.place == "s3" and system.kind == "ours" and row.seconds:
            row.requests = _requests(case, task, system, shelf, settings)
        system.release(case)
    if task.place == "s3-paced":
        rows.append((System(), bandwidth(case, task)))
    return [row for _, row in rows]


def _scatters(row: Result) -> bool:
    """Whether a row has to be measured more often than others."""
    return statistics.median(row.shares) < _SLIGHT if row.shares else statistics.median(row.seconds) < _QUICK_S


def _result(case: Case, task: Task, system: System) -> Result:
    call, lacks = system.calls[task.name], system.lacks
    row = Result(case.name, task.name, system.name, system.kind, call, lacks, case.tensors, case.nbytes)
    row.skipped = system.missing() or system.cannot.get(case.name)
    return row


def unmeasured(case: Case, task: Task, systems: list[System], why: str) -> list[Result]:
    """The rows of a task that can't be measured here."""
    return [replace(_result(case, task, system), skipped=why) for system in systems]


def bandwidth(case: Case, task: Task) -> Result:
    """What the paced way allows at most; calculated."""
    call = f"{CONNECTIONS} connections of {MIB_PER_S} MiB/s, {LATENCY_MS} ms"
    seconds = case.nbytes / (CONNECTIONS * MIB_PER_S * MIB)
    return Result(
        case.name, task.name, "bandwidth", "limit", call, "", case.tensors, case.nbytes, seconds=[seconds], cpu=[0.0]
    )


def _requests(case: Case, task: Task, system: System, shelf: Library, settings: Settings) -> dict[str, int]:
    """The requests of one more go, through a proxy that counts them; not timed."""
    place = settings.place(task)
    assert isinstance(place, Buckets)
    folder = place.new() if task.saves else shelf.of(system)
    try:
        with place.counted() as (endpoint, requests):
            task.act(system, case, folder.via(endpoint))
        return dict(requests)
    finally:
        if task.saves:
            place.remove(folder)


def _round(
    case: Case, task: Task, system: System, row: Result, shelf: Library, settings: Settings, *, first: bool
) -> None:
    place = settings.place(task)
    if not task.saves:
        shelf.make_room(system)
    folder = new_folder(place, case) if task.saves else shelf.of(system)
    keep = not task.saves
    try:
        seconds, cpu, said = _timed(case, task, system, _way(task, place, folder), check=first)
        patient = task.patient or task.server or system.kind not in ("peer", "plain")  # all servers are slow
        row.warm = not (first and seconds > settings.slow and not patient)
        if not first or not row.warm:
            row.seconds.append(seconds)
            row.cpu.append(cpu)
            if said:
                row.shares.append(said.share)
        if task.saves and task.place == "memory" and not row.warm and system not in shelf:
            shelf.adopt(system, folder)
            keep = True
    finally:
        if not keep:
            remove(place, folder)


def _way(task: Task, place: Place, folder: Any) -> Any:
    """The way to a folder that a go takes: a slow one, or through a mount that is made anew."""
    if isinstance(place, Buckets) and task.place == "s3-paced":
        return folder.via(place.paced)
    if isinstance(place, Mount) and not task.saves:
        place.renew()
    return folder


def _timed(case: Case, task: Task, system: System, folder: Where, *, check: bool) -> tuple[float, float, Beside | None]:
    """Wall and CPU seconds of one go, and what it says itself. With `check`, raises ValueError where that is wrong."""
    if check:
        task.before(case)
    with task.around(system, case, folder):
        if task.place == "disk":
            os.sync()  # earlier writes are not this system's to wait for
        settle(case.nbytes * 5 // 4 if task.allocates else 0)
        cpu, start = time.process_time(), time.perf_counter()
        result = task.act(system, case, folder)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        task.finish(result)
    if check and (wrong := task.wrong(system, case, folder, result)):
        raise ValueError(f"the result is wrong: {wrong}")
    return seconds, cpu, result if isinstance(result, Beside) else None
