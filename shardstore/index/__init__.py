"""The index of a checkpoint, `shardstore.json`: schema, strict reading, writing, and what is derived from it."""

from __future__ import annotations

from shardstore.index.check import check
from shardstore.index.codec import MAX_BYTES, dump, parse, rewritten, schema_of
from shardstore.index.contribution import Contribution, dump_contribution, parse_contribution
from shardstore.index.derived import header_name, origin_of, weight_map
from shardstore.index.head import HEAD_BYTES, Head, head_of, read_head
from shardstore.index.model import HF_NAME, NAME, FileEntry, Index, Piece, mark_name

__all__ = [
    "HEAD_BYTES", "HF_NAME", "MAX_BYTES", "NAME", "Contribution", "FileEntry", "Head", "Index",
    "Piece", "check", "dump", "dump_contribution", "head_of", "header_name", "mark_name", "origin_of", "parse",
    "parse_contribution",
    "read_head", "rewritten", "schema_of",
    "weight_map",
]  # fmt: skip
