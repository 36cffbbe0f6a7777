"""Foreign formats: what people already have, as states of lazy tensors, and back."""

from __future__ import annotations

from shardstore.formats.convert import Converted, convert
from shardstore.formats.diff import Change, Comparison, Different, diff
from shardstore.formats.layout import Layout
from shardstore.formats.port import Foreign, Format, Options
from shardstore.formats.table import FORMATS, by_name, detect, read

__all__ = [
    "FORMATS",
    "Change",
    "Comparison",
    "Converted",
    "Different",
    "Foreign",
    "Format",
    "Layout",
    "Options",
    "by_name",
    "convert",
    "detect",
    "diff",
    "read",
]
