"""The marks that saves leave: who is at work on which attempt, or which files are no longer needed."""

from __future__ import annotations

import datetime as dt
import os
import socket
from typing import Any

from shardstore import strictjson

MARK_SCHEMA = "shardstore-mark/1"


def utc_now() -> str:
    """The time, as stored: ISO 8601, UTC, microseconds."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def mark_content(attempt: str, state: str, **more: Any) -> bytes:
    """The JSON of a mark.

    `state`: `writing`; `striped` for a part of a committed checkpoint over several roots; `superseded` with the
    `files` that are no longer needed. `stripe`: which root of how many.
    """
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    base = {"schema": MARK_SCHEMA, "attempt": attempt, "state": state, "time": utc_now(), "stripe": [0, 1]}
    return strictjson.dumps({**base, **who, **more})
