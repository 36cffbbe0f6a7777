"""Local disks and network file systems that are full, slow to fail, read-only, or shared, under the public calls."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardstore
from shardstore.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CommitUnknown,
    Damaged,
    KeyMissing,
    ShardstoreError,
    StoreError,
    Unfinished,
)
from shardstore.events import Noticed, Retried
from shardstore.header import looks_like
from shardstore.storage import LocalStore
from tests.kit.damage import files_of, flip, index_of, meta_of, parts_of, shards_of
from tests.kit.faults import CountingStore, Fault, FaultyStore
from tests.kit.inject import injected
from tests.kit.same import assert_same
from tests.kit.syscalls import Trouble, trouble, watched

OLD = {"model": {"w": torch.arange(1000.0)}, "n": 1}
NEW = {"model": {"w": torch.arange(1000.0) + 1, "v": torch.ones(7)}, "n": 2}
FOREVER = 10**9


def loaded(place: Path) -> Any:
    """The state at a place, None where there is no checkpoint."""
    try:
        return shardstore.load(place)
    except CheckpointNotFound:
        return None


def same(one: Any, two: Any) -> bool:
    """Whether two states are the same."""
    try:
        assert_same(one, two)
    except AssertionError:
        return False
    return True


def at_once(store: Any) -> Any:
    """Leaves the store as it is: only the waits between tries go."""
    return store


# ------------------------------------------------------------------------------------------------ L01, L03: failures


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "from then on"])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "close", "mkdir", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_L01_L03_a_disk_that_fails_at_any_call(shm_path: Path, call: str, code: int, times: int, overwrite: bool):
    """Whichever write, flush, rename, close or creation fails: a typed error with its cause, and nothing half.

    The state before or the new one is loaded, never anything between. Until the index was to be written, nothing stays
    behind, unless cleaning up fails as well; then a mark stays with it. The older checkpoint beside it stays whole.
    """
    shardstore.save(OLD, shm_path / "older")
    older = files_of(shm_path / "older")
    for nth in range(1, 500):
        place = shm_path / f"c{nth}"
        if overwrite:
            shardstore.save(OLD, place)
        before = files_of(place)
        with injected(CountingStore) as stores, trouble(Trouble(call, code, nth=nth, times=times)) as spy:
            error = save_error(NEW, place, overwrite=overwrite, threads=1, listener=lambda event: None)
        now = loaded(place)
        assert same(now, NEW) or (error is not None and same(now, OLD if overwrite else None))
        if now is not None:
            assert shardstore.verify(place).ok
        if error is None and len(spy.seen(call)) < nth:
            break
        if error is not None:
            check_error(error, code)
            committing = any("shardstore.json" in store.keys("put") for store in stores)
            left = set(files_of(place)) - set(before) - {f"attempt-{index_of(place)['attempt']}.json" if before else ""}
            assert set(before.items()) <= set(files_of(place).items()) or same(now, NEW)
            assert not left or committing or (times > 1 and any(name.startswith("attempt-") for name in left))
        assert not list(place.rglob("*.tmp")) or (times > 1 and call in {"open", "fsync"})
    assert nth > 2
    assert files_of(shm_path / "older") == older


def save_error(*args: Any, **options: Any) -> ShardstoreError | None:
    """The error that a save ends with, if any."""
    try:
        shardstore.save(*args, **options)
    except ShardstoreError as error:
        return error
    return None


def check_error(error: ShardstoreError, code: int) -> None:
    """What every error from a failing disk must be."""
    assert isinstance(error, CommitUnknown) or (isinstance(error, StoreError) and isinstance(error, OSError))
    assert isinstance(error, CommitUnknown) or error.errno == code


@pytest.mark.parametrize(("code", "words"), [
    (errno.ENOSPC, "no space is left"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EIO, "I/O error"),
])  # fmt: skip
def test_L01_the_message_names_file_bytes_and_cause(shm_path: Path, code: int, words: str):
    """What was to be written where, how many bytes, and why it failed, in plain words; and the errno of the system."""
    state = {"model": {"w": torch.zeros(20_000)}}
    with injected(at_once), trouble(Trouble("write", code, nth=2, times=FOREVER)), pytest.raises(StoreError) as caught:
        shardstore.save(state, shm_path / "c", threads=1)
    assert words in str(caught.value)
    assert re.search(r"model-00001-of-00001-[0-9a-f]{16}\.safetensors", str(caught.value))
    assert re.search(r"\b80\d{3} bytes", str(caught.value))
    assert caught.value.errno == code
    assert caught.value.filename
    assert files_of(shm_path / "c") == {}


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_L03_an_error_that_only_close_tells_is_not_lost(shm_path: Path, code: int):
    """NFS and quotas report late: where closing any data file fails, the save fails, or writes that file anew (EIO)."""
    for nth in range(1, 5):  # mark, shard, meta, index
        place = shm_path / f"c{nth}"
        with injected(at_once), trouble(Trouble("close", code, nth=nth, target="TEMP")) as spy:
            error = save_error(NEW, place, threads=1, listener=lambda event: None)
        closed = sum("TEMP" in call for call in spy.seen("close"))
        if code == errno.EIO:
            assert error is None
            assert closed > 5
            assert same(loaded(place), NEW)
        else:
            assert error is not None
            check_error(error, code)
            assert closed == nth
            assert loaded(place) is None


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=False, capture_output=True
    ).returncode:  # fmt: skip
        pytest.skip("needs root and mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.mounts
@pytest.mark.parametrize("overwrite", [False, True], ids=["beside", "overwrite"])
@pytest.mark.parametrize("kind", ["one large tensor", "many small ones", "plain values"])
def test_L01_a_really_full_disk(tiny_disk: Path, kind: str, overwrite: bool):
    """On a disk of 1 MiB: the error says that no space is left; the old checkpoint verifies, all of the new is gone."""
    shardstore.save({"model": {"w": torch.ones(50_000)}}, tiny_disk / "c")
    before = files_of(tiny_disk)
    states = {
        "one large tensor": {"model": {"w": torch.ones(500_000)}},
        "many small ones": {"model": {f"w{i}": torch.ones(60_000) for i in range(9)}},
        "plain values": {"model": {"w": torch.ones(10)}, "text": "x" * 1_500_000},
    }
    with pytest.raises(StoreError, match=r"bytes.*no space is left") as caught:
        shardstore.save(states[kind], tiny_disk / ("c" if overwrite else "new"), overwrite=overwrite, shards=4)
    assert caught.value.errno == errno.ENOSPC
    assert files_of(tiny_disk) == before
    assert shardstore.verify(tiny_disk / "c").ok
    shardstore.save({"model": {"w": torch.ones(30_000)}}, tiny_disk / "small")


# ------------------------------------------------------------------------------------------------ L04, L05: order


class Journal:
    """Records what happens to files and folders, by name: `write`, `fsync`, `close`, `rename`, `unlink`."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._open: dict[int, str] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = real(*args, **kwargs)
        with self._lock:
            if name == "open":
                self._open[made] = str(args[0])
            elif name in {"write", "fsync"}:
                self.lines.append((name, self._open.get(args[0], "?")))
            elif name == "close":
                self.lines.append((name, self._open.pop(args[0], "?")))
            elif name == "rename":
                self.lines.append((f"rename {args[0]}", str(args[1])))
            elif name == "unlink":
                self.lines.append((name, str(args[0])))
        return made


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_L04_every_file_is_flushed_before_its_name_and_the_index_comes_last(
    shm_path: Path, threads: int, overwrite: bool
):
    """Write, fsync, close, rename, fsync of the folder: for each shard and the meta, and only then for the index.

    An overwrite removes no file of the old checkpoint before that.
    """
    if overwrite:
        shardstore.save(OLD, shm_path / "c")
    old = set(files_of(shm_path / "c"))
    journal = Journal()
    with watched(journal, lambda: True):
        shardstore.save(NEW, shm_path / "c", shards=3, overwrite=overwrite, threads=threads)
    lines = journal.lines
    names = [Path(entry["path"]).name for entry in index_of(shm_path / "c")["files"]]
    commits = [at for at, (what, to) in enumerate(lines) if what.startswith("rename") and to == "shardstore.json"]
    assert len(commits) == 1
    for name in [*names, "shardstore.json"]:
        (place,) = (at for at, (what, to) in enumerate(lines) if what.startswith("rename") and to == name)
        temp = lines[place][0].split(" ", 1)[1]
        moved = [at for at, (what, to) in enumerate(lines) if what.startswith("rename") and to == temp]
        temps = {temp, *(lines[at][0].split(" ", 1)[1] for at in moved)}
        own = [(at, what) for at, (what, of) in enumerate(lines) if of in temps and at not in moved]
        assert [what for _, what in own][-2:] == ["fsync", "close"]
        assert own[-1][0] < place
        assert any(what == "fsync" for what, _ in lines[place:])
        assert place <= commits[0]
        if name != "shardstore.json":
            assert any(what == "fsync" for what, _ in lines[place : commits[0]])
    gone = {of for at, (what, of) in enumerate(lines) if what == "unlink" and at < commits[0]}
    assert not gone & {Path(name).name for name in old}


