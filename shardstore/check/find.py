"""Looking at a place: is there an index, what else lies there, what does that mean."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from shardstore import strictjson
from shardstore.check.marks import MARK_SCHEMA
from shardstore.errors import CheckpointNotFound, KeyMissing, Unfinished
from shardstore.index import HF_NAME, MAX_BYTES, NAME, Index, parse
from shardstore.storage import Entry, Store

_MARK = re.compile(r"attempt-([0-9a-f]{16})\.json")
_OURS = re.compile(
    r"(?:model-\d{5}-of-\d{5}-|state/\d{5}-of-\d{5}-|state/meta-|state/index-)([0-9a-f]{16})(?:-[0-9a-f]{8})?"
    r"\.(?:safetensors|json)"  # `-` and 8 digits, and index-: what a migration writes
)
_PLACE = re.compile(rf"(?:(.*)/)?(?:{re.escape(NAME)}|{_MARK.pattern}|{_OURS.pattern})", re.DOTALL)
_MARK_LIMIT = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Found:
    """An index as it lies in a store: the value, its bytes and their version there."""

    index: Index
    data: bytes
    version: str


def find_index(store: Store) -> Found | None:
    """The index at the root of a store, None where there is none. Raises Damaged, UnsupportedVersion, StoreError."""
    try:
        blob = store.get(NAME, limit=MAX_BYTES)
    except KeyMissing:
        return None
    return Found(parse(blob.data), blob.data, blob.version)


def need_index(store: Store) -> Found:
    """The index, or an error that says what is there instead: Unfinished or CheckpointNotFound."""
    found = find_index(store)
    if found is not None:
        return found
    entries = list(store.list())
    attempts = sorted({attempt for entry in entries if (attempt := attempt_of(entry.key))})
    if attempts:
        raise Unfinished(
            f"{store.url} holds no checkpoint yet: a save ({attempts[-1]}) is under way there, or died; "
            "`shardstore verify` tells more, `shardstore prune --leftovers` cleans up"
        )
    below = sorted(entry.key.rpartition("/")[0] for entry in entries if entry.key.endswith(f"/{NAME}"))
    hint = f"; there are checkpoints below it, such as {below[-1]!r}" if below else ""
    raise CheckpointNotFound(f"{store.url} holds no checkpoint ({NAME} is missing){hint}")


def places(store: Store) -> list[str]:
    """The folders below the root of a store where a save ever wrote: `""` alone if the root itself holds an index.

    Raises CheckpointNotFound where there is none. Data files without index and mark count, too: nothing is passed over.
    """
    keys = [entry.key for entry in store.list()]
    if NAME in keys:
        return [""]
    found = {match[1] or "" for key in keys if (match := _PLACE.fullmatch(key))}
    if not found:
        need_index(store)  # an error that says more, unless a save has committed just now
        return [""]
    return sorted(found)


def attempt_of(key: str) -> str | None:
    """The attempt that a file belongs to, by its name; None for files that are not a checkpoint's."""
    found = _MARK.fullmatch(key) or _OURS.fullmatch(key)
    return found[1] if found else None


@dataclass(slots=True)
class Attempt:
    """What lies in a folder under one attempt id. `mark`: the content of its mark, {} for an unreadable one."""

    id: str
    marked: Entry | None = None
    mark: dict[str, Any] = field(default_factory=dict)
    files: list[Entry] = field(default_factory=list)

    @property
    def superseded(self) -> bool:
        """Whether an overwrite has replaced it, so that its files are not needed any more."""
        return self.mark.get("state") == "superseded"


def attempts_in(store: Store) -> tuple[dict[str, Attempt], list[Entry]]:
    """Every attempt at the root of a store, by id, and the files that belong to none (foreign ones)."""
    found: dict[str, Attempt] = {}
    foreign = []
    for entry in store.list():
        attempt = attempt_of(entry.key)
        if attempt is None:
            if entry.key not in {NAME, HF_NAME}:
                foreign.append(entry)
            continue
        at = found.setdefault(attempt, Attempt(attempt))
        if _MARK.fullmatch(entry.key):
            at.marked, at.mark = entry, read_mark(store, entry.key)
        else:
            at.files.append(entry)
    return found, foreign


def read_mark(store: Store, key: str) -> dict[str, Any]:
    """A mark's content; {} where it is gone or can't be understood, which never makes anything removable."""
    try:
        mark = strictjson.loads(store.get(key, limit=_MARK_LIMIT).data, limit=_MARK_LIMIT)
    except (KeyMissing, strictjson.BadJson):
        return {}
    known = isinstance(mark, dict) and mark.get("schema") == MARK_SCHEMA
    return mark if known else {}
