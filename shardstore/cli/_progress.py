"""A progress bar on stderr, where that is a terminal; nothing in a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from shardstore.cli._output import remark, shown
from shardstore.events import Event, Finished, Listener, Progress, Started

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class _Stopped(Exception):
    """Ends the threads of a piece of work after Ctrl-C; never shown."""


@contextlib.contextmanager
def watching() -> Iterator[Listener]:
    """A listener that shows the progress of work, and ends it at the next block after Ctrl-C."""
    stop = threading.Event()

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        stop.set()
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        show = stack.enter_context(_bar()) if sys.stderr.isatty() else remark

        def listen(event: Event) -> None:
            if stop.is_set():
                raise _Stopped
            show(event)

        before = signal.signal(signal.SIGINT, interrupted)
        stack.callback(signal.signal, signal.SIGINT, before)
        yield listen


@contextlib.contextmanager
def _bar() -> Iterator[Listener]:
    """One bar for the checkpoint at hand: bytes, rate, time left. It goes when the work ends."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        yield _shower(bars)


def _shower(bars: Bars) -> Listener:
    task = bars.add_task("", total=None, visible=False)

    def show(event: Event) -> None:
        match event:
            case Started(_, url, nbytes, _):
                name = shown(url.rstrip("/").rpartition("/")[2])
                bars.reset(task, total=nbytes, description=name, visible=True)
                bars.refresh()
            case Progress(nbytes=nbytes):
                bars.advance(task, nbytes)
            case Finished():
                bars.update(task, visible=False)
            case _:
                remark(event)

    return show
