"""Planners that do more than torch's default ones."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType


class Halves(DefaultSavePlanner):
    """Saves each tensor as two parts, its first row and the rest, and values as bytes of its own making."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._parts(item)]
        return dataclasses.replace(plan, items=items)

    def _parts(self, item: WriteItem) -> list[WriteItem]:
        if item.type == WriteItemType.BYTE_IO:
            return [item]
        data = item.tensor_data
        parts = []
        for first, rows in ((0, 1), (1, data.size[0] - 1)):
            offsets = torch.Size([first, *[0] * (len(data.size) - 1)])
            chunk = ChunkStorageMetadata(offsets, torch.Size([rows, *data.size[1:]]))
            parts.append(
                WriteItem(
                    MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, data.properties, data.size),
                )
            )  # fmt: skip
        return parts

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state_dict[write_item.index.fqn]
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(value, data)
            return data
        chunk = write_item.tensor_data.chunk
        return value[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]


class Liar(DefaultSavePlanner):
    """Gives other tensors than it has planned."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item)[1:]


class Hole(DefaultLoadPlanner):
    """Leaves out the second of its items, as a plan with a hole does."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=plan.items[:1] + plan.items[2:])
