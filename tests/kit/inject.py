"""Stores of a test's choice under the public calls: `save`, `load`, `open` and `verify` get them from `open_store`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from shardstore import storage
from shardstore.storage import RetryingStore, Store

USERS = ("shardstore.storage.roots",)


@contextmanager
def injected(wrap: Callable[[Store], Store]) -> Iterator[list[Any]]:
    """Put `wrap(store)` between every store that is opened and the retries around it. Yields what `wrap` gave.

    Retries don't wait: what is made again is made at once.
    """
    made: list[Any] = []

    def open_store(*args: Any, **options: Any) -> Store:
        opened = storage.open_store(*args, **options)
        assert isinstance(opened, RetryingStore)
        opened.inner = wrap(opened.inner)
        opened._retries._wait_s = 0
        made.append(opened.inner)
        return opened

    with ExitStack() as stack:
        for name in USERS:
            stack.enter_context(mock.patch.object(importlib.import_module(name), "open_store", open_store))
        stack.enter_context(mock.patch("shardstore.saving.commit._WAIT_SECONDS", 0))
        yield made