@pytest.mark.parametrize("size", [0, 1, 100], ids=["empty", "one byte", "cut"])
@pytest.mark.parametrize("zeros", [False, True], ids=["as it was", "zeros"])
def test_L04_a_file_that_lost_its_content_is_found(tmp_path: Path, size: int, zeros: bool, cli):
    """After a power loss any file may be empty, cut, or of zeros: verify, load and the command say so."""
    shardstore.save(NEW, tmp_path / "c")
    for name in [entry["path"] for entry in index_of(tmp_path / "c")["files"]]:
        file = tmp_path / "c" / name
        data = file.read_bytes()
        file.write_bytes(bytes(len(data) if zeros else size) if zeros else data[:size])
        with pytest.raises(Damaged, match=re.escape(name)) as caught:
            shardstore.load(tmp_path / "c")
        assert caught.value.file == name
        (problem,) = shardstore.verify(tmp_path / "c").checkpoints[0].problems
        assert problem.file == name
        assert problem.kind == ("damaged" if zeros else "size")
        assert zeros or f"has {size} bytes, {len(data)} were saved" in problem.message
        result = cli("verify", tmp_path / "c")
        assert result.exit_code == 3
        assert name in result.output
        file.write_bytes(data)
    assert shardstore.verify(tmp_path / "c").ok


