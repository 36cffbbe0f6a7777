"""The limits: the bare system calls on the same bytes by as many threads, one file for each thread, names kept nowhere.

What is no system call (who writes what, the views of the tensors) is prepared outside the timed part.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash

from benchmarks.portion import Portion
from benchmarks.states import Case, Tree, leaves
from benchmarks.systems.base import System, flush
from shardstore.index import HEAD_BYTES
from shardstore.index import NAME as INDEX

WRITTEN, READ = 4 << 20, 16 << 20  # bytes in one system call; more gains nothing
HASHED = 1 << 20  # bytes hashed in one go, which stay in a core's cache
VIEWS = 1024  # the kernel takes no more in one call (IOV_MAX)

Part = list[tuple[str, torch.Tensor]]
Batch = tuple[int, list[memoryview], int]  # offset, views, bytes


def parts(case: Case) -> list[Part]:
    """The tensors of each thread's file: the largest first, each to the file that has least."""
    files: list[Part] = [[] for _ in range(_count(case))]
    filled = [0] * len(files)
    for name, tensor in sorted(leaves(case.state), key=lambda item: -item[1].nbytes):
        least = filled.index(min(filled))
        files[least].append((name, tensor))
        filled[least] += tensor.nbytes
    return files


def _count(case: Case) -> int:
    """Of files, and of threads."""
    return min(case.threads, case.tensors)


def batches(buffers: list[memoryview], most: int) -> list[Batch]:
    """The buffers as the calls that move them, each of at most so many bytes and VIEWS views."""
    made: list[Batch] = []
    at, views, size = 0, [], 0
    for buffer in buffers:
        for start in range(0, len(buffer), most):
            piece = buffer[start : start + most]
            if size + len(piece) > most or len(views) == VIEWS:
                made.append((at, views, size))
                at, views, size = at + size, [], 0
            views.append(piece)
            size += len(piece)
    return [*made, (at, views, size)]


def each(case: Case, work: Callable[[int], Any]) -> list[Any]:
    """Call `work(number)` on a thread for each file; raises what one of them raised."""
    done: list[Any] = [None] * _count(case)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            done[number] = work(number)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(_count(case))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return done


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _plan(case: Case, tree: str, most: int) -> list[list[Batch]]:
    """The calls of each thread, on the memory of the state or of the target."""
    if (tree, most) not in case.cache:
        tensors = dict(leaves(getattr(case, tree)))
        case.cache[tree, most] = [batches([_bytes(tensors[name]) for name, _ in part], most) for part in parts(case)]
    return case.cache[tree, most]


def _head(path: Path) -> int:
    """How many bytes the head of a file has."""
    with path.open("rb", buffering=0) as file:
        return len(file.read(HEAD_BYTES))


def _ignore(_views: list[memoryview]) -> None:
    """Take no look at the bytes."""


def _hash(views: list[memoryview]) -> None:
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    digest.digest()


