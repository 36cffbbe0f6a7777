"""Plans as values: tensors to shards, and wanted bytes to sorted reads. Pure; nothing here touches a store."""

from __future__ import annotations

from shardstore.plan.reads import FileRead, Segment, Want, plan_reads
from shardstore.plan.shards import GroupBy, Layout, Shard, ShardOptions, Tensors, plan_shards, spread

__all__ = [
    "FileRead", "GroupBy", "Layout", "Segment", "Shard", "ShardOptions", "Tensors", "Want", "plan_reads", "plan_shards",
    "spread",
]  # fmt: skip
