"""From a path or URL to a store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from shardstore.errors import InvalidArgument, brief
from shardstore.events import Listener, to_log
from shardstore.storage.engines import open_remote
from shardstore.storage.local import LocalStore
from shardstore.storage.memory import MemoryStore
from shardstore.storage.port import Store
from shardstore.storage.retrying import RetryingStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://")
_FOLDED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


def open_store(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, listener: Listener | None = None
) -> Store:
    """The store at a path or URL, with retries around it. Nothing is made or read yet.

    A path is taken as it is; `file://` is cut off, and what follows is taken as it is (as fsspec does); `memory://`
    lives in this process; `s3://` goes through s3fs, `gs://` and `az://` through obstore where that can be, all others
    through fsspec, with `storage_options` in fsspec's words: see `open_remote`. Raises InvalidArgument for a scheme
    that nobody knows, for `storage_options` where a store has none, and for an engine that can't be used there.
    """
    given: Any = url
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InvalidArgument(f"a place is a path or URL as text, not {brief(url)}")
    if not isinstance(url, str) and _FOLDED.match(text):
        raise InvalidArgument(f"{text!r} was a URL before pathlib folded its slashes; give the URL as a str")
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else "file"
    options = dict(storage_options or {})
    if scheme not in {"file", "memory"}:
        return open_remote(scheme, text, options, to_log if listener is None else listener)
    if options:
        raise InvalidArgument(f"{text!r} takes no storage_options, but got {sorted(options)}")
    store: Store = MemoryStore(text) if scheme == "memory" else LocalStore(text[match.end() :] if match else text)
    return RetryingStore(store, listener=listener)


def join(url: str, key: str) -> str:
    """The place of a key below a URL or path, for messages."""
    return f"{url.rstrip('/')}/{key}" if key else url
