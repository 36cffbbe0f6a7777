"""Real disks that are full, or become read-only: a clear error, nothing lost, nothing left behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.errors import StoreError
from shardstore.index import mark_name
from shardstore.storage import Store
from tests.crash.places import files, look, named, recovers, settled, temps
from tests.crash.states import BIG, state
from tests.kit.damage import index_of
from tests.kit.faults import Wrapper
from tests.kit.inject import injected

pytestmark = pytest.mark.mounts

MIB = 1 << 20
BLOCK = 4096
MOST = 1000
OLD, NEW, NEXT = 3, 4, 5

OVERWRITES = [pytest.param(False, id="save"), pytest.param(True, id="overwrite")]


def run(*command: object) -> None:
    """Run a program; its words become the reason if it fails."""
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")


@contextmanager
def mounted(point: Path, *what: object) -> Iterator[Path]:
    """Mount something for a while; the test is skipped where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    point.mkdir()
    try:
        run("mount", *what, point)
    except OSError as error:
        pytest.skip(f"can't mount here: {error}")
    try:
        yield point
    finally:
        run("umount", point)


def _ext4(folder: Path) -> tuple[object, ...]:
    program = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        pytest.skip("needs mkfs.ext4 (Debian: e2fsprogs)")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(40 * MIB)
    run(program, "-q", "-F", "-m", 0, "-b", BLOCK, "-O", "^has_journal", image)
    return "-o", "loop", image


def _tmpfs(folder: Path) -> tuple[object, ...]:
    return "-t", "tmpfs", "-o", "size=40m", "none"


@pytest.fixture(params=[_ext4, _tmpfs], ids=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 40 MiB."""
    with mounted(tmp_path / "disk", *request.param(tmp_path)) as point:
        yield point


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """An empty ext4 of 40 MiB."""
    with mounted(tmp_path / "disk", *_ext4(tmp_path)) as point:
        yield point


class Filler:
    """A file that takes all the room of a disk but for some blocks."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "filler"

    def leave(self, nbytes: int) -> None:
        """Fill the disk so that this much is free."""
        with self._path.open("ab") as file:
            free = os.fstatvfs(file.fileno())
            size = os.fstat(file.fileno()).st_size + free.f_bavail * free.f_frsize - nbytes
            if size < os.fstat(file.fileno()).st_size:
                os.ftruncate(file.fileno(), size)
            while size > os.fstat(file.fileno()).st_size:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                except OSError:
                    size -= BLOCK  # what the file system itself needs to keep track of it
            os.fsync(file.fileno())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def attempted(place: Path, number: int, *, overwrite: bool) -> StoreError | None:
    """The error of a save, if there was one."""
    try:
        shardstore.save(state(number), place, step=number, overwrite=overwrite, threads=1)
    except StoreError as error:
        return error
    return None


def is_clear(error: StoreError | None, code: int, place: Path) -> bool:
    """Whether an error says what happened and where: by its numbers and in its words."""
    assert error is not None
    words = {errno.ENOSPC: "no space is left", errno.EROFS: "read-only"}[code]
    assert error.errno == code
    assert str(error.filename).startswith(str(place)), error.filename
    return words in str(error) and str(error.filename) in str(error)


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_L01_a_disk_that_is_full_at_every_point(disk: Path, overwrite: bool):
    """With room for 0, 1, 2, ... blocks: an error that names path and cause, until there is room for all of it."""
    beside, place, filler = disk / "beside", disk / "place", Filler(disk)
    shardstore.save(state(OLD), beside, step=OLD)
    if overwrite:
        shardstore.save(state(OLD), place, step=OLD)
    else:
        place.mkdir()
    old, left, failed = named(place), files(place), 0
    marks = {mark_name(index_of(place)["attempt"])} if overwrite else set()
    for blocks in range(MOST):
        filler.leave(blocks * BLOCK)
        error = attempted(place, NEW, overwrite=overwrite)
        if error is None:
            break
        failed += 1
        assert is_clear(error, errno.ENOSPC, place), error
        assert settled(place, OLD if overwrite else None) == (OLD if overwrite else None)
        assert settled(beside, OLD) == OLD
        assert old <= files(place)
        assert temps(place) == []
        assert left <= files(place) <= left | marks, f"{blocks} blocks"
    assert failed >= 4
    assert settled(place, NEW) == NEW
    assert old <= files(place)
    filler.remove()
    recovers(place, NEW, NEXT)
    assert settled(beside, OLD) == OLD


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("threads", [1, 2])
def test_L01_a_disk_that_becomes_full_within_a_shard(disk: Path, overwrite: bool, threads: int):
    """Room for 1 and for 6 of 9 MiB: the part that was written goes again, and what was there before verifies."""
    place, filler = disk / "place", Filler(disk)
    before = BIG if overwrite else None
    if overwrite:
        shardstore.save(state(BIG), place, step=BIG)
    for room in (MIB, 6 * MIB):
        filler.leave(room)
        left = files(place)
        with pytest.raises(StoreError) as caught:
            shardstore.save(state(BIG + 2), place, overwrite=overwrite, threads=threads)
        assert is_clear(caught.value, errno.ENOSPC, place)
        wanted = r"writing 9437\d{3} bytes" if threads == 1 else r"writing \d+ bytes"
        assert re.search(wanted, str(caught.value))
        assert files(place) == left
        assert settled(place, before) == before
        free = os.statvfs(disk)
        assert free.f_bavail * free.f_frsize >= room - 16 * BLOCK
    filler.remove()
    recovers(place, before, BIG + 2)


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_L07_a_disk_that_is_read_only(ext4: Path, overwrite: bool):
    """Nothing can be saved, with a clear error; what is there is loaded and verified all the same."""
    place = ext4 / "place"
    shardstore.save(state(OLD), ext4 / "beside", step=OLD)
    if overwrite:
        shardstore.save(state(OLD), place, step=OLD)
    run("mount", "-o", "remount,ro", ext4)
    with pytest.raises(StoreError) as caught:
        shardstore.save(state(NEW), place, overwrite=overwrite)
    assert is_clear(caught.value, errno.EROFS, place)
    assert settled(ext4 / "beside", OLD) == OLD
    assert settled(place, OLD if overwrite else None) == (OLD if overwrite else None)
    run("mount", "-o", "remount,rw", ext4)
    recovers(place, look(place), NEXT)


class ReadOnlySoon(Wrapper):
    """The disk below becomes read-only before the n-th call."""

    def __init__(self, store: Store, disk: Path, nth: int) -> None:
        super().__init__(store)
        self._disk = disk
        self._nth = nth
        self.calls = 0

    def around(self, call: str, key: str, make: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.calls == self._nth:
            run("mount", "-o", "remount,ro", self._disk)
        return make()


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_L07_a_disk_that_becomes_read_only_at_every_operation(ext4: Path, overwrite: bool):
    """As a kernel does after an error of the device: the state before or the state after, and a clear error."""
    for nth in range(1, MOST):
        place = ext4 / f"n{nth}"
        if overwrite:
            shardstore.save(state(OLD), place, step=OLD)
        before = OLD if overwrite else None
        with injected(lambda store, nth=nth: ReadOnlySoon(store, ext4, nth)) as made:
            error = attempted(place, NEW, overwrite=overwrite)
        assert error is None or is_clear(error, errno.EROFS, place), f"operation {nth}: {error}"
        seen = settled(place, NEW if error is None else before)
        assert temps(place) == []
        run("mount", "-o", "remount,rw", ext4)
        recovers(place, seen, NEXT)
        if made[0].calls < nth:
            break
        shutil.rmtree(place)
