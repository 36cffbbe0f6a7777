"""Tensors as buffers: their bytes as a stream, new memory to load into, windows onto memory that is not plain."""

from __future__ import annotations

from shardstore.memory.collector import no_gc
from shardstore.memory.fill import WAVE, Window, fillable, windows
from shardstore.memory.fresh import Carved, Extent, carve, over, raw, single, torch_dtype
from shardstore.memory.stage import Arena, needed
from shardstore.memory.stream import owned, stream

__all__ = [
    "WAVE",
    "Arena",
    "Carved",
    "Extent",
    "Window",
    "carve",
    "fillable",
    "needed",
    "no_gc",
    "over",
    "owned",
    "raw",
    "single",
    "stream",
    "torch_dtype",
    "windows",
]
