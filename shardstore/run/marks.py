"""Marks on checkpoints of a run, by attempt: pins, which retention respects; quarantine, for what is damaged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from shardstore.check import utc_now
from shardstore.run import documents
from shardstore.run.documents import fetch
from shardstore.storage import Bytes, Store

FOLDER = "marks/"
SCHEMA = "shardstore-run-mark/1"
Kind: TypeAlias = Literal["pin", "quarantine"]
_NAME = re.compile(r"marks/(pin|quarantine)-([0-9a-f]{16})\.json")
_MEMBERS: documents.Members = {"kind": (str,), "attempt": (str,), "step": (int,), "reason": (str,), "time": (str,)}


@dataclass(frozen=True, slots=True)
class Marks:
    """Attempts that are pinned, and attempts that are in quarantine."""

    pinned: frozenset[str] = frozenset()
    quarantined: frozenset[str] = field(default_factory=frozenset)


def key_of(kind: Kind, attempt: str) -> str:
    """The file of a mark."""
    return f"{FOLDER}{kind}-{attempt}.json"


def read_all(store: Store) -> Marks:
    """All marks, by one listing. The name of a mark is what counts, so that a damaged one still protects."""
    found: dict[str, set[str]] = {"pin": set(), "quarantine": set()}
    for entry in store.list(FOLDER):
        match = _NAME.fullmatch(entry.key)
        if match:
            found[match[1]].add(match[2])
    return Marks(frozenset(found["pin"]), frozenset(found["quarantine"]))


def put(store: Store, kind: Kind, attempt: str, step: int, reason: str) -> None:
    """Set a mark; the later one of two stays."""
    members = {"kind": kind, "attempt": attempt, "step": step, "reason": reason, "time": utc_now()}
    store.put(key_of(kind, attempt), Bytes(documents.dump(SCHEMA, **members)))


def remove(store: Store, kind: Kind, attempt: str) -> None:
    """Take a mark away; none is fine."""
    store.delete(key_of(kind, attempt))


def read(store: Store, kind: Kind, attempt: str) -> Mapping[str, Any] | None:
    """What a mark says: `reason`, `time`, `step`; None where there is none. Raises Damaged, UnsupportedVersion."""
    key = key_of(kind, attempt)
    blob = fetch(store, key)
    return documents.parse(blob.data, key, SCHEMA, _MEMBERS) if blob else None
