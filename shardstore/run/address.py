"""Checkpoints of a run by name: `RUN@STEP`, `RUN@latest`, `RUN@ATTEMPT`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardstore.errors import CheckpointNotFound, KeyMissing
from shardstore.events import Listener
from shardstore.index import NAME
from shardstore.run.facade import Run
from shardstore.run.listing import RunCheckpoint
from shardstore.storage import open_store

LATEST = "latest"
_ADDRESS = re.compile(r"(.+)@(latest|[0-9]{1,15}|[0-9a-f]{16})", re.DOTALL)


def split(address: str) -> tuple[str, str] | None:
    """Run and what is wanted of it; None for what has not that form."""
    found = _ADDRESS.fullmatch(address)
    return (found[1], found[2]) if found else None


def pick(run: Run, which: str) -> RunCheckpoint:
    """The checkpoint that is meant by a step, an attempt or `latest`. Raises CheckpointNotFound."""
    if which != LATEST:
        return run.find(int(which) if len(which) < 16 else which)  # noqa: PLR2004 - 16 digits are an attempt
    newest = run.newest()
    if newest is None:
        raise CheckpointNotFound(f"{run.url} has no checkpoint that can be used")
    return newest


def resolve(address: str, *, storage_options: Mapping[str, Any] | None = None, listener: Listener | None = None) -> str:
    """The URL of a checkpoint: of a run, where the address says so; any other is returned as it is.

    A place whose own name looks like an address, and which holds a checkpoint, is meant itself.
    Raises CheckpointNotFound where the run has no such checkpoint.
    """
    found = split(address)
    if found is None or _holds_checkpoint(address, storage_options, listener):
        return address
    with Run(found[0], storage_options, listener=listener) as run:
        return pick(run, found[1]).url


def _holds_checkpoint(url: str, options: Mapping[str, Any] | None, listener: Listener | None) -> bool:
    store = open_store(url, storage_options=options, listener=listener)
    try:
        store.stat(NAME)
    except KeyMissing:
        return False
    finally:
        store.close()
    return True
