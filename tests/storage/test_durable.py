"""The durable write of the local store: its order of system calls, and what happens when one of them fails."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardstore.errors import KeyMissing, StoreError, StoreUnavailable
from shardstore.storage import Bytes, LocalStore, RetryingStore
from tests.kit.contract import Pieces, keys, read
from tests.kit.syscalls import Trouble, short, trouble, watched

MIB = 1 << 20
CONDITIONS = pytest.mark.parametrize("conditional", [False, True], ids=["plain", "conditional"])


def put(store: LocalStore, key: str, body: Pieces | Bytes, conditional: bool) -> None:
    """Replace an existing file, with or without a condition."""
    store.put(key, body, if_match=store.get(key, limit=MIB).version if conditional else None)


def on_disk(root: Path) -> list[str]:
    """Every file below a folder, hidden ones and all, but not the empty folders of claims."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with one file, `k`, that holds "old"."""
    made = LocalStore(tmp_path / "root", claim_wait=0.0)
    made.put("k", Bytes(b"old"))
    return made


# -- order


def test_L04_order_of_a_put(tmp_path: Path):
    """A name that survives a power loss has its bytes.

    Folders are made and flushed into their parents; the file is flushed and closed before it gets its name; its folder
    is flushed afterwards.
    """
    store = LocalStore(tmp_path / "root")
    with trouble() as spy:
        store.put("d/k", Pieces(b"one", b"two"))
    assert spy.seen("mkdir", "fsync", "write", "close", "rename", "unlink") == [
        "mkdir root",
        f"fsync {tmp_path.name}",
        f"close {tmp_path.name}",
        "mkdir d",
        "fsync root",
        "close root",
        "write TEMP",
        "write TEMP",
        "fsync TEMP",
        "close TEMP",
        "rename TEMP",
        "fsync d",
        "close d",
    ]


def test_L04_order_of_a_conditional_put(store: LocalStore):
    """The same for the index: flushed, claimed, looked at, put into place, and the folder flushed."""
    assert store.capabilities.exclusive  # after this, the kind of file system is known
    with trouble() as spy:
        store.put("index", Bytes(b"x"), if_absent=True)
    assert spy.seen("mkdir", "fsync", "write", "rename", "unlink", "lstat") == [
        "lstat index",
        "mkdir .claims",
        "mkdir index",
        "write TEMP",
        "fsync TEMP",
        "rename TEMP",
        "mkdir absent.0",
        "lstat index",
        "rename TEMP",
        "fsync root",
    ]


def test_L04_a_folder_is_flushed_again_if_that_failed(store: LocalStore):
    """A folder that exists only because an earlier put made it, and failed to flush it, is flushed by the next."""
    with trouble(Trouble("fsync", errno.EIO, target="root")), pytest.raises(StoreUnavailable):
        store.put("d/k", Bytes(b"x"))
    with trouble() as spy:
        store.put("d/k", Bytes(b"x"))
        store.put("d/l", Bytes(b"x"))
    assert spy.seen("fsync") == ["fsync root", "fsync TEMP", "fsync d", "fsync TEMP", "fsync d"]


