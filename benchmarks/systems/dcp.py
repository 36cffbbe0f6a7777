"""torch.distributed.checkpoint in one process, without a process group. It loads only into tensors that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.states import Case
from benchmarks.systems.base import System


class OneThread(System):
    """One file, written by one thread."""

    name = "dcp-1"
    files = "dcp"
    threads: ClassVar[int] = 1
    lacks = "hash"
    calls: ClassVar = {
        "save": "dcp.save, thread_count=1",
        "save-durable": "dcp.save, thread_count=1, sync_files",
        "load-into": "dcp.load",
        "fuse-load-into": "dcp.load",
        "open": "FileSystemReader.read_metadata",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        writer = dcp.FileSystemWriter(folder, thread_count=self.threads, sync_files=durable)
        dcp.save(case.state, storage_writer=writer, no_dist=True)

    def load_into(self, case: Case, folder: Path) -> None:
        dcp.load(case.target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)

    def open(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        return len(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


class TwoThreads(OneThread):
    """Two files, written by two threads."""

    name = "dcp-2"
    files = "dcp-2"  # its load has no threads, and is measured once
    threads = 2
    calls: ClassVar = {
        "save": "dcp.save, thread_count=2",
        "save-durable": "dcp.save, thread_count=2, sync_files",
        "fuse-save": "dcp.save, thread_count=2, sync_files",
        "stall": "dcp.async_save, one DefaultStager",
        "stall-workers": "dcp.async_save, one DefaultStager",
        "beside": "dcp.async_save, one DefaultStager",
    }

    def background(self, case: Case, folder: Path) -> Any:
        if self.name not in case.cache:
            case.cache[self.name] = DefaultStager(StagingOptions(*[False] * 4))  # what runs without CUDA
        writer = dcp.FileSystemWriter(folder, thread_count=self.threads)
        return dcp.async_save(case.state, storage_writer=writer, no_dist=True, async_stager=case.cache[self.name])

    def release(self, case: Case) -> None:
        if stager := case.cache.pop(self.name, None):
            stager.close()

    def wrong(self, case: Case, folder: Path) -> str | None:
        return OneThread().wrong(case, folder)
