"""The reader for `dcp.load`: every byte that is used has been verified, and every destination is filled."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardstore import tree
from shardstore.dcp.naming import Path, names_of
from shardstore.dcp.place import Place
from shardstore.errors import InvalidArgument, Mismatch
from shardstore.events import Listener
from shardstore.loading.fresh import read_fresh
from shardstore.loading.into import fill
from shardstore.loading.source import Source
from shardstore.memory import no_gc, torch_dtype
from shardstore.specs import Box
from shardstore.storage import Urls
from shardstore.tree.destinations import spec_of, unfit
from shardstore.tree.dtensors import is_dtensor, part_held
from shardstore.tree.restore import Restorer
from shardstore.tree.skeleton import Node, numbers, tag

_SHOWN = 20


class Reader(Place, StorageReader):
    """Reads a checkpoint of ours, whoever saved it: `dcp.load(state, storage_reader=Reader(url))`.

    `url`, `expect`, `threads`, `listener`, `storage_options`: as in `shardstore.load`; `RUN@STEP` as well.
    `checkpoint_id=` of `dcp.load` takes the place of `url`.

    Errors come inside of DCP's CheckpointException, a BaseException whose `failures` have them by rank: Damaged, which
    names the file and the tensors, CheckpointNotFound, Unfinished, StoreError; Mismatch, before anything is touched,
    for another dtype and for a destination of which some part would not be filled.
    """

    def __init__(
        self, url: Urls, *, expect: str | None = None, threads: int | None = None, listener: Listener | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(url)
        self._how: dict[str, Any] = {
            "expect": expect, "threads": threads, "listener": listener, "storage_options": storage_options,
        }  # fmt: skip
        self._opened: _Opened | None = None
        self._failed: Exception | None = None

    # No parameter of these two is named `kwargs`: DCP would take it for a reader with an index for each rank, and
    # answer a damaged index by asking for another one.

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Open the checkpoint. What fails is raised by the next call: DCP would make an AssertionError of it here."""
        self._end()
        try:
            with no_gc():
                self._opened = _Opened(Source(self._url, **self._how))
                return self._opened.metadata()
        except Exception as error:  # noqa: BLE001 - raised in set_up_storage_reader
            self._end()
            self._failed = error
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: ARG002, FBT001 - DCP's
        """Raise what has kept the checkpoint from being opened."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Check that all fits, then fill."""
        if self._opened is None:
            raise InvalidArgument("no load is under way: the reader is called by dcp.load")
        try:
            with no_gc():
                self._opened.read(plan.items, planner)
        finally:
            self._end()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_failed": None}

    def _end(self) -> None:
        if self._opened is not None:
            self._opened.source.close()
        self._opened = None


class _Target(NamedTuple):
    """An item of the plan, and the memory that it fills."""

    item: ReadItem
    fill: tree.Fill
    tensor: torch.Tensor