def test_delete_is_flushed(store: LocalStore):
    """A removed name stays removed after a power loss."""
    with trouble() as spy:
        store.delete("k")
    assert spy.seen("unlink", "fsync") == ["unlink k", "fsync root"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_without_fsync_of_folders(store: LocalStore, code: int):
    """Where a folder can't be flushed at all, that is no error; for a file it is."""
    with trouble(Trouble("fsync", code, target="root")):
        store.put("k", Bytes(b"new"))
    assert read(store, "k") == b"new"
    with trouble(Trouble("fsync", code, target="TEMP")), pytest.raises(StoreError):
        store.put("k", Bytes(b"newer"))
    assert read(store, "k") == b"new"


# -- failures


@CONDITIONS
@pytest.mark.parametrize(
    "what",
    [Trouble("write", errno.ENOSPC, nth=n) for n in (1, 3)]
    + [
        Trouble("write", errno.EDQUOT),
        Trouble("fsync", errno.ENOSPC, target="TEMP"),
        Trouble("close", errno.EDQUOT, target="TEMP"),
        Trouble("close", errno.EIO, target="TEMP"),
        Trouble("fsync", errno.EIO, target="TEMP"),
        Trouble("open", errno.ENOSPC, target="TEMP"),
        Trouble("open", errno.EROFS, target="TEMP"),
    ],
    ids=lambda t: f"{t.name}-{errno.errorcode[t.errno]}-{t.nth}",
)
def test_L01_L03_a_write_fails(store: LocalStore, tmp_path: Path, what: Trouble, conditional: bool):
    """A full disk, or an error that shows at fsync or only at close, is a typed error with path, bytes and reason.

    The old content is whole, and no temporary file is left.
    """
    with trouble(what) as spy, pytest.raises(StoreError) as caught:
        put(store, "k", Pieces(*[b"x" * 1000] * 3), conditional)
    assert caught.value.errno == what.errno
    assert caught.value.filename == str(tmp_path / "root/k")
    assert "3000 bytes" in str(caught.value)
    assert str(tmp_path / "root/k") in str(caught.value)
    assert isinstance(caught.value, StoreUnavailable) == (what.errno == errno.EIO)
    assert read(store, "k") == b"old"
    assert on_disk(tmp_path / "root") == ["k"]
    assert len(spy.seen("fsync")) <= 1  # a failed fsync is not retried


@CONDITIONS
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EXDEV, errno.EACCES, errno.ENOENT])
def test_L01_L05_the_rename_fails(store: LocalStore, tmp_path: Path, code: int, conditional: bool):
    """A rename that fails, even between file systems, is an error, and never replaced by a copy."""
    nth = 2 if conditional else 1  # the first one takes the name of the claim
    with trouble(Trouble("rename", code, nth=nth)) as spy, pytest.raises(StoreError) as caught:
        put(store, "k", Bytes(b"new"), conditional)
    assert isinstance(caught.value, StoreUnavailable) == (code in {errno.EIO, errno.ENOENT})
    assert not isinstance(caught.value, KeyMissing)
    assert spy.seen("write") == ["write TEMP"]
    assert read(store, "k") == b"old"
    assert on_disk(tmp_path / "root") == ["k"]


