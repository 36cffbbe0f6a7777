"""The conditional put of the local store: at most one wins, whoever dies or stalls wherever."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardstore.errors import CheckpointExists, KeyMissing, StoreError, StoreUnavailable
from shardstore.storage import Bytes, LocalStore, mounts
from tests.kit.contract import REPOSITORY, keys, read
from tests.kit.syscalls import PATIENCE_S, Interleaving, Trouble, stop_at, trouble, watched

KEY = "d/index.json"
STATES = pytest.mark.parametrize("old", [None, b"old"], ids=["absent", "match"])


def prepared(root: Path, old: bytes | None) -> str | None:
    """A root where the key holds `old`, or nothing; returns the version."""
    store = LocalStore(root)
    store.put("other", Bytes(b"x"))
    if old is None:
        return None
    store.put(KEY, Bytes(old))
    return store.get(KEY, limit=99).version


def put(store: LocalStore, data: bytes, version: str | None) -> None:
    """Put from the prepared state."""
    store.put(KEY, Bytes(data[:2], data[2:]), if_absent=version is None, if_match=version)


def impatient(root: Path, age: float = 0.0) -> LocalStore:
    """A store that waits for nobody, and takes every claim of others for one of the dead."""
    return LocalStore(root, claim_age=age, claim_wait=0.0)


def present(root: Path) -> bytes | None:
    """What the key holds."""
    path = root / KEY
    return path.read_bytes() if path.exists() else None


def hold(root: Path, number: int = 0, state: str = "absent") -> Path:
    """The claim of somebody who has died with it; returns its folder."""
    claim = root / ".claims/d%2Findex.json" / f"{state}.{number}"
    claim.mkdir(parents=True)
    (claim.parent / f".{state}.{number}-{'0' * 16}.tmp").write_bytes(b"of the dead")
    return claim


# -- processes that are killed

_KILLED = """
import json, os, signal, sys
from pathlib import Path
from shardstore.errors import CheckpointExists, StoreUnavailable
from shardstore.storage import Bytes, LocalStore
from tests.kit.syscalls import stop_at, watched
from tests.storage.test_claims import impatient, prepared, present, put

base, old = Path(sys.argv[1]), sys.argv[2].encode() or None

def outcome(store, data, version):
    try:
        put(store, data, version)
        return "won"
    except CheckpointExists:
        return "lost"
    except StoreUnavailable as error:
        return str(error)

number, finished = 0, False
while not finished:
    number += 1
    root = base / str(number)
    version = prepared(root, old)
    child = os.fork()
    if not child:
        with watched(stop_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))):
            put(LocalStore(root), b"child", version)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    finished = os.WIFEXITED(status)
    seen = present(root)
    waiting = outcome(impatient(root, age=10.0), b"polite", version)
    breaking = outcome(impatient(root), b"rude", version)
    print(json.dumps([number, finished, *(x and x.decode() for x in (seen, present(root))), waiting, breaking]))
