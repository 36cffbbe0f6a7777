"""The run folder: checkpoints in their order, owners, marks, losses, sidecars, retention, pivots, forks."""

from __future__ import annotations

from shardstore.run.address import pick, resolve, split
from shardstore.run.facade import Run
from shardstore.run.info import Origin, Pivot, RunInfo
from shardstore.run.listing import RunCheckpoint
from shardstore.run.loss_log import LossWriter, matches
from shardstore.run.losses import Losses, LossEvent
from shardstore.run.migrating import Migration, migrate, plan_migration
from shardstore.run.names import folder_name, parse_folder
from shardstore.run.owners import Owner, OwnerRecord
from shardstore.run.retention import Decision, Facts, KeepBest, KeepEvery, KeepFor, KeepLast, Policy, plan_retention
from shardstore.run.sidecars import Sidecar

__all__ = [
    "Decision", "Facts", "KeepBest", "KeepEvery", "KeepFor", "KeepLast", "LossEvent", "LossWriter", "Losses",
    "Migration", "Origin", "Owner", "OwnerRecord", "Pivot", "Policy", "Run", "RunCheckpoint", "RunInfo", "Sidecar",
    "folder_name", "matches", "migrate", "parse_folder", "pick", "plan_migration", "plan_retention", "resolve", "split",
]  # fmt: skip
