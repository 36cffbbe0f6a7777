"""Looking at what lies in a store: the index, damage, leftovers."""

from __future__ import annotations

from shardstore.check.find import Found, attempts_in, find_index, need_index, places
from shardstore.check.leftovers import GRACE_SECONDS, OLD_SECONDS, Leftover, plan_leftovers, remove
from shardstore.check.marks import MARK_SCHEMA, mark_content, utc_now
from shardstore.check.striped import find_roots, need_roots
from shardstore.check.verifying import (
    CheckpointReport,
    Problem,
    Report,
    default_threads,
    threads_of,
    verify,
    verify_store,
)

__all__ = [
    "GRACE_SECONDS", "MARK_SCHEMA", "OLD_SECONDS", "CheckpointReport", "Found", "Leftover", "Problem", "Report",
    "attempts_in", "default_threads", "find_index", "find_roots", "mark_content", "need_index", "need_roots", "places",
    "plan_leftovers", "remove", "threads_of", "utc_now", "verify", "verify_store",
]  # fmt: skip
