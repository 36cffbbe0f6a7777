"""Saving: a state becomes a committed checkpoint."""

from __future__ import annotations

from shardstore.saving.api import Saved, save
from shardstore.saving.background import Pending, save_async, warm_up

__all__ = ["Pending", "Saved", "save", "save_async", "warm_up"]
