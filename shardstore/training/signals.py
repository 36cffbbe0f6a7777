"""Signals: the handler sets a flag and nothing else, and training looks at it between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from shardstore.errors import InvalidArgument, brief


class Preempted(SystemExit):
    """The process was asked to end: what could be saved is saved. `code`: the exit code, 143 unless configured."""


def numbers(names: Sequence[str], what: str) -> list[signal.Signals]:
    """Signals by name (`SIGTERM` or `TERM`). Raises InvalidArgument for what this system has not, or can't handle."""
    if isinstance(names, str):
        raise InvalidArgument(f"{what} is a list of names of signals, not {brief(names)}")
    return [_number(name, what) for name in names]


def _number(name: Any, what: str) -> signal.Signals:
    full = name if isinstance(name, str) and name.startswith("SIG") else f"SIG{name}"
    found = signal.Signals.__members__.get(full)
    if found is None:
        raise InvalidArgument(f"{what}: there is no signal {brief(name)} here; a name is SIGTERM or TERM, for example")
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise InvalidArgument(f"{what}: no process can handle {full}")
    return found


class Signals:
    """Handlers for two kinds of wishes: to stop, and to save. They stand from `install` to `restore`."""

    def __init__(self, stop: Sequence[str], save: Sequence[str]) -> None:
        self._stop, self._save = numbers(stop, "stop_signals"), numbers(save, "save_signals")
        both = set(self._stop) & set(self._save)
        if both:
            raise InvalidArgument(f"{both.pop().name} can't mean both to stop and to save")
        self._earlier: dict[int, Any] = {}
        self.stop_at: float | None = None
        self.save = False

    @property
    def handled(self) -> list[int]:
        """The signals that have a handler now."""
        return list(self._earlier)

    def install(self, notice: Callable[[str], None]) -> None:
        """Set the handlers. Where this can't be, `notice` is told, and training goes on without."""
        wanted = [*self._stop, *self._save]
        if not wanted:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in wanted)
            notice(f"{names} are not handled: only the main thread can set handlers, and this is another one")
            return
        for number in wanted:
            self._earlier[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        _installed.add(self)

    def restore(self) -> None:
        """Give the signals back to those who had them, unless somebody has taken them over since."""
        _installed.discard(self)
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._stop:
            self.stop_at = self.stop_at or time.monotonic()
        else:
            self.save = True
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)


_installed: weakref.WeakSet[Signals] = weakref.WeakSet()


def _forget() -> None:
    """In a forked child: signals mean what they meant before, so that no worker saves or outlives its end."""
    for one in list(_installed):
        one.restore()


os.register_at_fork(after_in_child=_forget)
