"""What happened, as frozen values, and who listens.

A listener is any callable that takes one event. Without one, events go to the logger `shardstore`.
Listeners are called from worker threads, one call at a time; an error in a listener ends the operation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Work: TypeAlias = Literal["save", "load", "verify"]

log = logging.getLogger("shardstore")


@dataclass(frozen=True, slots=True)
class Started:
    """Work on a checkpoint begins. `nbytes` is what will be moved, in bytes."""

    work: Work
    url: str
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`nbytes` more bytes have been moved and hashed."""

    work: Work
    url: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Work on a checkpoint ended well. `seconds` is wall time."""

    work: Work
    url: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Retried:
    """A store call failed in a way that may pass and is made again after `wait` seconds."""

    call: str
    key: str
    attempt: int
    wait: float
    error: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something that a person should know, though the work goes on."""

    what: str
    url: str
    warning: bool = True


Event: TypeAlias = Started | Progress | Finished | Retried | Noticed
Listener: TypeAlias = Callable[[Event], None]


def to_log(event: Event) -> None:
    """The listener that is used where none is given."""
    match event:
        case Started(work, url, nbytes, files):
            log.info("%s %s: %d bytes in %d files", work, url, nbytes, files)
        case Finished(work, url, nbytes, seconds):
            log.info("%s %s: done, %d bytes in %.3f s", work, url, nbytes, seconds)
        case Retried():
            log.warning(
                "%s %s failed (%s); try %d in %.2f s", event.call, event.key, event.error, event.attempt, event.wait
            )
        case Noticed(what, url, warning):
            log.log(logging.WARNING if warning else logging.INFO, "%s: %s", url, what)
        case Progress():
            pass


@dataclass(slots=True)
class Reporter:
    """Tells a listener about one piece of work; safe to call from many threads."""

    work: Work
    url: str
    listener: Listener
    nbytes: int = 0
    began: float = field(default_factory=time.perf_counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def started(self, nbytes: int, files: int) -> None:
        self._tell(Started(self.work, self.url, nbytes, files))

    def moved(self, nbytes: int) -> None:
        """Count bytes that have been moved and hashed."""
        with self._lock:
            self.nbytes += nbytes
            if self.listener is not to_log:
                self.listener(Progress(self.work, self.url, nbytes))

    def noticed(self, what: str, *, warning: bool = True) -> None:
        self._tell(Noticed(what, self.url, warning))

    def finished(self) -> float:
        """Say that the work is done; returns its wall time in seconds."""
        seconds = time.perf_counter() - self.began
        self._tell(Finished(self.work, self.url, self.nbytes, seconds))
        return seconds

    def _tell(self, event: Event) -> None:
        with self._lock:
            self.listener(event)
