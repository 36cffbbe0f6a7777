"""Tensors as buffers: their bytes as a stream, new memory to load into, windows onto memory that is not plain."""

from __future__ import annotations

from shardstore.memory.collector import no_gc
from shardstore.memory.fill import WAVE, Window, fillable, windows
from shardstore.memory.fresh import Carved, Extent, carve, over, raw, single, torch_dtype
from shardstore.memory.lazy import load, slices
from shardstore.memory.stage import Arena, needed
from shardstore.memory.stream import WINDOW, Windows, owned, stream

__all__ = [
    "WAVE",
    "WINDOW",
    "Arena",
    "Carved",
    "Extent",
    "Window",
    "Windows",
    "carve",
    "fillable",
    "load",
    "needed",
    "no_gc",
    "over",
    "owned",
    "raw",
    "single",
    "slices",
    "stream",
    "torch_dtype",
    "windows",
]
