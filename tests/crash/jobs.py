"""What child processes do, and where they send themselves a signal while they do it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from unittest import mock

import torch

import shardstore
from shardstore.check import GRACE_SECONDS, plan_leftovers, remove
from shardstore.errors import ShardstoreError
from shardstore.index import NAME
from shardstore.saving import after
from shardstore.storage import LocalStore, Store, memory
from tests.crash.states import number_of, state
from tests.kit.faults import Wrapper
from tests.kit.inject import injected
from tests.kit.syscalls import watched

T = TypeVar("T")

CHANGING = frozenset({"write", "fsync", "rename", "unlink", "mkdir", "rmdir"})


@dataclass
class Alarm:
    """This process gets `signal` at its `nth` step (from 1); 0: never. Counts the steps.

    `level`: steps are calls of the store, or changing system calls, or those within the put of the index. `at`: only
    calls on keys that end so. `when`: before the step, after it, or, if it is a write, with half of it done.
    """

    signal: int = 0
    nth: int = 0
    level: Literal["store", "system", "commit"] = "store"
    at: str = ""
    when: Literal["before", "midway", "after"] = "before"

    def __post_init__(self) -> None:
        self.steps = 0
        self.armed = self.level != "commit"
        self._lock = threading.Lock()

    def step(self, make: Callable[[], T], half: Callable[[], Any] | None = None) -> T:
        """Make one step."""
        with self._lock:
            self.steps += 1
            due = self.steps == self.nth
        if due and self.when != "after":
            if self.when == "midway" and half is not None:
                half()
            os.kill(os.getpid(), self.signal)
        made = make()
        if due and self.when == "after":
            os.kill(os.getpid(), self.signal)
        return made

    def system_call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A system call as a step, if it changes anything."""
        if not self.armed or (name not in CHANGING and not (name == "open" and args[1] & os.O_CREAT)):
            return real(*args, **kwargs)
        half = (lambda: real(args[0], memoryview(args[1])[: len(args[1]) // 2])) if name == "write" else None
        return self.step(lambda: real(*args, **kwargs), half)


class _Alarmed(Wrapper):
    def __init__(self, store: Store, alarm: Alarm) -> None:
        super().__init__(store)
        self._alarm = alarm

    def around(self, call: str, key: str, make: Callable[[], T]) -> T:
        if self._alarm.level == "store":
            return self._alarm.step(make) if key.endswith(self._alarm.at) else make()
        self._alarm.armed = (call, key) == ("put", NAME)
        try:
            return make()
        finally:
            self._alarm.armed = False


@contextmanager
def alarmed(alarm: Alarm, claim_wait: float) -> Iterator[None]:
    """Stores of this process count their steps, and set off the alarm."""

    def wrap(store: Store) -> Store:
        if isinstance(store, LocalStore):
            store = LocalStore(store.url, claim_wait=claim_wait)
        return store if alarm.level == "system" else _Alarmed(store, alarm)

    with injected(wrap), nullcontext() if alarm.level == "store" else watched(alarm.system_call):
        yield


def save(
    place: str, number: int, *, overwrite: bool = False, threads: int = 1, claim_wait: float = 2.0, **alarm: Any
) -> dict[str, Any]:
    """Save the state of a number; answers with the steps that it took, and the error, by the names of its classes."""
    made = Alarm(**alarm)
    with alarmed(made, claim_wait):
        errors = _tried(
            lambda: shardstore.save(state(number), place, step=number, overwrite=overwrite, threads=threads)
        )
    return {"steps": made.steps, **errors}


def overwrite(place: str, numbers: list[int], *, grace: float = GRACE_SECONDS) -> dict[str, Any]:
    """Overwrite with one state after the other, whoever else does so; answers with the numbers that were saved.

    `grace`: how many seconds replaced files are kept.
    """
    done: list[int] = []

    def saves() -> None:
        for number in numbers:
            with suppress(FileExistsError):
                shardstore.save(state(number), place, step=number, overwrite=True, threads=1)
                done.append(number)

    with graceful(grace):
        return {**_tried(saves), "saved": done}


@contextmanager
def graceful(seconds: float) -> Iterator[None]:
    """Overwrites keep replaced files for so many seconds."""
    with (
        mock.patch.object(after, "plan_leftovers", partial(plan_leftovers, grace=seconds)),
        mock.patch.object(after, "remove", partial(remove, grace=seconds)),
    ):
        yield


def read(place: str, times: int) -> dict[str, Any]:
    """Load again and again; answers with the numbers that were seen, in order."""
    seen: list[int] = []

    def loads() -> None:
        seen.extend(number_of(shardstore.load(place)) for _ in range(times))

    return {**_tried(loads), "seen": seen}


def warm_up() -> None:
    """Do all once, in memory, so that no child has to find its way anew. No thread is left: none survives a fork."""
    torch.set_num_threads(1)
    save("memory://warm", 0)
    read("memory://warm", 1)
    memory.reset()
    gc.freeze()


def _tried(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        work()
    except ShardstoreError as error:
        return {"error": str(error), "kinds": [kind.__name__ for kind in type(error).__mro__]}
    return {"error": None, "kinds": []}


JOBS: dict[str, Callable[..., Any]] = {"save": save, "overwrite": overwrite, "read": read}