def test_L05_the_temporary_file_lies_next_to_the_target(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever TMPDIR says, the temporary file is made in the target's folder, hidden, and with a random name."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    seen: list[list[str]] = []

    class Looking(Bytes):
        def __iter__(self) -> Iterator[memoryview]:
            seen.append(on_disk(tmp_path / "root"))
            return super().__iter__()

    for _ in range(2):
        store.put("d/" + "n" * 255, Looking(b"x"))
    first, second = (set(names) for names in seen)
    temps = [next(name for name in names if name.endswith(".tmp")) for names in (first, second)]
    assert all(name.startswith("d/.nnn") for name in temps)
    assert temps[0] != temps[1]


@CONDITIONS
def test_an_answer_is_lost(store: LocalStore, conditional: bool):
    """After a rename that took place, with an error for an answer, a conditional put looks, and knows that it won.

    A plain one says that it may be made again.
    """
    nth = 2 if conditional else 1
    with trouble(Trouble("rename", errno.EIO, nth=nth, when="after")):
        if conditional:
            put(store, "k", Bytes(b"new"), conditional)
        else:
            with pytest.raises(StoreUnavailable):
                put(store, "k", Bytes(b"new"), conditional)
    assert read(store, "k") == b"new"
    assert keys(store) == ["k"]


@CONDITIONS
def test_the_last_flush_fails(store: LocalStore, conditional: bool):
    """If the folder can't be flushed, the put does not say that it is durable."""
    with trouble(Trouble("fsync", errno.EIO, target="root")), pytest.raises(StoreError, match="root") as caught:
        put(store, "k", Bytes(b"new"), conditional)
    assert isinstance(caught.value, StoreUnavailable) == (not conditional)  # a plain put may be made again
    assert read(store, "k") == b"new"


@pytest.mark.parametrize("what", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["write", "fsync", "close", "open"])
def test_L18_a_hiccup_is_survived(store: LocalStore, tmp_path: Path, call: str, what: int):
    """After one EIO or ESTALE the whole file is written anew from the same body into a new temporary file."""
    body = Pieces(b"a" * 1000, b"b" * 1000)
    again = RetryingStore(store, wait_s=0, listener=lambda _: None)
    with trouble(Trouble(call, what, target="TEMP")) as spy:
        again.put("k", body)
    assert read(store, "k") == b"a" * 1000 + b"b" * 1000
    assert spy.seen("open").count("open TEMP") == 2
    assert body.iterations == (1 if call == "open" else 2)
    assert on_disk(tmp_path / "root") == ["k"]


def test_L18_a_lasting_failure_ends_it(store: LocalStore, tmp_path: Path):
    """The tries are bounded; then the error comes out, and the state is as before."""
    body = Pieces(b"new")
    with (
        trouble(Trouble("fsync", errno.EIO, target="TEMP", times=99)),
        pytest.raises(StoreUnavailable, match="I/O error"),
    ):
        RetryingStore(store, attempts=4, wait_s=0, listener=lambda _: None).put("k", body)
    assert body.iterations == 4
    assert read(store, "k") == b"old"
    assert on_disk(tmp_path / "root") == ["k"]


def test_L18_a_stale_handle_is_opened_anew(store: LocalStore):
    """A read that fails with ESTALE does not use its descriptor again."""
    buffer = bytearray(3)
    again = RetryingStore(store, wait_s=0, listener=lambda _: None)
    with trouble(Trouble("preadv", errno.ESTALE)) as spy:
        again.read_into("k", 0, [memoryview(buffer)])
    assert buffer == b"old"
    assert spy.seen("open").count("open k") == 2


# -- amounts


@CONDITIONS
@pytest.mark.parametrize("limit", [1, 1000, 65_536])
def test_T13_short_writes_and_reads(store: LocalStore, limit: int, conditional: bool):
    """A system call may move less than was asked for (on Linux always above 2 GiB): the rest follows."""
    size = MIB if limit > 1 else 3000
    data = bytes(i % 251 for i in range(size))
    with watched(short(limit)):
        put(store, "k", Pieces(data[:7], data[7:]), conditional)
        assert read(store, "k") == data
        buffers = [memoryview(bytearray(n)) for n in (5, size // 3, 0, size // 2)]
        store.read_into("k", 3, buffers)
    assert b"".join(buffers) == data[3 : 8 + size // 3 + size // 2]
    assert read(store, "k") == data


def test_T13_a_write_of_nothing_ends(store: LocalStore):
    """A system that takes no byte, and gives no error, is an error, not an endless loop."""
    with watched(short(0)), pytest.raises(StoreError, match="no byte"):
        store.put("k", Bytes(b"new"))
    assert read(store, "k") == b"old"


# -- modes


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_L06_modes_follow_the_umask(tmp_path: Path, umask: int, file_mode: int, folder_mode: int):
    """Files are not 0600 as those of `tempfile`: colleagues read what the umask lets them; folders keep their group."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o2775)
    before = os.umask(umask)
    try:
        store = LocalStore(tmp_path / "group/root")
        store.put("d/k", Bytes(b"x"))
        store.put("index", Bytes(b"x"), if_absent=True)
    finally:
        os.umask(before)
    root = tmp_path / "group/root"
    assert {(root / name).stat().st_mode & 0o777 for name in ("d/k", "index")} == {file_mode}
    assert {(root / name).stat().st_mode & 0o777 for name in (".", "d")} == {folder_mode}
    assert (root / "d").stat().st_mode & 0o2000


# -- roots


def test_an_unmounted_mount_point(tmp_path: Path):
    """Only the last part of a root is made: where its parent is missing, that is said, and nothing is made."""
    store = LocalStore(tmp_path / "mnt/disk/run")
    for conditional in (False, True):
        with pytest.raises(StoreError, match="unmounted") as caught:
            store.put("k", Bytes(b"x"), if_absent=conditional)
        assert not isinstance(caught.value, KeyMissing)
        assert str(tmp_path / "mnt/disk") in str(caught.value)
    assert keys(store) == []
    assert not (tmp_path / "mnt").exists()


def test_L08_somebody_else_makes_the_folders(tmp_path: Path):
    """A folder that appears just before it is made is as good as made."""

    def faster(name: str, real: object, args: tuple, kwargs: dict) -> object:
        if name == "mkdir":
            real(*args, **kwargs)
        return real(*args, **kwargs)

    store = LocalStore(tmp_path / "root")
    with watched(faster):
        store.put("a/b/k", Bytes(b"x"))
        with pytest.raises(StoreUnavailable, match="faster"):  # of a claim, being faster means winning
            LocalStore(tmp_path / "root", claim_wait=0.0).put("index", Bytes(b"x"), if_absent=True)
    assert keys(store) == ["a/b/k"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_L07_a_root_that_can_not_be_written(tmp_path: Path, code: int):
    """The first put says so, with the path and the reason; reading still works."""
    store = LocalStore(tmp_path / "root")
    with trouble(Trouble("mkdir", code)), pytest.raises(StoreError, match="root") as caught:
        store.put("k", Bytes(b"x"))
    assert caught.value.errno == code
    store.put("k", Bytes(b"x"))
    with trouble(Trouble("open", code, target="TEMP", times=99)):
        for conditional in (False, True):
            with pytest.raises(StoreError, match=r"read-only|permission") as caught:
                put(store, "k", Bytes(b"y"), conditional)
            assert type(caught.value) is StoreError
        assert read(store, "k") == b"x"
        assert store.now() > 0
        assert keys(store) == ["k"]


# -- real mounts


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    point = tmp_path / "disk"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tiny", point], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.decode()}")
    yield point
    subprocess.run(["umount", "--lazy", point], check=True)


@pytest.mark.mounts
@CONDITIONS
def test_L01_a_really_full_disk(tiny_disk: Path, conditional: bool):
    """2 MiB do not go onto 1 MiB: a clear error, the older file whole, the space of the attempt given back."""
    store = LocalStore(tiny_disk / "root")
    store.put("k", Bytes(b"old" * 1000))
    with pytest.raises(StoreError, match=r"2097152 bytes.*no space is left") as caught:
        put(store, "k", Pieces(*[b"x" * 65_536] * 32), conditional)
    assert caught.value.errno == errno.ENOSPC
    assert type(caught.value) is StoreError
    assert read(store, "k") == b"old" * 1000
    assert on_disk(tiny_disk) == ["root/k"]
    put(store, "k", Bytes(b"x" * 700_000), conditional)


@pytest.mark.mounts
def test_L07_a_really_read_only_disk(tiny_disk: Path):
    """A disk that was mounted read-only: reading goes on, writing says why it can't."""
    store = LocalStore(tiny_disk / "root")
    store.put("k", Bytes(b"old"))
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(StoreError, match="read-only") as caught:
        store.put("k", Bytes(b"new"))
    assert caught.value.errno == errno.EROFS
    with pytest.raises(StoreError, match="read-only"):
        LocalStore(tiny_disk / "other").put("k", Bytes(b"new"))
    assert read(store, "k") == b"old"
    assert store.now() > 0
    store.close()
