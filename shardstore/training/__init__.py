"""Training: a run that survives. Saves when due or on a signal, resumes bit for bit, and removes what is not kept."""

from __future__ import annotations

from shardstore.run import KeepBest, KeepEvery, KeepFor, KeepLast
from shardstore.training.checkpointer import Checkpointer
from shardstore.training.signals import Preempted

__all__ = ["Checkpointer", "KeepBest", "KeepEvery", "KeepFor", "KeepLast", "Preempted"]