class _Opened:
    """An opened checkpoint, by DCP's names."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._paths = source.index.paths
        with source.structuring():
            self._names: dict[str, tuple[Path, Node]] = names_of(source.meta.state, self._paths)

    def metadata(self) -> Metadata:
        """What DCP plans by. Each tensor is one chunk, in however many pieces it is stored."""
        entries: dict[str, Any] = {}
        for name, (_, node) in self._names.items():
            entries[name] = self._tensor(node["$t"]) if tag(node) == "$t" else BytesStorageMetadata()
        return Metadata(entries, planner_data={name: path for name, (path, _) in self._names.items()})

    def _tensor(self, number: int) -> TensorStorageMetadata:
        spec = self.source.index.specs[number]
        size = torch.Size(spec.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(spec.dtype)), size, [chunk])

    def read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Fill all destinations: tensors first, then values."""
        source = self.source
        tensors = [item for item in items if item.type == LoadItemType.TENSOR]
        self._require_covered(tensors, planner)
        targets = self._targets(tensors, planner)
        values = [item for item in items if item.type == LoadItemType.BYTE_IO]
        wanted = self._numbers_in(values)
        whole = {target.fill.number for target in targets if target.fill.box is None} | wanted
        source.reporter.started(sum(target.tensor.nbytes for target in targets), len(source.index.files))
        source.check_headers(whole)
        made = [(item, data) for item, data in zip(values, self._values(values, wanted), strict=True)]
        fill(source, [target.fill for target in targets])
        for target in targets:
            planner.commit_tensor(target.item, target.tensor)
        for item, data in made:
            planner.load_bytes(item, data)
        source.reporter.finished()

    # ------------------------------------------------------------------------------------------------ tensors

    def _targets(self, items: Sequence[ReadItem], planner: LoadPlanner) -> list[_Target]:
        """The memory of every item. Raises Mismatch for all that don't fit."""
        targets, wrong = [], []
        for item in items:
            tensor = planner.resolve_tensor(item).detach()
            target, why = self._target(item, tensor)
            if why:
                wrong.append(f"{item.storage_index.fqn}: {why}")
            targets.append(target)
        if wrong:
            raise _mismatch(wrong)
        return targets

    def _target(self, item: ReadItem, tensor: torch.Tensor) -> tuple[_Target, str]:
        index = self.source.index
        number = self._names[item.storage_index.fqn][1]["$t"]
        spec, (dtype, shape) = index.specs[number], spec_of(tensor)
        box: Box | None = Box(tuple(item.storage_offsets), tuple(item.lengths))
        why = unfit(tensor)
        if box is not None and shape != box.shape:
            why = f"the plan is for {box.shape}, the planner gives {shape}"
        elif dtype != spec.dtype:
            why = (
                f"the checkpoint has {spec.dtype}, the target {dtype}; DCP would cast: load into a {spec.dtype} tensor"
            )
        if box == Box.whole(spec.shape):
            box = None
        return _Target(item, tree.Fill(index.resolve(number), tensor, box), tensor), why

    def _require_covered(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """That each tensor of the state is filled wholly: DCP never looks, and what is not filled keeps old values."""
        state = getattr(planner, "state_dict", None)
        if not isinstance(state, dict):
            return
        filled: Counter[str] = Counter()
        for item in items:
            filled[item.dest_index.fqn] += math.prod(item.lengths)
        wrong = []
        for name, value in state.items():
            known = self._names.get(name)
            if known is None or tag(known[1]) != "$t":
                continue  # left out, as the planner allows
            here = _elements(value, name)
            if here != filled[name]:
                wrong.append(f"{name}: {filled[name]} of its {here} elements on this rank would be filled")
        if wrong:
            raise _mismatch(wrong)

    # ------------------------------------------------------------------------------------------------- values

    def _numbers_in(self, items: Sequence[ReadItem]) -> set[int]:
        index = self.source.index
        nodes = [self._names[item.storage_index.fqn][1] for item in items]
        with self.source.structuring():
            return {index.resolve(number) for node in nodes for number in numbers(node, self._paths)}

    def _values(self, items: Sequence[ReadItem], wanted: set[int]) -> list[io.BytesIO]:
        """Every value as the bytes that DCP's planners read: they come from here, and from nowhere else."""
        found = read_fresh(self.source, wanted) if wanted else {}
        tensors = {number: tensor.clone() for number, tensor in found.items()}  # torch.save writes whole storages
        resolve = self.source.index.resolve
        restorer = Restorer(self._paths, lambda number: tensors[resolve(number)])
        made = []
        with self.source.structuring():
            for item in items:
                data = io.BytesIO()
                torch.save(restorer.node(self._names[item.storage_index.fqn][1]), data)
                data.seek(0)
                made.append(data)
        return made


def _elements(value: Any, name: str) -> int:
    """How many elements of a tensor of the state lie on this rank. Raises UnsupportedState for a doubtful layout."""
    if is_dtensor(value):
        local = value.to_local()
        if not hasattr(local, "local_shards"):
            part = part_held(value, name)
            return part.box.volume if part.mesh else 0
        value = local
    if hasattr(value, "local_shards"):  # torch's older ShardedTensor, torchrec's wrapper
        return sum(getattr(shard, "tensor", shard).numel() for shard in value.local_shards())
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _mismatch(wrong: Sequence[str]) -> Mismatch:
    shown = [f"  {text}" for text in wrong[:_SHOWN]]
    more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    head = f"the checkpoint doesn't fit the target; nothing was touched. {len(wrong)} different:"
    return Mismatch("\n".join([head, *shown, *more]), different=tuple(wrong))
