"""fastsafetensors and the Run:ai Model Streamer: faster readers of safetensors files, made for GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from benchmarks.states import Case
from benchmarks.systems.base import System, needs
from benchmarks.systems.safetensors_file import NAME


class Fastsafetensors(System):
    """Reads the file by threads into one piece of memory."""

    name = "fastsafetensors"
    files = "safetensors"
    lacks = "hash, save"
    calls: ClassVar = {"load-fresh": "SafeTensorsFileLoader(nogds=True)"}

    def missing(self) -> str | None:
        return needs("fastsafetensors")

    def load_fresh(self, case: Case, folder: Path) -> Any:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=case.threads)
        loader.add_filenames({0: [str(folder / NAME)]})
        memory = loader.copy_files_to_device()
        return Loaded({name: memory.get_tensor(name) for name in loader.get_keys()}, memory, loader)

    def tree(self, loaded: Any, _case: Case) -> Any:
        return loaded.tensors


class Loaded:
    """Tensors, and who owns their memory: it is not given back until both are closed."""

    def __init__(self, tensors: dict[str, Any], *owners: Any) -> None:
        self.tensors = tensors
        self._owners = owners

    def __del__(self) -> None:
        self.tensors = {}
        for owner in self._owners:
            owner.close()


class RunaiStreamer(System):
    """Reads the file by threads of C++ into one piece of memory."""

    name = "runai"
    files = "safetensors"
    lacks = "hash, save"
    calls: ClassVar = {"load-fresh": "SafetensorsStreamer"}

    def missing(self) -> str | None:
        return needs("runai_model_streamer")

    def load_fresh(self, case: Case, folder: Path) -> Any:
        with mock.patch.dict(os.environ, RUNAI_STREAMER_CONCURRENCY=str(case.threads)):
            from runai_model_streamer import SafetensorsStreamer

            with SafetensorsStreamer() as streamer:
                streamer.stream_file(str(folder / NAME))
                return dict(streamer.get_tensors())