"""


@pytest.mark.torture
@STATES
def test_L11_killed_between_any_two_steps(tmp_path: Path, old: bytes | None):
    """SIGKILL before the n-th system call of a conditional put, for every n: the state is whole, and the next one wins.

    The next one wins at once or, where the dead one held the claim, is told which that is, and wins when it is old.
    """
    command = [sys.executable, "-c", _KILLED, tmp_path, (old or b"").decode()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    before = old and old.decode()
    assert len(rows) > 30
    assert [row[1] for row in rows] == [False] * (len(rows) - 1) + [True]
    held = 0
    for number, _, seen, after, waiting, breaking in rows:
        assert seen in {before, "child"}, number
        if seen == "child":
            assert (waiting, breaking, after) == ("lost", "lost", "child"), number
        elif waiting == "won":
            assert (breaking, after) == ("lost", "polite"), number
        else:
            held += 1
            assert ".claims/d%2Findex.json/" in waiting, number
            assert "try again in 10 s" in waiting, number
            assert (breaking, after) == ("won", "rude"), number
        store = LocalStore(tmp_path / str(number))
        assert keys(store) == [KEY, "other"]
        for entry in store.stale_temps(older_than=0):
            store.delete(entry.key)
        assert store.stale_temps(older_than=0) == []
    assert held > 0
    assert [row[2] for row in rows].count("child") > 1


# -- zombies


@STATES
def test_L11_a_zombie_stalled_between_any_two_steps(tmp_path: Path, old: bytes | None):
    """A writer that stalls before its n-th system call, is taken for dead, and goes on: one of the two wins."""
    number, stalled = 0, True
    outcomes = set()
    while stalled:
        number += 1
        root = tmp_path / str(number)
        version = prepared(root, old)
        stalled, zombie, rival = _zombie(root, version, number)
        assert (zombie is None) != (rival is None), number
        assert isinstance(zombie or rival, CheckpointExists), number
        assert present(root) == (b"zombie" if zombie is None else b"rival"), number
        assert LocalStore(root).stale_temps(older_than=0) == [], number
        outcomes.add(zombie is None)
    assert number > 30
    assert outcomes == {True, False}


def _zombie(root: Path, version: str | None, number: int) -> tuple[bool, object, object]:
    """Whether the zombie was stopped; then what came of it and of its rival: None for success, else an error."""
    reached, go_on, finished = threading.Event(), threading.Event(), threading.Event()
    results: list[object] = []

    def stop() -> None:
        reached.set()
        go_on.wait(PATIENCE_S)

    def work() -> None:
        with watched(stop_at(number, stop)):
            results.append(_outcome(lambda: put(LocalStore(root), b"zombie", version)))
        finished.set()
        reached.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(PATIENCE_S)
    stalled = not finished.is_set()
    rival = _outcome(lambda: put(impatient(root), b"rival", version))
    go_on.set()
    thread.join(PATIENCE_S)
    return stalled, results[0], rival


def _outcome(call: Callable[[], None]) -> object:
    try:
        call()
    except Exception as error:  # noqa: BLE001 the test looks at it
        return error
    return None


@pytest.mark.torture
@STATES
@pytest.mark.parametrize("part", range(4))
def test_L11_any_order_of_steps(tmp_path: Path, old: bytes | None, part: int):
    """Three writers who break each other's claims at once, their system calls mixed in orders that seeds decide.

    Never two winners; what is there is the winner's, or what was there before.
    """
    winners = 0
    for seed in range(part * 40, part * 40 + 40):
        root = tmp_path / str(seed)
        version = prepared(root, old)

        def writer(data: bytes, root: Path = root, version: str | None = version) -> Callable[[], None]:
            return lambda: put(LocalStore(root, claim_age=0.0, claim_wait=0.1, sleep=lambda _: None), data, version)

        data = [b"writer%d" % n for n in range(3)]
        results = Interleaving(seed).run(*map(writer, data))
        won = [one for one, result in zip(data, results, strict=True) if result is None]
        errors = [result for result in results if result is not None]
        assert all(isinstance(e, CheckpointExists | StoreUnavailable) for e in errors), (seed, results)
        assert len(won) <= 1, (seed, results)
        assert present(root) == (won[0] if won else old), (seed, results)
        assert LocalStore(root).stale_temps(older_than=0) == [], seed
        winners += len(won)
    assert winners > 30


# -- waiting, and breaking claims


def test_waits_for_the_holder(tmp_path: Path):
    """While a claim is held, one waits: if its holder succeeds meanwhile, that is what the other is told."""
    prepared(tmp_path / "root", None)
    claim = hold(tmp_path / "root")
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (claim.parent / f".absent.0-{'0' * 16}.tmp").rename(tmp_path / "root" / KEY)

    store = LocalStore(tmp_path / "root", claim_wait=2.0, sleep=sleep)
    (tmp_path / "root/d").mkdir()
    with pytest.raises(CheckpointExists):
        put(store, b"late", None)
    assert len(waits) == 3
    assert present(tmp_path / "root") == b"of the dead"


def test_takes_over_from_one_who_gives_up(tmp_path: Path):
    """If the holder gives up meanwhile, the next number is claimed, without waiting for any age."""
    prepared(tmp_path / "root", None)
    claim = hold(tmp_path / "root")
    store = LocalStore(tmp_path / "root", sleep=lambda _: next(claim.parent.glob(".absent.0-*")).unlink())
    put(store, b"next", None)
    assert present(tmp_path / "root") == b"next"
    assert sorted(p.name for p in claim.parent.iterdir()) == ["absent.0", "absent.1"]


def test_a_young_claim_is_respected(tmp_path: Path):
    """StoreUnavailable after the wait, with the claim and the time; nothing is changed."""
    prepared(tmp_path / "root", None)
    claim = hold(tmp_path / "root", 7)
    waits: list[float] = []
    store = LocalStore(tmp_path / "root", claim_age=100.0, claim_wait=2.0, sleep=waits.append)
    with pytest.raises(
        StoreUnavailable, match=r"claims/d%2Findex.json/absent\.7' was taken .* try again in (99|100) s"
    ):
        put(store, b"impatient", None)
    assert sum(waits) == pytest.approx(2.0, abs=0.1)
    assert present(tmp_path / "root") is None
    assert len(list(claim.parent.iterdir())) == 2


def test_an_old_claim_is_broken(tmp_path: Path):
    """A claim older than its age, by the store's clock, is broken; its empty folder stays."""
    prepared(tmp_path / "root", None)
    claim = hold(tmp_path / "root")
    os.utime(claim, (LocalStore(tmp_path / "root").now() - 11,) * 2)
    put(LocalStore(tmp_path / "root", claim_wait=0.0), b"next", None)
    assert present(tmp_path / "root") == b"next"
    assert sorted(p.name for p in claim.parent.iterdir()) == ["absent.0", "absent.1"]


