"""What happens to a run as a whole: pins, quarantine, sidecars, pivots, forks."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket

import pytest

from shardstore.errors import (
    CheckpointExists,
    CheckpointNotFound,
    Damaged,
    Fenced,
    InvalidArgument,
    StoreError,
    UnsupportedVersion,
)
from shardstore.run import Run, info, marks, resolve, split
from shardstore.storage import Bytes, open_store, sharing
from tests.kit.contract import together
from tests.kit.faults import Fault, FaultyStore
from tests.kit.runs import Trainer, folder_name, new_attempt, steps


def _flip(run: Run, name: str) -> None:
    """Change one bit of the weights of a checkpoint."""
    key = next(entry.key for entry in run.store.list(f"{name}/") if entry.key.endswith(".safetensors"))
    data = bytearray(run.store.get(key, limit=1 << 20).data)
    data[-1] ^= 1
    run.store.put(key, Bytes(data))


def _trained(run: Run, *found: int) -> Trainer:
    """A run with losses up to the last of these steps."""
    trainer = Trainer(run)
    with run.take_owner():
        for step in range(1, found[-1] + 1):
            run.record_loss(step, 1 / step)
            if step in found:
                trainer.save(step)
        run.log.flush()
    return trainer


# -- marks


def test_pins(trainer, run):
    """A pin is set and taken away by step or attempt, is seen by others, and says why and when."""
    one = trainer.save(10)
    assert run.pin(10, "for the paper").attempt == one.attempt
    with Run(run.url) as other:
        assert other.at(10).pinned
    said = marks.read(run.store, "pin", one.attempt)
    assert (said["reason"], said["step"]) == ("for the paper", 10)
    run.unpin(one.attempt)
    assert not run.at(10).pinned
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 11"):
        run.pin(11)
    with pytest.raises(CheckpointNotFound):
        run.pin(trainer.begin(12))


def test_quarantine(trainer, run, heard):
    """Nothing resumes from what is in quarantine; it is told only where it would have been the newest."""
    trainer.save(10)
    trainer.save(20)
    trainer.save(30)
    run.quarantine(30, "block 3 is damaged")
    run.quarantine(10, "block 1 is damaged")
    assert run.newest().step == 20
    assert sum("quarantine" in text for text in heard) == 1
    assert steps(run.candidates()) == [20]
    assert {one.step for one in run.checkpoints() if one.quarantined} == {10, 30}
    run.release(trainer.saved[30])
    assert run.newest().step == 30


def test_a_damaged_mark_still_protects(trainer, run):
    """A pin counts by its name; files of other names are no marks."""
    one = trainer.save(10)
    run.store.put(f"marks/pin-{one.attempt}.json", Bytes(b""))
    run.store.put(f"marks/quarantine-{one.attempt}.json.bak", Bytes(b""))
    assert run.at(10).pinned
    assert not run.at(10).quarantined


# -- run.json


def test_racing_creators_make_one_run(url):
    """Processes that make the same run at once agree on its id."""
    assert len({made.run for made in together(6, lambda _: Run(url).create())}) == 1


def test_changes_of_run_json_do_not_undo_each_other(trainer, run):
    """Two that change it at once both come through."""
    from dataclasses import replace

    def one(number: int) -> None:
        pivot = info.Pivot(number, number, "a" * 16, "")
        info.change(open_store(run.url), lambda found: replace(found, pivots=(*found.pivots, pivot)))

    assert together(4, one) == [None] * 4
    assert sorted(pivot.generation for pivot in run.info.pivots) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", Damaged),
        (b"[]", Damaged),
        (b'{"schema":"shardstore-run/1"}', Damaged),
        (b'{"schema":"other/1"}', Damaged),
        (b'{"schema":"shardstore-run/2","new":1}', UnsupportedVersion),
    ],
)
def test_run_json_is_read_strictly(trainer, run, text, error):
    """One that can't be understood is an error, and is not replaced by a new run."""
    trainer.save(10)
    run.store.put(info.NAME, Bytes(text))
    for call in (run.create, run.checkpoints, run.newest, run.take_owner):
        with pytest.raises(error, match=r"run\.json"):
            call()
    assert run.store.get(info.NAME, limit=99).data == text


@pytest.mark.parametrize("change", [{"generation": "1"}, {"committed": 1}, {"pivots": [1]}, {"origin": {}}, {"x": 1}])
def test_run_json_has_exactly_its_members(trainer, run, change):
    """Wrong types, and members that are missing or unknown, are refused."""
    document = json.loads(run.store.get(info.NAME, limit=9999).data)
    run.store.put(info.NAME, Bytes(json.dumps({**document, **change}).encode()))
    with pytest.raises(Damaged):
        run.info  # noqa: B018 raises


