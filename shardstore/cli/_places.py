"""The places that a command looks at: the roots of one checkpoint, or all at or below one URL."""

from __future__ import annotations

from collections.abc import Sequence

from shardstore.check import places
from shardstore.cli._output import remark
from shardstore.storage import Store, close_all, join, open_roots


def places_of(urls: Sequence[str]) -> list[str]:
    """The roots themselves, if there are several, else all places at or below the one."""
    if len(urls) > 1:
        return [""]
    stores = opened(urls, "")
    try:
        return places(stores[0])
    finally:
        close_all(stores)


def opened(urls: Sequence[str], place: str) -> list[Store]:
    """The stores of one place; to be closed."""
    return open_roots([join(url, place) for url in urls], storage_options=None, listener=remark)
