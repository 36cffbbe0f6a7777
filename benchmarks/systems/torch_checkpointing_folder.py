"""torch_checkpointing, which is to follow DCP: a pickle of each section, moved into place when it is written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.states import Case
from benchmarks.systems.base import System, flush, needs

FOLDER = "checkpoint"


class TorchCheckpointing(System):
    """Two threads write, one for each section. Without direct I/O, its default, which ext4 refuses as it is used."""

    name = "torch_checkpointing"
    files = "torch_checkpointing"
    lacks = "hash, fsync, safe load"
    calls: ClassVar = {
        "save": "CheckpointManager.save",
        "save-durable": "CheckpointManager.save, fsync",
        "load-into": "CheckpointManager.load",
        "stall": "CheckpointManager.save, in a process",
        "beside": "CheckpointManager.save, in a process",
    }

    def missing(self) -> str | None:
        return needs("torch_checkpointing")

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        manager = _manager(case, background=False)
        manager.save(str(folder / FOLDER), _sections(case.state))
        manager.close()
        if durable:
            flush(*(folder / FOLDER).iterdir())

    def load_into(self, case: Case, folder: Path) -> None:
        manager = _manager(case, background=False)
        manager.load(str(folder / FOLDER), into=_sections(case.target), strict=True)
        manager.close()

    def background(self, case: Case, folder: Path) -> Any:
        if self.name not in case.cache:
            case.cache[self.name] = _manager(case, background=True)
        return case.cache[self.name].save(str(folder / FOLDER), _sections(case.state))

    def release(self, case: Case) -> None:
        if manager := case.cache.pop(self.name, None):
            manager.close()


def _sections(tree: dict[str, Any]) -> dict[str, Any]:
    """Dicts as they are; tensors at the top go into one file."""
    return tree if all(isinstance(value, dict) for value in tree.values()) else {"model": tree}


def _manager(case: Case, *, background: bool) -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
    writer = CheckpointWriterConfig(file_write_max_threads=case.threads)
    staging = CheckpointStagerConfig(use_shared_memory=True, use_async_staging=False)  # what runs without CUDA
    save = (
        AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
        if background
        else SyncCheckpointSaverConfig(writer_config=writer)
    )
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))
