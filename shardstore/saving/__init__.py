"""Saving: a state becomes a committed checkpoint."""

from __future__ import annotations

from shardstore.saving.api import Saved, flattened, save, save_flat
from shardstore.saving.attempt import Lineage, Options, new_attempt
from shardstore.saving.background import Pending, in_background, save_async, warm_up

__all__ = [
    "Lineage",
    "Options",
    "Pending",
    "Saved",
    "flattened",
    "in_background",
    "new_attempt",
    "save",
    "save_async",
    "save_flat",
    "warm_up",
]
