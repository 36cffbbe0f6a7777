"""Writing folders of torch.distributed.checkpoint, by torch itself: plain ones, of one process."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardstore.errors import CheckpointExists, Damaged, ShardstoreError, from_os_error
from shardstore.formats.dcp import DcpFormat
from shardstore.formats.plain import bytes_of, plain, refuse, spec_of, tensors_in
from shardstore.formats.port import Options
from shardstore.memory import load
from shardstore.specs import Lazy
from shardstore.storage.posix import forget_pages

NAME = "dcp"
BATCH = 64 * 1024 * 1024
"""Bytes of tensors in a file, unless one alone is larger."""


def write(state: Any, path: str) -> None:
    """Write a state through `dcp.save`, into a folder that is read back, and renamed when it is whole.

    DCP holds dicts with text as keys, lists, tensors, and values that `torch.load(weights_only=True)` takes. Raises
    UnsupportedState for all else, before a byte is written; CheckpointExists, StoreError, Damaged.
    """
    lazy: dict[int, Lazy] = {}
    prepared = _prepared(plain(state), "", lazy)
    if os.path.lexists(path):
        raise CheckpointExists(f"{path!r} is there already: choose another place")
    made = f"{path.rstrip('/')}.{secrets.token_hex(4)}.tmp"
    try:
        os.mkdir(made)
        _save(prepared, lazy, made)
        _sync(made)
        _read_back(prepared, made)
        os.rename(made, path)
        _sync(os.path.dirname(os.path.abspath(path)), files=False)
    except ShardstoreError:
        raise
    except OSError as error:
        raise from_os_error(error, "writing", path) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _prepared(value: Any, path: str, lazy: dict[int, Lazy]) -> Any:
    """What `dcp.save` is given. Where it takes a state apart, a lazy tensor is one without memory, noted in `lazy`."""
    if isinstance(value, Lazy):
        stand_in = torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype), device="meta")
        lazy[id(stand_in)] = value
        return stand_in
    if isinstance(value, torch.Tensor):
        return _dense(value, path)
    if type(value) in (dict, OrderedDict):
        if not value:
            raise refuse(NAME, path, "DCP drops empty dicts; leave it out")
        return {_key(key, path): _prepared(item, f"{path}.{key}".lstrip("."), lazy) for key, item in value.items()}
    if type(value) is list:
        return [_prepared(item, f"{path}.{at}", lazy) for at, item in enumerate(value)]
    return _value(value, path)


def _dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise refuse(NAME, path, "it is sparse; make it dense first")
    return tensor.detach()


def _key(key: Any, path: str) -> str:
    if type(key) is not str:
        raise refuse(NAME, path, f"DCP makes text of keys, and this is {key!r:.40}")
    return key


def _value(value: Any, path: str) -> Any:
    """A value that is pickled whole, and must come back by `weights_only=True`: lazy tensors in it are loaded."""
    if isinstance(value, Lazy):
        return load(value)
    if isinstance(value, torch.Tensor):
        return _dense(value, path)
    if type(value) is tuple:
        return tuple(_value(item, path) for item in value)
    if type(value) is list:
        return [_value(item, path) for item in value]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _value(item, path)) for key, item in value.items())
    if value is None or type(value) in (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device):
        return value
    raise refuse(NAME, path, f"a {type(value).__name__} would not load again without running code; convert it first")


def _save(prepared: dict[str, Any], lazy: dict[int, Lazy], folder: str) -> None:
    planner = _Planner()
    planner.lazy = lazy
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(prepared, storage_writer=_Writer(folder, sync_files=False), planner=planner, no_dist=True)
    except CheckpointException as error:  # no Exception: nobody above would catch it
        first = next(iter(error.failures.values()), (error,))[0]
        if isinstance(first, ShardstoreError | OSError):
            raise first from None
        raise refuse(NAME, "the state", str(first)) from None


class _Planner(DefaultSavePlanner):
    """Loads each tensor when it is its turn."""

    lazy: Mapping[int, Lazy]

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return load(self.lazy[id(found)]) if id(found) in self.lazy else found


class _Writer(FileSystemWriter):
    """Writes files of some 64 MiB, one after the other: torch keeps all tensors of a file until it is closed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            storage = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=storage)
            results += super().write_data(part, planner).value()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _batches(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    used = 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if batch and used + size > BATCH:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += size
    if batch:
        yield batch


def _read_back(prepared: Any, folder: str) -> None:
    """That the disk has all tensors, with the CRCs that torch wrote from memory. Raises Damaged."""
    with DcpFormat().read(folder, Options()) as found:
        there = {path: spec_of(tensor) for path, tensor in tensors_in(found.state)}
        if there != {path: spec_of(tensor) for path, tensor in tensors_in(prepared)}:
            raise Damaged(f"{folder} does not read back: torch has left out tensors", file=folder)
        for _, tensor in tensors_in(found.state):
            for _ in bytes_of(tensor):
                pass


def _sync(folder: str, *, files: bool = True) -> None:
    """Flush a folder and what lies in it: DCP itself does so before all is written."""
    for name in [*(os.listdir(folder) if files else ()), ""]:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            forget_pages(fd)  # what is read back comes from the disk
        finally:
            os.close(fd)
