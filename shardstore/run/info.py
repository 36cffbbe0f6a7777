"""run.json: what a run is. It is only ever replaced under the condition that nobody else has replaced it meanwhile."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardstore.check import utc_now
from shardstore.errors import StoreError
from shardstore.run import documents
from shardstore.run.documents import NONE, check, fetch, put_if
from shardstore.storage import Store

NAME = "run.json"
SCHEMA = "shardstore-run/1"
_TRIES = 16

_MEMBERS: documents.Members = {
    "run": (str,), "time": (str,), "origin": (dict, NONE), "generation": (int,), "committed": (bool,),
    "pivots": (list,),
}  # fmt: skip
_ORIGIN: documents.Members = {
    "run": (str,), "url": (str,), "attempt": (str,), "step": (int,), "owner": (int,), "seq": (int,), "time": (str,),
}  # fmt: skip
_PIVOT: documents.Members = {"generation": (int,), "step": (int,), "attempt": (str,), "time": (str,)}


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint of another run from which this one was forked. `url` is where that lay, for people."""

    run: str
    url: str
    attempt: str
    step: int
    owner: int
    seq: int
    time: str


@dataclass(frozen=True, slots=True)
class Pivot:
    """Where a run turned: `generation` of sidecars begins at `step`, with the checkpoint `attempt`."""

    generation: int
    step: int
    attempt: str
    time: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What run.json says. `committed`: the run has had a checkpoint. `generation`: of its sidecars, from 0 on."""

    run: str
    time: str = field(default_factory=utc_now)
    origin: Origin | None = None
    generation: int = 0
    committed: bool = False
    pivots: tuple[Pivot, ...] = ()


def new_id() -> str:
    """An id for a run, from the operating system's random source."""
    return secrets.token_hex(8)


def dump(info: RunInfo) -> bytes:
    """The bytes of run.json."""
    return documents.dump(SCHEMA, **dataclasses.asdict(info))


def parse(data: bytes) -> RunInfo:
    """What the bytes of run.json say. Raises Damaged, UnsupportedVersion."""
    found = documents.parse(data, NAME, SCHEMA, _MEMBERS)
    for pivot in found["pivots"]:
        _object(pivot, _PIVOT)
    origin = None
    if found["origin"] is not None:
        _object(found["origin"], _ORIGIN)
        origin = Origin(**found["origin"])
    return RunInfo(**{**found, "origin": origin, "pivots": tuple(Pivot(**pivot) for pivot in found["pivots"])})


def _object(value: Any, members: documents.Members) -> None:
    if not isinstance(value, dict):
        documents.bad(NAME, "one of its members is no object")
    check(value, NAME, members)


def read(store: Store) -> RunInfo | None:
    """What run.json says, None where there is none."""
    blob = fetch(store, NAME)
    return parse(blob.data) if blob else None


def create(store: Store, info: RunInfo, *, single_writer: bool = False) -> RunInfo:
    """Write run.json, unless it is there; returns what it says then."""
    if put_if(store, NAME, dump(info), None, single_writer=single_writer):
        return info
    present = read(store)
    if present is None:
        raise StoreError(f"{NAME} is there and not there: is somebody removing the run?", filename=NAME)
    return present


def change(store: Store, how: Callable[[RunInfo], RunInfo], *, single_writer: bool = False) -> RunInfo:
    """Replace run.json by what `how` makes of it, in one step; done again on what others have put there meanwhile."""
    for _ in range(_TRIES):
        blob = store.get(NAME, limit=documents.LIMIT)
        before = parse(blob.data)
        after = how(before)
        if after == before or put_if(store, NAME, dump(after), blob.version, single_writer=single_writer):
            return after
    raise StoreError(f"{NAME} is changed by others as often as by this process; try again", filename=NAME)
