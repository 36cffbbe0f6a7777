"""The local store: what may lie in a folder, listings, open files, maps, clocks, file systems."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardstore.errors import InvalidArgument, KeyMissing, StoreError
from shardstore.storage import Bytes, LocalStore, mounts
from shardstore.storage.handles import CAP, Handles
from tests.kit.contract import REPOSITORY, keys, read
from tests.kit.syscalls import Trouble, trouble


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty folder."""
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.fixture
def store(root: Path) -> LocalStore:
    """A store in that folder."""
    return LocalStore(root)


def reads(store: LocalStore, key: str) -> list:
    """The calls that open a file."""
    return [
        lambda: store.get(key, limit=99),
        lambda: store.read_into(key, 0, [memoryview(bytearray(1))]),
        lambda: store.map(key),
    ]


# -- what is no plain file


def test_what_is_no_plain_file_is_refused(root: Path, store: LocalStore):
    """A link, folder, fifo or socket in the place of a file is refused by the name of its kind, without waiting.

    A listing and `stat` call it `other`.
    """
    (root / "target").write_bytes(b"secret")
    (root / "link").symlink_to("target")
    (root / "dangling").symlink_to("nowhere")
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
    kinds = {"link": "link", "dangling": "link", "folder": "folder", "fifo": "fifo", "socket": "socket"}
    for key, kind in kinds.items():
        for call in reads(store, key):
            with pytest.raises(StoreError, match=rf"/{key}' is a {kind}, where a plain file must be") as caught:
                call()
            assert not isinstance(caught.value, KeyMissing)
        assert store.stat(key).kind == "other"
        assert store.stat(key).nbytes == 0
    assert {e.key: e.kind for e in store.list()} == {
        **dict.fromkeys(["link", "dangling", "fifo", "socket"], "other"),
        "target": "file",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device needs root")
def test_devices_are_refused(root: Path, store: LocalStore):
    """A device is refused, also one that would give endless bytes."""
    os.mknod(root / "zero", 0o020666, os.makedev(1, 5))
    for call in reads(store, "zero"):
        with pytest.raises(StoreError, match="device"):
            call()


def test_links_on_the_way_are_refused(tmp_path: Path, root: Path, store: LocalStore):
    """No link below the root is followed: not for reading, writing, listing or removing."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/k").write_bytes(b"secret")
    (root / "d").symlink_to("../outside")
    (root / "file").write_bytes(b"x")
    for call in [
        *reads(store, "d/k"),
        lambda: store.stat("d/k"),
        lambda: store.put("d/k", Bytes(b"x")),
        lambda: store.put("d/new", Bytes(b"x"), if_absent=True),
        lambda: store.put("d/k", Bytes(b"x"), if_match="0" * 32),
        lambda: store.delete("d/k"),
        lambda: store.list("d/"),
    ]:
        with pytest.raises(StoreError, match="/d' is a link, where a folder must be"):
            call()
    for call in reads(store, "file/k"):
        with pytest.raises(StoreError, match="/file' is a plain file, where a folder must be"):
            call()
    assert (tmp_path / "outside/k").read_bytes() == b"secret"
    assert sorted(os.listdir(tmp_path / "outside")) == ["k"]
    assert keys(store) == ["d", "file"]


def test_a_put_replaces_a_link_and_not_its_target(tmp_path: Path, root: Path, store: LocalStore):
    """What the link showed is not touched; nor by a delete."""
    (tmp_path / "outside").write_bytes(b"secret")
    for _ in range(2):
        (root / "k").symlink_to("../outside")
        store.put("k", Bytes(b"mine"))
        assert read(store, "k") == b"mine"
        (root / "k").unlink()
        (root / "k").symlink_to("../outside")
        store.delete("k")
        assert keys(store) == []
    assert (tmp_path / "outside").read_bytes() == b"secret"


def test_a_put_on_a_folder_fails(root: Path, store: LocalStore):
    """A folder is not replaced by a file, and nothing is left of the attempt."""
    (root / "k").mkdir()
    with pytest.raises(StoreError, match="folder"):
        store.put("k", Bytes(b"x"))
    with pytest.raises(FileExistsError):
        store.put("k", Bytes(b"x"), if_absent=True)
    with pytest.raises(StoreError, match="folder"):
        store.delete("k")
    assert [path.name for path in root.iterdir() if path.name != ".claims"] == ["k"]


# -- roots


def test_K15_roots_with_dots_stay_apart(tmp_path: Path):
    """No part of a user's path is cut at a dot."""
    for name in ("v1.2", "v1.3", "step-1.5.old", "step-1.5"):
        LocalStore(f"{tmp_path}/{name}").put("k", Bytes(name.encode()))
    for name in ("v1.2", "v1.3", "step-1.5.old", "step-1.5"):
        assert (tmp_path / name / "k").read_bytes() == name.encode()


@pytest.mark.parametrize(
    "name", ["run[1]*?", "run #2", "100% sure", "a b", "Ωλ", "-x", "~", "$HOME", "{a,b}", "back\\slash"]
)
def test_K12_roots_are_taken_as_they_are(tmp_path: Path, name: str):
    """No globbing, no expansion, no quoting over what the user gave; also with a slash at the end."""
    store = LocalStore(f"{tmp_path}/{name}/")
    store.put("k", Bytes(b"x"), if_absent=True)
    store.put("d/k", Bytes(b"x"))
    assert os.listdir(tmp_path) == [name]
    assert keys(LocalStore(tmp_path / name)) == ["d/k", "k"]


@pytest.mark.parametrize("bad", ["", "a\0b", b"bytes"])
def test_Z13_roots_that_are_none(bad: str | bytes):
    """An empty path, NUL and bytes are refused when the store is made."""
    with pytest.raises(InvalidArgument):
        LocalStore(bad)  # type: ignore[arg-type]


def test_the_root_may_be_a_link_and_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The root may be reached through links (`link/..` is not undone as text); a later chdir does not move it."""
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    monkeypatch.chdir(tmp_path)
    store, above = LocalStore("link"), LocalStore("link/../run")
    monkeypatch.chdir("/")
    store.put("k", Bytes(b"x"))
    above.put("k", Bytes(b"y"))
    assert (tmp_path / "real/deep/k").read_bytes() == b"x"
    assert (tmp_path / "real/run/k").read_bytes() == b"y"


def test_a_root_that_is_a_file(tmp_path: Path):
    """Every call says so."""
    (tmp_path / "root").write_bytes(b"x")
    store = LocalStore(tmp_path / "root")
    for call in (lambda: store.put("k", Bytes(b"")), lambda: store.get("k", limit=1), store.list):
        with pytest.raises(StoreError, match="not a folder"):
            call()


def test_reserved_keys(store: LocalStore):
    """The names of temporary files and claims can't be put; a name that only looks alike can."""
    for key in (".claims/x", "d/.claims/x", ".k-0123456789abcdef.tmp"):
        with pytest.raises(InvalidArgument, match="reserved"):
            store.put(key, Bytes(b"x"))
    for key in (".claims2", "k.tmp", ".k.tmp", ".k-0123.tmp"):
        store.put(key, Bytes(b"x"))
    assert len(keys(store)) == 4


# -- listing


def test_an_error_within_a_listing_is_an_error(root: Path, store: LocalStore):
    """A listing is whole or an error, never a part."""
    for name in ("a/x", "b/x"):
        store.put(name, Bytes(b"x"))
    with trouble(Trouble("scandir", errno.EIO, nth=3)), pytest.raises(StoreError, match="listing"):
        store.list()
    with trouble(Trouble("open", errno.EACCES, target="b")), pytest.raises(StoreError, match="permission"):
        store.list()


def test_what_vanishes_during_a_listing_is_left_out(root: Path, store: LocalStore):
    """A folder that goes away while others are read is no error."""
    for name in ("a/x", "b/x", "c"):
        store.put(name, Bytes(b"x"))
    with trouble(Trouble("open", errno.ENOENT, target="b")):
        assert keys(store) == ["a/x", "c"]


def test_names_that_are_not_utf8(root: Path, store: LocalStore):
    """A foreign file with a broken name is listed, in a form that can be printed, and can't be opened."""
    with open(os.fsencode(root) + b"/bad\xff", "wb"):
        pass
    assert keys(store) == ["bad\\xff"]
    keys(store)[0].encode()
    with pytest.raises(InvalidArgument):
        store.get("bad\\xff", limit=9)


@pytest.fixture
def deep_tree(root: Path) -> Iterator[None]:
    """More folders in one another than Python's recursion allows."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(1010):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    yield
    subprocess.run(["rm", "-rf", root / "d"], check=True)  # Python's own rmtree is recursive


@pytest.mark.usefixtures("deep_tree")
def test_a_very_deep_tree(store: LocalStore):
    """How deep a foreign tree is, does not matter: no RecursionError, no heap of open folders."""
    with trouble() as spy:
        assert keys(store) == []
    assert len(spy.seen("scandir")) == 513  # where keys end


def test_stale_temps(root: Path, store: LocalStore):
    """What dead writers left is hidden from listings, found by its age, and may be deleted by key."""
    names = [".k-0123456789abcdef.tmp", "d/.k-0123456789abcdef.tmp", ".claims/k/.absent.0-0123456789abcdef.tmp"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"half")
        os.utime(root / name, (store.now() - 3600,) * 2)
    (root / "d/.k-aaaaaaaaaaaaaaaa.tmp").write_bytes(b"at work")
    assert keys(store) == []
    assert store.stale_temps() == []
    assert [e.key for e in store.stale_temps(older_than=1800)] == sorted(names)
    for entry in store.stale_temps(older_than=1800):
        store.delete(entry.key)
    assert [e.key for e in store.stale_temps(older_than=0)] == ["d/.k-aaaaaaaaaaaaaaaa.tmp"]


def test_remove_claims(root: Path, store: LocalStore):
    """The empty folders of old claims go when a root is given up; young ones stay."""
    store.put("a/k", Bytes(b"x"), if_absent=True)
    store.put("k", Bytes(b"x"), if_absent=True)
    store.remove_claims()
    assert sorted(os.listdir(root / ".claims")) == ["a%2Fk", "k"]
    store.remove_claims(older_than=0)
    assert sorted(os.listdir(root)) == ["a", "k"]
    store.remove_claims(older_than=0)
    LocalStore(root / "nothing").remove_claims()


def test_long_keys_have_claims_too(store: LocalStore):
    """A key that is too long for one file name is claimed by its hash."""
    for key in ("/".join(["x" * 100] * 9), "y" * 255, "%" * 100):
        store.put(key, Bytes(b"x"), if_absent=True)
        with pytest.raises(FileExistsError):
            store.put(key, Bytes(b"x"), if_absent=True)


# -- open files


def test_files_stay_open_for_reading_and_are_given_back(root: Path, store: LocalStore):
    """A file that is read in many parts is opened once; over the cap, for each read; `close` closes."""
    before = len(os.listdir("/proc/self/fd"))
    names = [f"k{n}" for n in range(CAP + 10)]
    for name in names:
        (root / name).write_bytes(name.encode())
    with trouble() as spy:
        for _ in range(2):
            for name in names:
                buffer = bytearray(len(name))
                store.read_into(name, 0, [memoryview(buffer)])
                assert buffer == name.encode()
    assert [spy.seen("open").count(f"open {name}") for name in names] == [1] * CAP + [2] * 10
    assert len(os.listdir("/proc/self/fd")) == before + CAP
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_is_never_closed_under_a_reader(root: Path):
    """A dropped descriptor lives until its last reader has finished; the next reader opens the file anew."""
    (root / "k").write_bytes(b"x")
    opened: list[int] = []

    def opener(key: str) -> int:
        opened.append(os.open(root / key, os.O_RDONLY))
        return opened[-1]

    handles = Handles(opener)
    with handles.borrow("k") as first, handles.borrow("k") as same:
        assert first == same
        handles.drop("k")
        assert os.pread(first, 1, 0) == b"x"
        with handles.borrow("k") as second:
            assert second != first
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(first)
    handles.drop()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(second)
    assert len(opened) == 2


def test_a_file_opened_before_a_drop_is_not_kept(root: Path):
    """An open that began before the key was replaced may show the old file, and is used once only."""
    (root / "k").write_bytes(b"old")
    handles: Handles

    def opener(key: str) -> int:
        fd = os.open(root / key, os.O_RDONLY)
        handles.drop(key)
        return fd

    handles = Handles(opener)
    with handles.borrow("k") as fd:
        pass
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_reads_while_the_file_is_replaced(root: Path, store: LocalStore):
    """Readers on threads, while the same store puts the key over and over, see whole contents and no closed files."""
    size = 10_000
    store.put("k", Bytes(b"a" * size))
    done = threading.Event()
    seen: list[object] = []

    def reader() -> None:
        buffer = bytearray(size)
        try:
            while not done.is_set():
                store.read_into("k", 0, [memoryview(buffer)])
                seen.append(len(set(buffer)))
        except Exception as error:  # noqa: BLE001 the test looks at it
            seen.append(error)

    readers = [threading.Thread(target=reader) for _ in range(2)]
    for each in readers:
        each.start()
    for turn in range(40):
        store.put("k", Bytes(bytes([turn]) * size))
    done.set()
    for each in readers:
        each.join()
    assert set(seen) == {1}


def test_get_is_never_from_an_open_file(root: Path, store: LocalStore):
    """`get` shows what another process has put since."""
    store.put("k", Bytes(b"old"))
    store.read_into("k", 0, [memoryview(bytearray(3))])
    (root / "new").write_bytes(b"new")
    (root / "new").rename(root / "k")
    assert read(store, "k") == b"new"


def test_a_file_that_shrinks_is_an_error(root: Path, store: LocalStore):
    """A file that was cut while it was open gives an error that names it, and is opened anew afterwards."""
    store.put("k", Bytes(b"x" * 100))
    store.read_into("k", 90, [memoryview(bytearray(10))])
    os.truncate(root / "k", 50)
    with pytest.raises(StoreError, match=r"k' ends at byte 50, but 60 bytes from 30 on"):
        store.read_into("k", 30, [memoryview(bytearray(10)), memoryview(bytearray(50))])


# -- clock and file systems


def test_now_is_the_clock_of_the_file_system(root: Path, store: LocalStore):
    """It follows the files, not this machine, and leaves nothing; without a root it is this machine's."""
    assert abs(store.now() - time.time()) < 60
    assert os.listdir(root) == []
    assert abs(LocalStore(root / "none").now() - time.time()) < 60
    with trouble(Trouble("open", errno.EROFS, target="TEMP")):
        assert abs(store.now() - time.time()) < 60


_TABLE = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /mnt/nfs rw shared:2 master:3 - nfs4 server:/export rw,vers=4.2
31 22 0:26 / /mnt/with\040blank rw - fuse.weed weed rw
32 30 0:27 / /mnt/nfs/scratch rw - tmpfs tmpfs rw
33 22 0:28 / /mnt/twice rw - ext4 /dev/vdb rw
34 33 0:29 / /mnt/twice rw - lustre mgs:/fs rw
35 22 0:30 / /mnt/nf rw - xfs /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/run/step", "nfs4"),
        ("/mnt/nfs2", "ext4"),
        ("/mnt/nfs/scratch/x", "tmpfs"),
        ("/mnt/with blank/x", "fuse.weed"),
        ("/mnt/twice/x", "lustre"),
        ("/mnt/nf", "xfs"),
    ],
)
def test_the_kind_of_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str):
    """The innermost and latest mount above a path counts."""
    (tmp_path / "table").write_text(_TABLE.lstrip())
    monkeypatch.setattr(mounts, "_TABLE", str(tmp_path / "table"))
    assert mounts.file_system(path) == kind


