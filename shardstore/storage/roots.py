"""Several roots as one checkpoint: opened together, told apart by their marks, in whatever order they are given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shardstore.errors import InvalidArgument, brief
from shardstore.events import Listener
from shardstore.storage.opening import open_store
from shardstore.storage.port import Store

Url: TypeAlias = str | os.PathLike[str]
Urls: TypeAlias = Url | Sequence[Url]


def urls_of(urls: Urls) -> list[Url]:
    """The roots that were given, one or several. Raises InvalidArgument for none, or for one given twice."""
    place: Any = urls
    if not isinstance(place, (str, os.PathLike, list, tuple)):
        raise InvalidArgument(f"a place is a path or URL, or a list of them, not {brief(urls)}")
    given: list[Any] = list(place) if isinstance(place, (list, tuple)) else [place]
    if not given:
        raise InvalidArgument("give at least one place")
    seen: dict[str, Url] = {}
    for url in given if len(given) > 1 else ():
        where = _place(url)
        if where in seen:
            raise InvalidArgument(f"the root {os.fspath(url)!r} is given twice")
        seen[where] = url
    return given


def _place(url: Any) -> str:
    """What makes two roots the same."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise InvalidArgument(f"a place is a path or URL, not {brief(url)}")
    path = text.removeprefix("file://")
    return os.path.realpath(path) if "://" not in path else text.rstrip("/")


def open_roots(urls: Urls, *, storage_options: Mapping[str, Any] | None, listener: Listener | None) -> list[Store]:
    """A store for each root."""
    opened: list[Store] = []
    try:
        for url in urls_of(urls):
            opened.append(open_store(url, storage_options=storage_options, listener=listener))  # noqa: PERF401 - closed below
    except BaseException:
        close_all(opened)
        raise
    return opened


def close_all(stores: Sequence[Store]) -> None:
    """Close every store."""
    for store in stores:
        store.close()