def test_L05_temporary_files_lie_beside_their_targets(shm_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TMPDIR on another mount is not used: all files are made within the checkpoint."""
    elsewhere = shm_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with mock.patch.object(tempfile, "mkstemp", side_effect=AssertionError), trouble() as spy:
        shardstore.save(NEW, shm_path / "c", threads=1)
        shardstore.save(OLD, shm_path / "c", threads=1, overwrite=True)
    assert spy.seen("rename")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_L05_a_rename_that_crosses_mounts_is_an_error_and_no_copy(shm_path: Path, overwrite: bool):
    """EXDEV from any rename ends the save; nothing is copied into place instead, and nothing stays behind."""
    if overwrite:
        shardstore.save(OLD, shm_path / "c")
    before = files_of(shm_path / "c")
    for nth in range(1, 30):
        with injected(CountingStore) as stores, trouble(Trouble("rename", errno.EXDEV, nth=nth, times=FOREVER)) as spy:
            error = save_error(NEW, shm_path / "c", overwrite=overwrite, threads=1, listener=lambda event: None)
        if error is None:
            break
        check_error(error, errno.EXDEV)
        assert same(loaded(shm_path / "c"), OLD if overwrite else None)
        committing = any("shardstore.json" in store.keys("put") for store in stores)
        assert committing or {name for name in files_of(shm_path / "c") if "attempt" not in name} <= set(before)
    assert nth > 3
    assert spy.seen("rename")
    assert same(loaded(shm_path / "c"), NEW)


# ------------------------------------------------------------------------------------------------ L06, L07: rights


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770),
                                                       (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)])  # fmt: skip
def test_L06_files_and_folders_follow_the_umask(tmp_path: Path, umask: int, file: int, folder: int):
    """Colleagues and serving users may read as the umask says: shards, meta, index, derived index, and folders."""
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o2775)
    old = os.umask(umask)
    try:
        shardstore.save(NEW, parent / "c", shards=3)
        shardstore.save(OLD, parent / "c", overwrite=True)
    finally:
        os.umask(old)
    for path in [parent / "c", *(parent / "c").rglob("*")]:
        mode = path.stat().st_mode
        if ".claims" not in path.parts:
            assert stat.S_IMODE(mode) & 0o777 == (folder if path.is_dir() else file), path
        if path.is_dir():
            assert mode & stat.S_ISGID, path  # the group is handed on


_NOBODY = """
import json, os, sys, torch, shardstore
from shardstore.errors import StoreError
root, answers = sys.argv[1], {}
state = {"model": {"w": torch.arange(5.0)}}
shardstore.save(state, "memory://warm")
shardstore.load("memory://warm")
shardstore.verify("memory://warm")
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for call, place, overwrite in (("new", "new", False), ("over", "c", True)):
    try:
        shardstore.save(state, f"{root}/{place}", overwrite=overwrite)
    except StoreError as error:
        answers[call] = [error.errno, str(error)]
answers["read"] = shardstore.load(f"{root}/c")["model"]["w"].tolist()[:3]
answers["ok"] = shardstore.verify(f"{root}/c").ok
print(json.dumps(answers))
"""


def test_L07_a_folder_without_the_right_to_write(shm_path: Path):
    """Not as root: saving fails at the first write with permission denied and the place; reading goes on."""
    shardstore.save(OLD, shm_path / "c")
    before = files_of(shm_path)
    shm_path.chmod(0o555)
    (shm_path / "c").chmod(0o555)
    try:
        made = subprocess.run(
            [sys.executable, "-c", _NOBODY, str(shm_path)], capture_output=True, text=True, check=False, timeout=120
        )
    finally:
        for folder in (shm_path, shm_path / "c"):
            folder.chmod(0o755)
    assert made.returncode == 0, made.stderr
    answers = json.loads(made.stdout)
    for call in ("new", "over"):
        assert answers[call][0] == errno.EACCES
        assert "permission is denied" in answers[call][1]
        assert str(shm_path) in answers[call][1]
    assert answers["read"] == [0, 1, 2]
    assert answers["ok"]
    assert files_of(shm_path) == before


def test_L07_a_read_only_file_system_is_found_before_the_work(shm_path: Path):
    """EROFS comes out before any tensor is written or hashed; reading works there."""
    shardstore.save(OLD, shm_path / "c")

    def read_only(name: str, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in {"mkdir", "rename", "unlink", "write"} or (name == "open" and args[1] & os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(*args, **kwargs)

    seen: list[CountingStore] = []

    def count(store: Any) -> Any:
        seen.append(CountingStore(store))
        return seen[-1]

    with watched(read_only, lambda: True):
        for place, overwrite in ((shm_path / "new", False), (shm_path / "c", True)):
            with injected(count), pytest.raises(StoreError, match="read-only") as caught:
                shardstore.save(NEW, place, overwrite=overwrite)
            assert caught.value.errno == errno.EROFS
            assert not [key for key in seen[-1].keys("put") if key.endswith("safetensors")]
        assert same(shardstore.load(shm_path / "c"), OLD)
        assert same(shardstore.load(shm_path / "c", mode="map"), OLD)
        assert shardstore.verify(shm_path / "c").ok


def test_L07_a_missing_parent_is_no_empty_store(tmp_path: Path):
    """A mount point that is not there is an error that says so, for saving and for loading; it isn't made."""
    with pytest.raises(StoreError, match="mount") as caught:
        shardstore.save(NEW, tmp_path / "mnt" / "run" / "step-1")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(CheckpointNotFound):
        shardstore.load(tmp_path / "mnt" / "run" / "step-1")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ L08, L11: together


def together(count: int, work: Any) -> list[Any]:
    """What `work(0)`, `work(1)`, ... return or raise, begun at the same moment."""
    start = threading.Barrier(count)

    def one(number: int) -> Any:
        start.wait()
        try:
            return work(number)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_L08_folders_that_somebody_else_makes_at_the_same_moment(shm_path: Path):
    """FileExistsError at every mkdir, because another process was faster each time: nobody minds."""

    def raced(name: str, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "mkdir" and "absent" not in str(args[0]):
            with contextlib.suppress(FileExistsError):
                real(*args, **kwargs)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(args[0]))
        return real(*args, **kwargs)

    with watched(raced, lambda: True):
        shardstore.save(NEW, shm_path / "c", shards=3)
    assert same(loaded(shm_path / "c"), NEW)


@pytest.mark.parametrize("turn", range(3))
def test_L08_L11_savers_at_one_place_at_the_same_moment(shm_path: Path, turn: int):
    """Of eight savers at one place one wins, all others get CheckpointExists; the content is wholly the winner's."""
    states = [
        {"model": {"w": torch.full((5000,), float(n)), "v": torch.full((3,), float(n))}, "n": n} for n in range(8)
    ]
    made = together(8, lambda n: shardstore.save(states[n], shm_path / "c", step=n, shards=3))
    won = [n for n, result in enumerate(made) if isinstance(result, shardstore.Saved)]
    assert len(won) == 1
    assert all(isinstance(result, CheckpointExists) for n, result in enumerate(made) if n not in won)
    assert all(isinstance(result, FileExistsError) for n, result in enumerate(made) if n not in won)
    assert same(loaded(shm_path / "c"), states[won[0]])
    attempt = index_of(shm_path / "c")["attempt"]
    assert all(attempt in name or name.endswith("json") for name in files_of(shm_path / "c"))
    assert shardstore.verify(shm_path / "c").ok


def test_L08_savers_at_different_places_under_one_root(shm_path: Path):
    """Eight savers below one folder don't disturb each other."""
    made = together(8, lambda n: shardstore.save({"n": n, "w": torch.full((9,), n)}, shm_path / f"step-{n}", step=n))
    assert [result.step for result in made] == list(range(8))
    assert [shardstore.load(shm_path / f"step-{n}")["n"] for n in range(8)] == list(range(8))
    assert shardstore.verify(shm_path).ok


def test_L11_overwriters_at_the_same_moment(shm_path: Path):
    """Each overwrite replaces exactly the index that it saw: who was overtaken is told; what lies there is whole."""
    shardstore.save(OLD, shm_path / "c")
    states = [{"model": {"w": torch.full((500,), float(n))}, "n": n} for n in range(4)]
    made = together(4, lambda n: shardstore.save(states[n], shm_path / "c", step=n, overwrite=True))
    won = [n for n, result in enumerate(made) if isinstance(result, shardstore.Saved)]
    assert won
    assert all(isinstance(made[n], CheckpointExists | StoreError) for n in range(4) if n not in won)
    assert any(same(loaded(shm_path / "c"), states[n]) for n in won)
    assert shardstore.verify(shm_path / "c").ok


# ------------------------------------------------------------------------------------------------ L10: cleaning up


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EACCES, errno.EIO])
def test_L10_trouble_with_cleaning_never_fails_a_save(shm_path: Path, code: int):
    """Whatever is wrong with removing marks and replaced files: the overwrite is committed, loads, and says so."""
    shardstore.save(OLD, shm_path / "c")
    for nth in range(1, 5):
        events: list[Any] = []
        broken = Fault(nth, errno=code, calls=frozenset({"delete"}), times=FOREVER)
        with injected(lambda store, broken=broken: FaultyStore(store, broken)) as stores:
            saved = shardstore.save({**NEW, "n": nth}, shm_path / "c", overwrite=True, step=nth, listener=events.append)
        assert saved.step == nth
        assert same(loaded(shm_path / "c"), {**NEW, "n": nth})
        assert shardstore.verify(shm_path / "c").checkpoints[0].step == nth
        if any(store.fired for store in stores) and code != errno.ENOENT:
            assert any(isinstance(event, Noticed) for event in events)


