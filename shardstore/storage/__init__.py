"""Bytes by key: the store port, the stores, and wrappers that are stores themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from shardstore.errors import InvalidArgument
from shardstore.events import Listener
from shardstore.storage.local import LocalStore
from shardstore.storage.memory import MemoryStore
from shardstore.storage.port import Blob, Body, Bytes, Capabilities, Entry, Store, check_key
from shardstore.storage.retrying import RetryingStore, unwrap

__all__ = [
    "Blob",
    "Body",
    "Bytes",
    "Capabilities",
    "Entry",
    "LocalStore",
    "MemoryStore",
    "RetryingStore",
    "Store",
    "check_key",
    "join",
    "open_store",
    "unwrap",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_FOLDED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


def open_store(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, listener: Listener | None = None
) -> Store:
    """The store at a path or URL, with retries around it. Nothing is made or read yet.

    A path is taken as it is; `file://` is cut off, and what follows is taken as it is (as fsspec does); `memory://`
    lives in this process. Raises InvalidArgument for other schemes, and for `storage_options` where a store has none.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise InvalidArgument(f"a path is text, not {type(text).__name__}: {text!r}")
    if not isinstance(url, str) and _FOLDED.match(text):
        raise InvalidArgument(f"{text!r} was a URL before pathlib folded its slashes; give the URL as a str")
    if storage_options:
        raise InvalidArgument(f"{text!r} takes no storage_options, but got {sorted(storage_options)}")
    return RetryingStore(_store(text), listener=listener)


def _store(url: str) -> Store:
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else "file"
    if scheme == "memory":
        return MemoryStore(url)
    if scheme == "file":
        return LocalStore(url[match.end() :] if match else url)
    raise InvalidArgument(f"{url!r}: there is no store for {scheme}:// yet; paths, file:// and memory:// are known")


def join(url: str, key: str) -> str:
    """The place of a key below a URL or path, for messages."""
    return f"{url.rstrip('/')}/{key}" if key else url