class Bare(System):
    """Threads that do nothing but the system calls."""

    name = "bare"
    kind = "limit"
    files = "bare"
    lacks = "hash, fsync, atomic commit, names"
    written, read = WRITTEN, READ
    look: ClassVar[Callable[[list[memoryview]], None]] = staticmethod(_ignore)  # at bytes that are hot in the cache
    calls: ClassVar = {
        "save": "write",
        "save-durable": "write, fsync",
        "load-into": "preadv into the tensors",
        "load-fresh": "preadv into huge-page memory",
        "load-mapped": "xxh3_128 of private maps",
        "partial": "pread",
        "list": "listdir, read the head of each index",
        "fuse-save": "write, fsync",
        "fuse-load-into": "preadv into the tensors",
        "fuse-load-fresh": "preadv into huge-page memory",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        plan = _plan(case, "state", self.written)
        each(case, lambda number: self._write(folder / f"{number}.bin", plan[number], durable=durable))
        if durable:
            flush(folder)

    def _write(self, path: Path, calls: list[Batch], *, durable: bool, hold: Callable[[], None] = lambda: None) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for _, views, size in calls:
                hold()
                self.look(views)
                if os.writev(file, views) != size:
                    raise OSError("short write")
            if durable:
                os.fsync(file)
        finally:
            os.close(file)

    def load_into(self, case: Case, folder: Path) -> None:
        plan = _plan(case, "target", self.read)
        each(case, lambda number: self._fill(folder / f"{number}.bin", plan[number]))

    def load_fresh(self, case: Case, folder: Path) -> Any:
        def read(number: int) -> mmap.mmap:
            path = folder / f"{number}.bin"
            memory = mmap.mmap(-1, path.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            self._fill(path, batches([memoryview(memory)], self.read))
            return memory

        return each(case, read)

    def _fill(self, path: Path, calls: list[Batch]) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            for at, views, size in calls:
                if os.preadv(file, views, at) != size:
                    raise OSError(f"short read of {path.name}")
                self.look(views)
        finally:
            os.close(file)

    def load_mapped(self, case: Case, folder: Path) -> Any:
        def check(number: int) -> mmap.mmap:
            with (folder / f"{number}.bin").open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            view, digest = memoryview(memory), xxhash.xxh3_128()
            for at in range(0, len(view), HASHED):
                digest.update(view[at : at + HASHED])
            digest.digest()
            return memory

        return each(case, check)

    def partial(self, case: Case, folder: Path, wanted: Portion) -> dict[str, torch.Tensor]:
        found = {}
        for number, part in enumerate(parts(case)):
            with (folder / f"{number}.bin").open("rb", buffering=0) as file:
                at = 0
                for name, tensor in part:
                    if rows := wanted.get(name):
                        found[name] = torch.empty_like(tensor[rows])
                        file.seek(at + rows.start * tensor[0].nbytes)
                        file.readinto(_bytes(found[name]))
                    at += tensor.nbytes
        return found

    def list(self, case: Case, folder: Path) -> int:  # noqa: ARG002
        found = (name for name in os.listdir(folder) if name.startswith("step-"))
        return sum(1 for name in found if _head(folder / name / INDEX))

    def tree(self, loaded: Any, case: Case) -> Tree:
        found: dict[str, torch.Tensor] = {}
        for memory, part in zip(loaded, parts(case), strict=True):
            whole, at = torch.from_numpy(np.frombuffer(memory, np.uint8)), 0
            for name, tensor in part:
                found[name] = whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += tensor.nbytes
        return found


class BareHashed(Bare):
    """The same, and every byte hashed once: what the hash costs at the least."""

    name = "bare-hashed"
    lacks = "fsync, atomic commit, names"
    written = read = HASHED
    look = staticmethod(_hash)
    calls: ClassVar = {
        "save": "xxh3_128, write",
        "save-durable": "xxh3_128, write, fsync",
        "load-into": "preadv into the tensors, xxh3_128",
        "load-fresh": "preadv into huge-page memory, xxh3_128",
        "verify": "preadv into one buffer, xxh3_128",
    }

    def verify(self, case: Case, folder: Path) -> bool:
        def read(number: int) -> int:
            buffer, total = memoryview(bytearray(self.read)), 0
            digest = xxhash.xxh3_128()
            with (folder / f"{number}.bin").open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    total += count
            digest.digest()
            return total

        return sum(each(case, read)) == case.nbytes


class Writer(Bare):
    """One thread that writes beside a training, with the priority of all others."""

    name = "bare-writer"
    nice = 0
    calls: ClassVar = {"beside": "write, on a thread"}

    def held(self, case: Case, folder: Path, hold: Callable[..., None]) -> Any:
        pool = ThreadPoolExecutor(1, initializer=self._make_nice)
        writing = pool.submit(self._write_all, _plan(case, "state", self.written), folder, hold)
        pool.shutdown(wait=False)
        return writing

    def _make_nice(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self.nice)  # of this thread, on Linux

    def _write_all(self, plan: list[list[Batch]], folder: Path, hold: Callable[[], None]) -> None:
        for number, calls in enumerate(plan):
            self._write(folder / f"{number}.bin", calls, durable=False, hold=hold)

    def wrong(self, case: Case, folder: Path) -> str | None:
        return Bare().wrong(case, folder)


class NicedWriter(Writer):
    """The same at the lowest priority."""

    name = "bare-niced"
    nice = 19
    calls: ClassVar = {"beside": "write, on a thread at nice 19"}


class Copy(System):
    """From memory to memory: how fast tensors can be filled at all."""

    name = "copy"
    kind = "limit"
    files = "copy"
    lacks = "files"
    calls: ClassVar = {
        "load-into": "copy_, no file",
        "stall": "copy_ into touched memory",
        "stall-workers": "copy_ into touched memory",
    }

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        """There is nothing to prepare."""

    def load_into(self, case: Case, folder: Path) -> None:  # noqa: ARG002
        if "copy" not in case.cache:
            case.cache["copy"] = [[tensor for _, tensor in leaves(tree)] for tree in (case.target, case.state)]
        torch._foreach_copy_(*case.cache["copy"])

    def background(self, case: Case, folder: Path) -> Any:
        self.load_into(case, folder)
        done: Future[None] = Future()
        done.set_result(None)
        return done