def test_L10_a_half_removed_checkpoint_is_not_taken_for_one(tmp_path: Path, cli):
    """Without its index, or with the index gone first, what is left is unfinished or nothing: never listed as whole."""
    shardstore.save(NEW, tmp_path / "c", shards=3)
    (tmp_path / "c" / "shardstore.json").unlink()
    with pytest.raises(Unfinished):
        shardstore.load(tmp_path / "c")
    assert cli("verify", tmp_path / "c").exit_code == 4
    for name in list(files_of(tmp_path / "c")):
        (tmp_path / "c" / name).unlink()
    with pytest.raises(CheckpointNotFound) as caught:
        shardstore.load(tmp_path / "c")
    assert not isinstance(caught.value, Unfinished)


# ------------------------------------------------------------------------------------------------ L13, L14: content


def test_L13_one_wrong_bit_in_data_header_padding_meta_or_index(tmp_path: Path, cli):
    """Right size, wrong bytes: load, verify and the command fail and name the file (all of it: `test_bitflips.py`)."""
    shardstore.save(NEW, tmp_path / "c", shards=1)
    shard = shards_of(tmp_path / "c")[0]
    data = (tmp_path / "c" / shard).read_bytes()
    start = len(data) - len(parts_of(data)[1])
    assert data[start - 1 : start] == b" "
    places = [(shard, len(data) - 1), (shard, 20), (shard, start - 1), (shard, 0), (meta_of(tmp_path / "c"), 30)]
    for name, byte in [*places, ("shardstore.json", 200)]:
        flip(tmp_path / "c" / name, byte)
        target = {"model": {"w": torch.zeros(1000), "v": torch.zeros(7)}}
        for load in (
            lambda: shardstore.load(tmp_path / "c"),
            lambda: shardstore.load(tmp_path / "c", mode="map"),
            lambda target=target: shardstore.load(tmp_path / "c", into=target),
        ):
            with pytest.raises(Damaged, match=re.escape(name)) as caught:
                load()
            assert caught.value.file == name
        if any(tensor.any() for tensor in target["model"].values()):
            assert caught.value.overwritten
        result = cli("verify", tmp_path / "c")
        assert result.exit_code == 3
        assert name in result.output
        flip(tmp_path / "c" / name, byte)
    assert shardstore.verify(tmp_path / "c").ok


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 4976698672\n"
IMPOSTERS = {
    "pointer": (POINTER, "git-lfs pointer"),
    "page": (b"<!DOCTYPE html><html><body>" + b"Sign in to continue. " * 27 + b"</body></html>", "HTML"),
    "xml": (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "XML"),
    "zip": (b"PK\x03\x04" + b"\0" * 500, "torch.save"),
    "pickle": (b"\x80\x02}q\x00." + b"\0" * 50, "pickle"),
    "empty": (b"", ""),
    "short": (b"\x00\x01", ""),
}


