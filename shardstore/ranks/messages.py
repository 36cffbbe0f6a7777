"""Errors on their way between ranks: a class of ours by its name, and a text. Nothing is pickled."""

from __future__ import annotations

import json

from shardstore import errors
from shardstore.errors import PeerError, ShardstoreError, brief

OK, LOST, OURS, THEIRS, OVER = range(5)
"""A result; the error of one rank; an error that the group has made of it; what rank 0 could not answer; a rank is
gone, and with it the line."""

_LIMIT = 4000


def pack(error: BaseException) -> bytes:
    """An error as bytes."""
    kind = type(error)
    text = str(error) if isinstance(error, ShardstoreError) else f"{kind.__name__}: {error}"
    ours = kind.__name__ if getattr(errors, kind.__name__, None) is kind else ""
    details = {"ranks": list(getattr(error, "ranks", ())), "phase": getattr(error, "phase", "")}
    details["settled"] = bool(getattr(error, "settled", False))
    return json.dumps({"kind": ours, "text": text[:_LIMIT], **details}).encode()


def text_of(data: bytes) -> str:
    """What an error says."""
    try:
        return str(json.loads(data)["text"])
    except (ValueError, KeyError, TypeError):
        return brief(data)


def unpack(data: bytes, phase: str, *, theirs: bool) -> ShardstoreError:
    """The error again, as one of ours; what is none of ours becomes a PeerError of rank 0. `theirs`: with its class."""
    try:
        said = json.loads(data)
        name, text = str(said["kind"]), str(said["text"])
        ranks, where, settled = tuple(map(int, said["ranks"])), str(said["phase"]), said["settled"] is True
    except (ValueError, KeyError, TypeError):
        return PeerError(f"a rank sent what can't be understood in the phase {phase!r}: {brief(data)}", phase=phase)
    cls = getattr(errors, name, None)
    if theirs and isinstance(cls, type) and issubclass(cls, ShardstoreError) and cls is not PeerError:
        return cls(text)
    if cls is PeerError:
        return PeerError(text, ranks=ranks, phase=where, settled=settled)
    return PeerError(f"rank 0 failed in the phase {phase!r}: {text}", ranks=(0,), phase=phase)
