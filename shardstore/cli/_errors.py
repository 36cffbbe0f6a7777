"""Errors as a person and as a script see them. The exit codes come from the errors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from shardstore import errors
from shardstore.errors import Damaged, ShardstoreError, Unfinished

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE

EXIT_STATUS = {
    0: "ok",
    1: "an error that no other code is for",
    2: "usage: the command line makes no sense",
    3: "corrupt: bytes are not what was saved",
    4: "unfinished: a save is under way there, or died",
    5: "not found",
    6: "exists already",
    7: "unsupported version: a newer shardstore wrote it",
    8: "different (diff)",
    INTERRUPTED: "interrupted",
}


def as_json(error: Exception) -> dict[str, Any]:
    """What --json shows of an error: `kind`, `message`, `exit_code`, and what else it knows (`file`, `blocks`, ...)."""
    return {"kind": _kind(error), "message": message(error), "exit_code": code(error), **_details(error)}


def message(error: Exception) -> str:
    """What an error says, without a prefix."""
    if isinstance(error, click.Abort):
        return "interrupted"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{error.format_message()} See '{error.ctx.command_path} --help'."
    if isinstance(error, click.ClickException):
        return error.format_message()
    return str(error) or type(error).__name__


def code(error: Exception) -> int:
    """The exit code for an error."""
    if isinstance(error, click.Abort):
        return INTERRUPTED
    return error.exit_code if isinstance(error, click.ClickException) else errors.exit_code(error)


def worst(codes: Iterable[int]) -> int:
    """The exit code for many places: 3 damaged before 4 unfinished before all others."""
    found = set(codes) - {0}
    return next((code for code in (Damaged.exit_code, Unfinished.exit_code) if code in found), min(found, default=0))


def _kind(error: Exception) -> str:
    kinds = {click.Abort: "Interrupted", click.UsageError: "Usage"}
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), type(error).__name__)


def _details(error: Exception) -> dict[str, Any]:
    """The values that an error of ours carries: texts, numbers, and lists of them."""
    if not isinstance(error, ShardstoreError):
        return {}
    return {name: value for name, value in vars(error).items() if name != "message" and _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (str, int))
