"""A distributed, sharded, verified checkpoint store for large PyTorch models.

Names are imported when they are first used, so that tools which need no torch start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardstore._version import __version__

if TYPE_CHECKING:
    from shardstore.check import Report, verify
    from shardstore.errors import (
        CheckpointExists,
        CheckpointNotFound,
        CommitUnknown,
        Damaged,
        Fenced,
        InvalidArgument,
        KeyMissing,
        Mismatch,
        NothingToResume,
        PeerError,
        ShardstoreError,
        StoreError,
        StoreUnavailable,
        Superseded,
        Unfinished,
        UnsupportedState,
        UnsupportedVersion,
    )
    from shardstore.loading import Checkpoint, LazyTensor, load
    from shardstore.loading import open_checkpoint as open
    from shardstore.run import Run
    from shardstore.saving import Pending, Saved, save, save_async, warm_up
    from shardstore.tree import PerRank, register_type

_WHERE = {
    "Pending": "shardstore.saving", "save_async": "shardstore.saving", "warm_up": "shardstore.saving",
    "save": "shardstore.saving", "Saved": "shardstore.saving",
    "load": "shardstore.loading", "open": "shardstore.loading:open_checkpoint",
    "Checkpoint": "shardstore.loading", "LazyTensor": "shardstore.loading",
    "verify": "shardstore.check", "Report": "shardstore.check",
    "Run": "shardstore.run",
    "register_type": "shardstore.tree", "PerRank": "shardstore.tree",
    **dict.fromkeys(
        [
            "CheckpointExists", "CheckpointNotFound", "CommitUnknown", "Damaged", "Fenced", "InvalidArgument",
            "KeyMissing", "Mismatch", "NothingToResume", "PeerError", "ShardstoreError", "StoreError",
            "StoreUnavailable", "Superseded", "Unfinished", "UnsupportedState", "UnsupportedVersion",
        ],
        "shardstore.errors",
    ),
}  # fmt: skip

__all__ = [
    "Checkpoint",
    "CheckpointExists",
    "CheckpointNotFound",
    "CommitUnknown",
    "Damaged",
    "Fenced",
    "InvalidArgument",
    "KeyMissing",
    "LazyTensor",
    "Mismatch",
    "NothingToResume",
    "PeerError",
    "Pending",
    "PerRank",
    "Report",
    "Run",
    "Saved",
    "ShardstoreError",
    "StoreError",
    "StoreUnavailable",
    "Superseded",
    "Unfinished",
    "UnsupportedState",
    "UnsupportedVersion",
    "__version__",
    "load",
    "open",
    "register_type",
    "save",
    "save_async",
    "verify",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'shardstore' has no attribute {name!r}")
    module, _, attribute = where.partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