def test_no_table_of_mounts(monkeypatch: pytest.MonkeyPatch):
    """Where the system does not say, maps are refused, with that reason."""
    monkeypatch.setattr(mounts, "_TABLE", "/nonexistent/table")
    can = mounts.capabilities(mounts.file_system("/x"))
    assert (can.durable, can.mappable) == (True, False)
    assert "does not say" in can.why


@pytest.mark.parametrize(
    ("kind", "durable", "mappable"),
    [("ext4", True, True), ("xfs", True, True), ("overlay", True, True), ("tmpfs", False, True)]
    + [
        (kind, True, False)
        for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "virtiofs", "gpfs", "afs")
    ]
    + [(kind, False, False) for kind in ("fuse", "fuse.weed", "fuse.s3fs", "fuseblk")],
)
def test_what_file_systems_promise(kind: str, durable: bool, mappable: bool):
    """Maps are refused on network file systems, durability is not promised on FUSE and in memory, with reasons."""
    can = mounts.capabilities(kind)
    assert (can.exclusive, can.durable, can.mappable) == (True, durable, mappable)
    assert (kind in can.why) == (not (durable and mappable))


def test_a_map_on_a_network_file_system_is_refused(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    """With the reason, before the file is opened; reads go on."""
    monkeypatch.setattr(mounts, "file_system", lambda _: "nfs4")
    store.put("k", Bytes(b"x"))
    with pytest.raises(StoreError, match=r"nfs4.*SIGBUS"):
        store.map("k")
    assert read(store, "k") == b"x"


def test_without_asserts(tmp_path: Path):
    """Nothing of the store's work hangs on `assert`: the same under `python -O`."""
    script = """
import sys
from shardstore.errors import CheckpointExists, InvalidArgument
from shardstore.storage import Bytes, open_store
store = open_store(sys.argv[1])
store.put("k", Bytes(b"one"), if_absent=True)
for call, wanted in [
    (lambda: store.put("k", Bytes(b"two"), if_absent=True), CheckpointExists),
    (lambda: store.put("../k", Bytes(b"two")), InvalidArgument),
    (lambda: store.read_into("k", -1, []), InvalidArgument),
]:
    try:
        call()
    except wanted:
        continue
    sys.exit("no error")
sys.exit(0 if store.get("k", limit=3).data == b"one" else "other content")
"""
    done = subprocess.run([sys.executable, "-O", "-c", script, tmp_path / "root"], cwd=REPOSITORY, check=False)
    assert done.returncode == 0


def test_what_may_blink_on_fuse_is_looked_for_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A file is seen that shows at the second look only.

    For one whose folder is missing, as it is for each new checkpoint, nobody waits.
    """
    monkeypatch.setattr(mounts, "file_system", lambda _: "fuse.weed")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if (root / "a").is_dir():
            (root / "a/k").write_bytes(b"xyz")

    store = LocalStore(root, sleep=sleep)
    with pytest.raises(KeyMissing):
        store.stat("a/k")
    assert waits == []
    (root / "a").mkdir(parents=True)
    assert store.stat("a/k").nbytes == 3
    assert len(waits) == 1
