"""Plans as values: tensors to shards, and wanted bytes to sorted reads. Pure; nothing here touches a store."""

from __future__ import annotations

from shardstore.plan.owners import Replica, share_out
from shardstore.plan.reads import FileRead, Segment, Want, plan_reads
from shardstore.plan.shards import GroupBy, Layout, Shard, ShardOptions, Tensors, plan_shards, spread

__all__ = [
    "FileRead", "GroupBy", "Layout", "Replica", "Segment", "Shard", "ShardOptions", "Tensors", "Want", "plan_reads",
    "plan_shards", "share_out", "spread",
]  # fmt: skip
