"""Loading: a checkpoint becomes a state, new or into the caller's own, whole or in part."""

from __future__ import annotations

from shardstore.loading.api import load
from shardstore.loading.lazy import Checkpoint, LazyTensor, open_checkpoint

__all__ = ["Checkpoint", "LazyTensor", "load", "open_checkpoint"]
