"""Whether a server honours the conditions of a commit: asked once for each bucket and process, whatever the engine."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable
from typing import TypeAlias

IF_ABSENT, IF_MATCH = "IfNoneMatch", "IfMatch"

Question: TypeAlias = tuple[str, str, str]
"""Endpoint, bucket, condition."""

known: dict[Question, bool] = {}
_asking = threading.Lock()
_PROBE = re.compile(r"(?:.*/)?\.probe-[0-9a-f]{16}")


def honoured(question: Question, ask: Callable[[], bool]) -> bool:
    """What is known of it; found out by `ask` the first time."""
    with _asking:
        if question not in known:
            known[question] = ask()
        return known[question]


def probe_name(prefix: str) -> str:
    """A name for an object that is put to find something out, and deleted again."""
    return f"{prefix}.probe-{secrets.token_hex(8)}"


def is_probe(key: str) -> bool:
    """Whether a key is of such an object, which listings leave out."""
    return _PROBE.fullmatch(key) is not None


def refusal(url: str) -> str:
    """What is said where a condition is asked for that the server ignores."""
    return f"{url} does not honour conditions on a PUT: say single_writer=True if nobody else writes there"
