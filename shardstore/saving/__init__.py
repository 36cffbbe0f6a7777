"""Saving: a state becomes a committed checkpoint."""

from __future__ import annotations

from shardstore.saving.api import Saved, save

__all__ = ["Saved", "save"]