def test_the_first_commit_is_remembered(trainer, run):
    """A run that has had a checkpoint says so, also when none is left: it must not start from zero."""
    assert not run.info.committed
    one = trainer.save(10)
    shutil.rmtree(one.url) if os.path.isdir(one.url) else [run.store.delete(e.key) for e in run.store.list(one.name)]
    assert run.newest() is None
    assert run.info.committed


# -- sidecars


def test_sidecars(trainer, run):
    """A sidecar is what was written last, whole; each has its name; what is no JSON is refused and changes nothing."""
    samples = run.sidecar("samples")
    assert samples.read() is None
    assert samples.read([]) == []
    samples.write([{"step": 1, "text": "täxt"}])
    for bad in (float("nan"), object(), {1, 2}):
        with pytest.raises(InvalidArgument, match="samples"):
            samples.write(bad)
    assert Run(run.url).sidecar("samples").read() == [{"step": 1, "text": "täxt"}]
    assert run.sidecar("other").read() is None
    for name in ("", "../x", "a/b", ".hidden", "x" * 101, None, "a\n"):
        with pytest.raises(InvalidArgument):
            run.sidecar(name)
    run.store.put(samples.key, Bytes(b"{"))
    with pytest.raises(Damaged, match=r"samples\.json is no JSON"):
        samples.read()


def test_a_failed_write_leaves_the_old_sidecar(trainer, run):
    """A store that fails in the middle leaves what was there."""
    run.sidecar("controller").write({"lr": 1})
    run.store = FaultyStore(run.store, Fault(1, errno=28, calls=frozenset({"put"})))
    with pytest.raises(StoreError):
        run.sidecar("controller").write({"lr": 2})
    assert run.sidecar("controller").read() == {"lr": 1}


# -- pivot


def test_pivot(run):
    """Sidecars begin anew, the old ones and every file stay where they are, losses go on, and the turn is marked."""
    trainer = _trained(run, 10, 20)
    run.sidecar("samples").write(["old"])
    before = {entry.key: entry.modified for entry in run.store.list()}
    found = run.pivot()
    after = {entry.key: entry.modified for entry in run.store.list()}
    assert {key for key in before | after if before.get(key) != after.get(key)} == {info.NAME}
    assert (found.generation, found.pivots[-1].step) == (1, 20)
    assert run.sidecar("samples").read() is None
    assert run.sidecar("samples", generation=0).read() == ["old"]
    run.sidecar("samples").write(["new"])
    trainer.resume()
    with run.take_owner():
        run.record_loss(21, 9.0)
        run.log.flush()
    assert list(run.losses()) == list(range(1, 22))
    assert [(event.kind, event.step) for event in run.losses().events] == [("pivot", 20)]
    assert run.pivot().generation == 2


def test_pivot_wants_a_whole_newest_checkpoint(trainer, run):
    """Without a checkpoint, or with a damaged newest one, it is refused, and nothing changes."""
    with pytest.raises(CheckpointNotFound):
        run.pivot()
    trainer.save(10)
    newest = trainer.save(20)
    _flip(run, newest.name)
    with pytest.raises(Damaged, match=newest.name):
        run.pivot()
    assert run.info.generation == 0


def test_pivot_is_refused_while_somebody_holds_the_run(trainer, run, monkeypatch):
    """A living owner keeps it; one that has ended, or was not heard of for two minutes, does not."""
    trainer.save(10)
    owner = run.take_owner()
    with pytest.raises(Fenced, match=f"held by process {os.getpid()} on {socket.gethostname()}"):
        run.pivot()
    assert run.info.generation == 0
    owner.check()  # it was not fenced off by that
    now = run.store.now() + 121
    with monkeypatch.context() as patched:
        patched.setattr(type(run.store), "now", lambda _: now)
        assert run.pivot().generation == 1
    owner.beat()
    owner.release()
    assert run.pivot().generation == 2


# -- fork


def test_fork(run):
    """A fork has the checkpoint byte for byte, its losses up to there, its origin, and a line of its own."""
    trainer = _trained(run, 10, 20, 30)
    run.pivot()
    with run.fork(20, f"{run.url}-fork") as new:
        assert steps(new.checkpoints()) == [20]
        assert new.id != run.id
        origin = new.info.origin
        assert (origin.run, origin.step, origin.attempt) == (run.id, 20, trainer.saved[20].attempt)
        assert new.newest().attempt == origin.attempt
        assert new.verify(20).ok
        assert new.info.generation == 0
        assert dict(new.losses()) == {step: 1 / step for step in range(1, 21)}
        assert [(event.kind, event.step) for event in new.losses().events] == [("fork", 20)]
        old = {
            entry.key: run.store.get(entry.key, limit=1 << 20).data for entry in run.store.list(f"{new.newest().name}/")
        }
        assert old == {
            entry.key: new.store.get(entry.key, limit=1 << 20).data for entry in new.store.list(f"{new.newest().name}/")
        }
        owner = new.take_owner()
        assert owner.epoch > trainer.saved[20].owner
        younger = Trainer(new, owner=owner.epoch, parent=origin.attempt)
        younger.save(30)
        assert steps(new.checkpoints()) == [20, 30]
        assert new.newest().owner == owner.epoch
    assert steps(run.checkpoints()) == [10, 20, 30]