@pytest.mark.parametrize("name", [*IMPOSTERS, "first half", "twice", "one byte more"])
def test_L14_a_file_that_is_something_else_is_described(tmp_path: Path, name: str, cli):
    """A pointer, a web page, a zip, half a file in place of any file: expected and found size, and what it is."""
    shardstore.save(NEW, tmp_path / "c")
    for path in [entry["path"] for entry in index_of(tmp_path / "c")["files"]]:
        file = tmp_path / "c" / path
        data = file.read_bytes()
        others = {"first half": data[: len(data) // 2], "twice": data + data, "one byte more": data + b"\0"}
        content, word = IMPOSTERS[name] if name in IMPOSTERS else (others[name], "")
        file.write_bytes(content)
        texts = [
            cli("verify", tmp_path / "c").output,
            shardstore.verify(tmp_path / "c").checkpoints[0].problems[0].message,
        ]
        for options in ({}, {"mode": "map"}):
            with pytest.raises(Damaged) as caught:
                shardstore.load(tmp_path / "c", **options)
            texts.append(str(caught.value))
        for text in texts:
            assert path in text
            assert f"has {len(content)} bytes, {len(data)} were saved" in text
            assert word in text
        file.write_bytes(data)


@pytest.mark.parametrize("name", IMPOSTERS)
def test_L14_an_index_that_is_something_else_is_described(tmp_path: Path, name: str):
    """The same in place of shardstore.json: damaged, and never taken for "no checkpoint here"."""
    shardstore.save(NEW, tmp_path / "c")
    (tmp_path / "c" / "shardstore.json").write_bytes(IMPOSTERS[name][0])
    with pytest.raises(Damaged, match=r"shardstore\.json") as caught:
        shardstore.load(tmp_path / "c")
    assert IMPOSTERS[name][1] in looks_like(IMPOSTERS[name][0])
    assert caught.value.file == "shardstore.json"
    (problem,) = shardstore.verify(tmp_path / "c").checkpoints[0].problems
    assert problem.kind == "index"


# ------------------------------------------------------------------------------------------------ L18: hiccups


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_L18_one_hiccup_of_a_shared_disk_is_survived(shm_path: Path, call: str, code: int):
    """The first call fails, the second is fine: the whole file is written anew under a new temporary name, and told."""
    events: list[Any] = []
    with injected(at_once), trouble(Trouble(call, code, nth=2)) as spy:
        shardstore.save(NEW, shm_path / "c", threads=1, listener=events.append)
    assert len(spy.seen(call)) > 2
    assert same(loaded(shm_path / "c"), NEW)
    assert shardstore.verify(shm_path / "c").ok
    assert any(isinstance(event, Retried) for event in events)


def test_L18_a_file_is_written_anew_and_never_flushed_again(shm_path: Path):
    """After a failed fsync the kernel has forgotten the pages: the data is written again from memory."""
    big = {"model": {"w": torch.arange(3_000_000.0)}}
    writes: list[int] = []

    def count(name: str, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "write":
            writes.append(len(args[1]))
        if name == "fsync" and sum(writes) > 11_000_000 and not failed:
            failed.append(1)
            raise OSError(errno.EIO, "once")
        return real(*args, **kwargs)

    failed: list[int] = []
    with injected(at_once), watched(count, lambda: True):
        shardstore.save(big, shm_path / "c", threads=1)
    assert failed
    assert sum(writes) > 24_000_000
    assert same(loaded(shm_path / "c"), big)


def test_L18_tries_are_bounded_and_the_state_is_unchanged(shm_path: Path):
    """A disk that stays broken ends in a typed error after a few tries; state and old files are as before."""
    shardstore.save(OLD, shm_path / "c")
    before = files_of(shm_path / "c")
    state = {"model": {"w": torch.arange(1000.0)}, "n": 3}
    events: list[Any] = []
    with injected(at_once), trouble(Trouble("fsync", errno.EIO, nth=3, times=FOREVER)), pytest.raises(StoreError):
        shardstore.save(state, shm_path / "c", overwrite=True, threads=1, listener=events.append)
    assert 1 <= sum(isinstance(event, Retried) for event in events) <= 10
    assert_same(state, {"model": {"w": torch.arange(1000.0)}, "n": 3})
    assert set(before.items()) <= set(files_of(shm_path / "c").items())
    assert same(loaded(shm_path / "c"), OLD)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_L18_hiccups_while_reading_are_survived(shm_path: Path, code: int):
    """Each read fails once: the load is right all the same, and so is verify."""
    shardstore.save(NEW, shm_path / "c")
    for call in ("preadv", "open", "fstat", "lstat"):
        for nth in (1, 2, 4):
            with injected(at_once), trouble(Trouble(call, code, nth=nth)):
                assert same(shardstore.load(shm_path / "c", threads=1, listener=lambda event: None), NEW)
                assert shardstore.verify(shm_path / "c", threads=1, listener=lambda event: None).ok


# ------------------------------------------------------------------------------------------------ L19, L21: leftovers


def backdate(place: Path, seconds: float) -> None:
    """Make everything at a place older."""
    for path in place.rglob("*"):
        found = path.stat()
        os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def test_L19_an_overwrite_with_fewer_shards_leaves_nothing_that_counts(tmp_path: Path, cli):
    """Five shards become two: only the index counts; the old files are named as leftovers, and go after their grace."""
    five = {"model": {f"w{i}": torch.full((100,), float(i)) for i in range(5)}}
    two = {"model": {"w0": torch.zeros(100), "x": torch.ones(100)}}
    shardstore.save(five, tmp_path / "c", shards=5)
    old = {entry["path"] for entry in index_of(tmp_path / "c")["files"]}
    shardstore.save(two, tmp_path / "c", shards=2, overwrite=True)
    new = {entry["path"] for entry in index_of(tmp_path / "c")["files"]}
    assert len(new) == 3
    assert same(loaded(tmp_path / "c"), two)
    assert set(json.loads((tmp_path / "c" / "model.safetensors.index.json").read_bytes())["weight_map"]) == {"w0", "x"}
    report = shardstore.verify(tmp_path / "c").checkpoints[0]
    assert report.ok
    assert {key for left in report.leftovers for key in left.keys} >= old
    result = cli("verify", tmp_path / "c")
    assert result.exit_code == 0
    assert "leftover" in result.output
    assert old <= set(files_of(tmp_path / "c"))
    backdate(tmp_path / "c", 120)
    shardstore.save(five, tmp_path / "c", overwrite=True)
    left = set(files_of(tmp_path / "c"))
    assert not old & left
    assert new <= left
    backdate(tmp_path / "c", 120)
    assert cli("prune", "--leftovers", "--yes", tmp_path / "c").exit_code == 0
    assert not new & set(files_of(tmp_path / "c"))
    assert same(loaded(tmp_path / "c"), five)
    assert shardstore.verify(tmp_path / "c").checkpoints[0].leftovers == []


def test_L19_files_of_others_are_named_and_left_alone(tmp_path: Path, cli):
    """What somebody else put there, also by names like ours without a mark, is neither read nor removed, but named."""
    shardstore.save(NEW, tmp_path / "c")
    names = ["pytorch_model.bin", "config.json", "model.safetensors", "state/notes.txt", "model-1-of-2.safetensors",
             f"model-00009-of-00009-{'0' * 16}.safetensors", f"state/meta-{'0' * 16}.json"]  # fmt: skip
    for name in names:
        (tmp_path / "c" / name).write_bytes(b"x")
    backdate(tmp_path / "c", 1e6)
    report = shardstore.verify(tmp_path / "c").checkpoints[0]
    assert report.ok
    named = {*report.foreign, *(key for left in report.leftovers for key in left.keys)}
    assert named >= set(names)
    assert cli("prune", "--leftovers", "--yes", tmp_path / "c").exit_code == 0
    shardstore.save(OLD, tmp_path / "c", overwrite=True)
    assert set(names) <= set(files_of(tmp_path / "c"))
    assert same(loaded(tmp_path / "c"), OLD)


@pytest.mark.parametrize("names", [("ema", "ema2"), ("step-1", "step-10", "step-100"), ("a", "a.b", "a-1", "a b")])
def test_L21_cleaning_goes_by_identity_not_by_prefix(tmp_path: Path, names: tuple[str, ...], cli):
    """Overwriting and pruning one place leaves every other, whose name begins alike, as it is."""
    for number, name in enumerate(names):
        shardstore.save({"model": {"w": torch.tensor([number])}}, tmp_path / name)
        shardstore.save({"model": {"w": torch.tensor([number, 5])}}, tmp_path / name, overwrite=True)
    backdate(tmp_path, 1000)
    for name in names:
        others = [other for other in names if other != name]
        before = {other: files_of(tmp_path / other) for other in others}
        shardstore.save({"model": {"w": torch.tensor([9])}}, tmp_path / name, overwrite=True)
        assert cli("prune", "--leftovers", "--yes", tmp_path / name).exit_code == 0
        assert {other: files_of(tmp_path / other) for other in others} == before
        assert shardstore.load(tmp_path / name)["model"]["w"].tolist() == [9]


@pytest.mark.parametrize("late", [0, 3, 99])
def test_a_file_that_another_machine_sees_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int):
    """On a network file system a file that the index names is looked for again; one that stays away is missing."""
    shardstore.save({"w": torch.ones(9)}, tmp_path / "c")
    monkeypatch.setattr("shardstore.storage.mounts.file_system", lambda _: "nfs4")
    monkeypatch.setattr("shardstore.loading.source._LATE", (0.0,) * 6)
    looks: list[str] = []
    look = LocalStore.stat

    def seen_late(store: LocalStore, key: str) -> Any:
        if key.endswith(".safetensors"):
            looks.append(key)
            if len(looks) <= late:
                raise KeyMissing(f"{key!r} does not exist", filename=key)
        return look(store, key)

    monkeypatch.setattr(LocalStore, "stat", seen_late)
    if late < 7:
        assert torch.equal(shardstore.load(tmp_path / "c")["w"], torch.ones(9))
        assert len(looks) == late + 1
    else:
        with pytest.raises(Damaged, match="is missing"):
            shardstore.load(tmp_path / "c")
