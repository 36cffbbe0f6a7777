"""System calls as seen by a test: recorded, failed, made short, or stopped between two of them.

The local store calls the module `os`; here its functions are replaced for as long as a test wants, for chosen threads.
"""

from __future__ import annotations

import errno as _errno
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

NAMES = (
    *("open", "close", "write", "preadv", "fsync", "rename", "unlink", "mkdir", "rmdir"),
    *("lstat", "fstat", "listdir", "scandir"),
)
_TEMP = re.compile(r"\..*-[0-9a-f]{16}\.tmp")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Trouble:
    """The `nth` call (from 1) of `name` whose target ends with `target` fails, `times` times in a row.

    `when`: "before" or "after" it took effect. `close` always takes effect.
    """

    name: str
    errno: int
    nth: int = 1
    when: Literal["before", "after"] = "before"
    times: int = 1
    target: str = ""


class Spy:
    """Records the calls as texts such as "fsync TEMP", and makes trouble."""

    def __init__(self, *trouble: Trouble) -> None:
        self.calls: list[str] = []
        self._names: dict[int, str] = {}
        self._trouble = trouble
        self._seen = [0] * len(trouble)

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = self._target(args)
        self.calls.append(f"{name} {target}")
        error = self._due(name, target)
        if error is not None and error.when == "before" and name != "close":
            raise OSError(error.errno, os.strerror(error.errno))
        made = real(*args, **kwargs)
        if name == "open":
            self._names[made] = target
        if error is not None:
            raise OSError(error.errno, os.strerror(error.errno))
        return made

    def seen(self, *names: str) -> list[str]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call.split(" ")[0] in names]

    def _target(self, args: tuple[Any, ...]) -> str:
        found = args[0]
        text = self._names.get(found, "?") if isinstance(found, int) else os.path.basename(str(found))
        return "TEMP" if _TEMP.fullmatch(text) else text

    def _due(self, name: str, target: str) -> Trouble | None:
        for at, trouble in enumerate(self._trouble):
            if name == trouble.name and target.endswith(trouble.target):
                self._seen[at] += 1
                if trouble.nth <= self._seen[at] < trouble.nth + trouble.times:
                    return trouble
        return None


Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def watched(handler: Handler, concerns: Callable[[], bool] | None = None) -> Iterator[None]:
    """Let `handler` make the system calls of this thread, or of those threads of which `concerns()` is true."""
    me = threading.get_ident()
    mine = concerns or (lambda: threading.get_ident() == me)
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(os, name, _wrapped(name, getattr(os, name), handler, mine)))
        yield


def _wrapped(name: str, real: Callable[..., Any], handler: Handler, mine: Callable[[], bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(name, real, args, kwargs) if mine() else real(*args, **kwargs)

    return call


@contextmanager
def trouble(*what: Trouble) -> Iterator[Spy]:
    """System calls of this thread that fail by plan."""
    spy = Spy(*what)
    with watched(spy):
        yield spy


def short(limit: int) -> Handler:
    """A handler under which no call moves more than `limit` bytes, as Linux does with 2 GiB."""

    def handler(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "write":
            args = (args[0], memoryview(args[1])[:limit])
        elif name == "preadv":
            args = (args[0], _first(args[1], limit), args[2])
        return real(*args, **kwargs)

    return handler


def _first(buffers: list[memoryview], limit: int) -> list[memoryview]:
    chosen = []
    for buffer in buffers:
        part = buffer.cast("B")[:limit]
        chosen.append(part)
        limit -= len(part)
        if not limit:
            break
    return chosen


def stop_at(number: int, act: Callable[[], None]) -> Handler:
    """A handler that calls `act` before the system call of that number (from 1)."""
    count = 0

    def handler(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act()
        return real(*args, **kwargs)

    return handler


class Interleaving:
    """Runs pieces of work on threads, one system call at a time, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._state = threading.Condition()
        self._waiting: set[int] = set()
        self._turn: int | None = None
        self._mine = threading.local()

    def run(self, *works: Callable[[], Any]) -> list[Any]:
        """What the works return, or the errors that they raise."""
        results: list[Any] = [None] * len(works)

        def one(number: int, work: Callable[[], Any]) -> None:
            self._mine.number = number
            try:
                self._step()
                results[number] = work()
            except Exception as error:  # noqa: BLE001 the test looks at it
                results[number] = error
            finally:
                self._finished()

        threads = [threading.Thread(target=one, args=(n, work), daemon=True) for n, work in enumerate(works)]
        with watched(self._handler, lambda: getattr(self._mine, "number", None) is not None):
            for thread in threads:
                thread.start()
            self._direct(set(range(len(works))))
            for thread in threads:
                thread.join(PATIENCE_S)
        return results

    def _handler(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._step()
        return real(*args, **kwargs)

    def _step(self) -> None:
        """Wait for this thread's next turn."""
        number = self._mine.number
        with self._state:
            if self._turn == number:
                self._turn = None
            self._waiting.add(number)
            self._state.notify_all()
            if not self._state.wait_for(lambda: self._turn == number, PATIENCE_S):
                raise TimeoutError(_errno.ETIMEDOUT, "no turn came")
            self._waiting.discard(number)

    def _finished(self) -> None:
        with self._state:
            self._waiting.add(-1 - self._mine.number)
            self._turn = None
            self._state.notify_all()

    def _direct(self, alive: set[int]) -> None:
        while alive:
            with self._state:
                if not self._state.wait_for(lambda alive=alive: self._settled(alive), PATIENCE_S):
                    raise TimeoutError("a thread neither stopped nor finished")
                alive = {n for n in alive if -1 - n not in self._waiting}
                if alive:
                    self._turn = self._random.choice(sorted(alive))
                    self._state.notify_all()

    def _settled(self, alive: set[int]) -> bool:
        return self._turn is None and all(n in self._waiting or -1 - n in self._waiting for n in alive)