def test_either_side_of_a_fork_may_go(folder):
    """After the first run is removed, the fork is whole; after the fork is changed and removed, the first one is."""
    with Run(folder) as run:
        _trained(run, 10)
        for name in ("one", "two"):
            run.fork(10, folder.parent / name).close()
        _flip(Run(folder.parent / "one"), run.newest().name)
        shutil.rmtree(folder.parent / "one")
        assert run.verify(10).ok
        shutil.rmtree(folder)
    with Run(folder.parent / "two") as new:
        assert new.verify(10).ok
        assert len(new.losses()) == 10


def test_forks_share_blocks_where_they_can(folder, monkeypatch):
    """Each file is offered to the file system as a clone of the first; what can't be cloned is copied."""
    asked = []

    def ioctl(target: int, request: int, source: int) -> int:
        asked.append(request)
        if len(asked) % 2:
            raise OSError(95, "not supported")
        os.write(target, os.pread(source, 1 << 20, 0))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    with Run(folder) as run:
        _trained(run, 10)
        with run.fork(10, folder.parent / "new") as new:
            assert new.verify(10).ok
    assert asked == [sharing._FICLONE] * 2


def test_a_clone_that_lies_is_found(folder, monkeypatch):
    """What a clone really holds is read back and verified; a wrong one is no fork."""

    def ioctl(target: int, _request: int, source: int) -> int:
        data = bytearray(os.pread(source, 1 << 20, 0))
        data[-1] ^= 1
        os.write(target, data)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    with Run(folder) as run:
        _trained(run, 10)
        with pytest.raises(Damaged, match="not what was saved"):
            run.fork(10, folder.parent / "new")
        with Run(folder.parent / "new") as new, pytest.raises(CheckpointNotFound):
            new.info  # noqa: B018 raises


def test_fork_of_a_damaged_checkpoint_leaves_nothing(run):
    """It is refused, and at the new place there is no run, no checkpoint, and no file; a later fork works there."""
    _trained(run, 10, 20)
    _flip(run, run.at(20).name)
    with pytest.raises(Damaged, match="safetensors"):
        run.fork(20, f"{run.url}-fork")
    assert list(open_store(f"{run.url}-fork").list()) == []
    with run.fork(10, f"{run.url}-fork") as new:
        assert new.newest().step == 10


def test_fork_takes_no_place_that_is_taken(trainer, run):
    """A run, also the first one itself, and a folder with checkpoints are refused and stay as they are."""
    trainer.save(10)
    with Run(f"{run.url}-other") as other:
        other.create()
        before = [entry.key for entry in other.store.list()]
        for place in (other.url, run.url):
            with pytest.raises(CheckpointExists, match="is a run already"):
                run.fork(10, place)
        assert [entry.key for entry in other.store.list()] == before
    third = open_store(f"{run.url}-third")
    third.put(f"{folder_name(5, new_attempt())}/x", Bytes(b""))
    with pytest.raises(CheckpointExists, match="holds checkpoints already"):
        run.fork(10, f"{run.url}-third")


def test_an_interrupted_fork_can_be_made_again(run, monkeypatch):
    """A fork that died before its last step is no run yet; the same fork again completes it."""
    _trained(run, 10)

    def dies(*_args, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(info, "create", dies)
        with pytest.raises(KeyboardInterrupt):
            run.fork(10, f"{run.url}-fork")
    assert info.read(open_store(f"{run.url}-fork")) is None
    with run.fork(10, f"{run.url}-fork") as new:
        assert new.info.origin.run == run.id
        assert new.verify(10).ok


# -- addresses


def test_addresses(trainer, run, url):
    """`RUN@STEP`, `RUN@ATTEMPT` and `RUN@latest` name checkpoints; all else is a place as it stands."""
    ten, twenty = trainer.save(10), trainer.save(20)
    assert resolve(f"{url}@10") == ten.url
    assert resolve(f"{url}@latest") == twenty.url
    assert resolve(f"{url}@{ten.attempt}") == ten.url
    assert resolve(url) == url
    for other in ("a@b", "x@", "@5", "s3://user@host/run", "run@latest/x", "run@LATEST"):
        assert split(other) is None
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 30; it has 10, 20"):
        resolve(f"{url}@30")
    with pytest.raises(CheckpointNotFound):
        resolve(f"{url}-gone@latest")


def test_a_place_named_like_an_address_is_itself(folder):
    """A checkpoint in a folder named `x@5` is meant by that name."""
    with Run(folder) as run:
        one = Trainer(run).save(10)
        shutil.copytree(one.url, folder.parent / "x@5")
    assert resolve(str(folder.parent / "x@5")) == str(folder.parent / "x@5")
