"""Threads for an event loop that works on when the main thread has ended, for saves that are finished then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class _Late(ThreadPoolExecutor):
    """One thread for each call. Python's own executors refuse all work once the main thread has ended."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=_work, args=(future, fn, args, kwargs), daemon=True).start()
        return future


def _work(future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(fn(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        future.set_exception(error)


def outlive_main(loop: asyncio.AbstractEventLoop) -> None:
    """Let a loop look up hosts and read certificates, which it does on threads, as long as it runs."""
    loop.call_soon_threadsafe(loop.set_default_executor, _Late(1))