def test_old_caches_win_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine that does not see the claims of others can't win one again: the folder of a claim stays for good.

    And what it does not see, it does not break, at whatever age.
    """
    root = tmp_path / "root"
    prepared(root, None)
    put(LocalStore(root), b"first", None)
    content = present(root)
    listdir, lstat = os.listdir, os.lstat

    def stale(name: object, **where: int) -> object:
        if name == "index.json":
            raise FileNotFoundError(errno.ENOENT, "an old cache says so")
        return lstat(name, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "listdir", lambda folder: [n for n in listdir(folder) if not n.startswith("absent")])
    monkeypatch.setattr(os, "lstat", stale)
    with pytest.raises(StoreUnavailable, match=r"absent\.0' is held by somebody whose traces are not visible"):
        put(impatient(root), b"second", None)
    monkeypatch.undo()
    assert present(root) == content == b"first"


def test_a_broken_claimer_is_told(tmp_path: Path):
    """One whose temporary file was removed while it held the claim, and nobody won: nothing was changed, try again."""
    root = tmp_path / "root"
    prepared(root, None)

    def fence(name: str, real: Callable[..., object], args: tuple, kwargs: dict) -> object:
        if name == "rename" and args[1] == "index.json":
            for entry in LocalStore(root).stale_temps(older_than=0):
                LocalStore(root).delete(entry.key)
        return real(*args, **kwargs)

    with watched(fence), pytest.raises(StoreUnavailable, match="broken"):
        put(LocalStore(root), b"zombie", None)
    assert present(root) is None
    put(LocalStore(root), b"again", None)
    assert present(root) == b"again"


@STATES
@pytest.mark.parametrize("call", ["mkdir", "rename", "listdir", "lstat", "unlink", "scandir", "fsync", "close", "open"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_any_call_may_fail(tmp_path: Path, old: bytes | None, call: str, nth: int):
    """Whichever call fails, the state is the old or the new, a success is one, and the next put finds its way."""
    root = tmp_path / "root"
    version = prepared(root, old)
    with trouble(Trouble(call, errno.EACCES, nth=nth)):
        result = _outcome(lambda: put(LocalStore(root), b"first", version))
    assert result is None or isinstance(result, StoreError)
    assert present(root) in ({b"first"} if result is None else {old, b"first"})
    if present(root) == b"first":
        with pytest.raises(CheckpointExists):
            put(impatient(root), b"second", version)
    else:
        put(impatient(root), b"second", version)
        assert present(root) == b"second"
        assert read(LocalStore(root), KEY) == b"second"


# -- where views may be old: FUSE and network mounts


@pytest.fixture
def incoherent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder passes for a network mount."""
    monkeypatch.setattr(mounts, "file_system", lambda _: "nfs4")


@pytest.mark.usefixtures("incoherent")
@STATES
def test_a_claim_is_not_believed_to_be_over(tmp_path: Path, old: bytes | None):
    """A claim without a temporary file may have been used, though the new content does not show yet: only age tells."""
    root = tmp_path / "root"
    version = prepared(root, old)
    claim = hold(root, 0, version or "absent")
    next(claim.parent.glob(".*.tmp")).unlink()
    waits: list[float] = []
    with pytest.raises(StoreUnavailable, match="was taken by somebody else; try again in 10 s"):
        put(LocalStore(root, sleep=waits.append), b"hasty", version)
    assert sum(waits) == pytest.approx(2.0, abs=0.1)
    assert present(root) == old
    os.utime(claim, (LocalStore(root).now() - 11,) * 2)
    put(LocalStore(root, sleep=waits.append), b"later", version)
    assert present(root) == b"later"
    assert sum(waits) == pytest.approx(4.0, abs=0.2)


@pytest.mark.usefixtures("incoherent")
def test_what_shows_late_is_waited_for(tmp_path: Path):
    """A winner whose content shows only after a while is seen in the end."""
    root = tmp_path / "root"
    version = prepared(root, b"old")
    put(LocalStore(root), b"winner", version)
    (root / KEY).write_bytes(b"old")  # what the other mount still shows
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            (root / KEY).write_bytes(b"winner")

    with pytest.raises(CheckpointExists):
        put(LocalStore(root, sleep=sleep), b"late", version)
    assert len(waits) == 5
    assert present(root) == b"winner"


@pytest.mark.usefixtures("incoherent")
def test_a_blink_is_no_absence(tmp_path: Path):
    """A file that is missing for a moment, while it is replaced, is looked for again."""
    root = tmp_path / "root"
    version = prepared(root, b"old")
    content = (root / KEY).read_bytes()
    (root / KEY).unlink()
    put(LocalStore(root, sleep=lambda _: (root / KEY).write_bytes(content)), b"new", version)
    assert present(root) == b"new"
    (root / KEY).unlink()
    with pytest.raises(KeyMissing):
        put(LocalStore(root, sleep=lambda _: None), b"newer", version)
