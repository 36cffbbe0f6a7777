"""Listings of a folder tree: every file or an error, never a part of them. Links are named, not followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TypeAlias

from shardstore.errors import KeyMissing
from shardstore.storage import posix
from shardstore.storage.folders import Folders
from shardstore.storage.port import MAX_KEY_BYTES, Entry

Parts: TypeAlias = tuple[str, ...]


def entry(key: str, found: os.stat_result) -> Entry:
    """An entry from what the system says about a file."""
    kind = "file" if stat.S_ISREG(found.st_mode) else "other"
    return Entry(key, found.st_size if kind == "file" else 0, found.st_mtime, kind)  # type: ignore[arg-type]


def files(folders: Folders, base: Parts = ()) -> Iterator[tuple[Parts, os.stat_result]]:
    """All that is no folder, below `base`, in no order. What vanishes meanwhile is left out.

    How deep a tree is, is up to who made it. So it is a loop, no recursion, and ends where no key can reach.
    """
    todo = [base]
    while todo:
        parts = todo.pop()
        for name, found in _scan(folders, parts):
            if not stat.S_ISDIR(found.st_mode):
                yield (*parts, name), found
            elif len(os.fsencode("/".join((*parts, name)))) < MAX_KEY_BYTES:
                todo.append((*parts, name))


def _scan(folders: Folders, parts: Parts) -> list[tuple[str, os.stat_result]]:
    found = []
    try:
        with (
            folders.open(parts, flags=os.O_RDONLY) as fd,
            posix.failing("listing", folders.shown(*parts)),
            os.scandir(fd) as entries,
        ):
            for each in entries:
                try:
                    found.append((each.name, each.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    except KeyMissing:
        return []
    return found


def key_of(parts: Parts) -> str:
    """The key of a path. A name that is not UTF-8 is shown with backslashes, which no key has: it can't be opened."""
    return "/".join(parts).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
