"""Which checkpoints a run has, and which is the newest."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import CheckpointNotFound, StoreError, UnsupportedVersion
from shardstore.index import HEAD_BYTES, dump, head_of, parse, read_head
from shardstore.run import Run, RunCheckpoint, facade, folder_name, latest, parse_folder
from shardstore.run.listing import newest_line
from shardstore.storage import Bytes, open_store
from tests.kit.faults import CountingStore, Fault, FaultyStore, Wrapper
from tests.kit.runs import Trainer, contents, new_attempt, steps

ODD = [
    "tmp-xyz", "step-12.tmp", "step-abc", "step-7 (1)", ".nfs00", "step-00000007", "step-7-0123456789abcdef",
    "step-000000007-0123456789abcdef", "step-00000007-0123456789ABCDEF", "step-00000007-0123456789abcdef.bak",
    "step-99999999999999999999-0123456789abcdef", "xstep-00000007-0123456789abcdef", "step--0000007-0123456789abcdef",
]  # fmt: skip


def test_X01_steps_are_numbers(trainer, run):
    """Steps of more and fewer digits come in the order in which they were saved, and `at` finds each; none is text."""
    for step in (9, 10, 100_000, 900_000, 1_000_000, 123_456_789):
        trainer.save(step)
    assert steps(run.checkpoints()) == [9, 10, 100_000, 900_000, 1_000_000, 123_456_789]
    assert run.newest().step == 123_456_789
    assert run.at(900_000).step == 900_000
    assert len({one.name for one in run.checkpoints()}) == 6


@pytest.mark.parametrize("name", ODD)
def test_X03_names_that_are_not_exactly_ours(name):
    """No other name is taken for a checkpoint."""
    assert parse_folder(name) is None


@given(step=st.integers(0, 2**63 - 1), attempt=st.from_regex(r"[0-9a-f]{16}", fullmatch=True))
def test_names_come_back(step, attempt):
    """Every step and attempt has a name that tells them."""
    assert parse_folder(folder_name(step, attempt)) == (step, attempt)


def test_X03_odd_folders_are_ignored_and_stay(folder):
    """Odd folders, also with a whole checkpoint in them, and a plain file are neither listed nor removed."""
    with Run(folder) as run:
        trainer = Trainer(run)
        good = trainer.save(5)
        for name in ODD:
            shutil.copytree(good.url, folder / name)
        (folder / "step-00000009-0123456789abcdef").write_text("a plain file")
        assert steps(run.checkpoints()) == [5]
        assert run.newest().step == 5
        assert run.sweep() == []
        assert all((folder / name).exists() for name in ODD)


def test_X03_links_are_not_followed(folder):
    """A link to a checkpoint is not listed."""
    with Run(folder) as run:
        good = Trainer(run).save(5)
        os.symlink(good.name, folder / folder_name(6, new_attempt()))
        assert steps(run.checkpoints()) == [5]


def test_newest_is_by_owner_and_number_not_by_step(trainer, run):
    """After going on from an older step the newest is that of the new line, though the old one has higher steps."""
    for step in (50, 60, 70, 100):
        trainer.save(step)
    trainer.resume(50)
    trainer.save(60)
    assert run.newest().step == 60
    assert run.newest().owner == 2
    assert [one.step for one in run.checkpoints() if one.line] == [50, 60]
    assert steps(run.candidates()) == [60, 50, 100, 70, 60]
    assert run.at(60).owner == 2
    assert run.at(70).owner == 1


def test_a_zombie_is_never_the_newest(trainer, run):
    """What an older owner commits after a newer one has saved sorts below it."""
    trainer.save(10)
    trainer.resume()
    new = trainer.save(20)
    trainer.save(1000, owner=1, seq=99)
    assert run.newest().attempt == new.attempt


def test_X04_newest_folder_is_unfinished_or_broken(trainer, run, heard):
    """A newest folder without index, or with an empty or a cut one, is passed over with a notice."""
    trainer.save(10)
    unfinished = trainer.begin(20)
    empty, cut, short = trainer.save(30), trainer.save(40), trainer.save(50)
    for one, size in ((empty, 0), (cut, HEAD_BYTES + 100), (short, 200)):
        data = run.store.get(f"{one.name}/shardstore.json", limit=1 << 20).data
        run.store.put(f"{one.name}/shardstore.json", Bytes(data[:size]))
    assert run.newest().step == 10
    assert all(any(name in text for text in heard) for name in (unfinished, empty.name, cut.name, short.name))
    states = {one.step: one.state for one in run.checkpoints(sizes=True)}
    assert states == {10: "committed", 20: "unfinished", 30: "damaged", 40: "damaged", 50: "damaged"}


def test_a_newer_schema_is_no_reason_to_go_back(trainer, run):
    """Where a newer version has written, what is newest can't be told: that is an error, not an older checkpoint."""
    trainer.save(10)
    run.store.put(f"{folder_name(20, new_attempt())}/shardstore.json", Bytes(b'{"schema":"shardstore/2"}'))
    with pytest.raises(UnsupportedVersion, match="shardstore/2"):
        run.newest()
    assert run.at(10).step == 10


def test_a_store_that_fails_gives_no_part_of_a_listing(trainer, run):
    """One index that can't be read now is an error: an older checkpoint is never passed off as the newest."""
    one = trainer.save(10)
    trainer.save(20)
    fault = Fault(1, key=f"{one.name}/shardstore.json", times=9)
    run._open = lambda url, real=run._open: FaultyStore(real(url), fault)
    with pytest.raises(StoreError):
        run.checkpoints()


def test_renamed_and_foreign_checkpoints_are_not_used(trainer, run, heard):
    """A folder under another step's or attempt's name, and another run's checkpoint, are told apart and passed over."""
    trainer.save(10)
    index, _ = contents(new_attempt(), run=trainer.id, step=20, owner=9)
    run.store.put(f"{folder_name(30, index.attempt)}/shardstore.json", Bytes(dump(index)))
    trainer.save(40, run="0123456789abcdef", owner=9)
    assert {one.step: one.state for one in run.checkpoints()} == {10: "committed", 30: "damaged", 40: "foreign"}
    assert run.newest().step == 10
    assert sum("passed over" in text for text in heard) == 2


def test_X11_latest_is_a_hint(trainer, run, heard):
    """latest.json that names a removed step, or garbage, changes nothing but is told; the listing decides."""
    trainer.save(10)
    gone = folder_name(5, "a" * 16).encode()
    for text, said in ((b'{"schema":"shardstore-latest/1","name":"%s"}' % gone, "not there"),
                       (b"garbage", "can't be understood"),
                       (b'{"schema":"shardstore-latest/1","name":"../../etc"}', "no folder of a checkpoint"),
                       (b'{"schema":"shardstore-latest/9","name":1}', "newer version")):  # fmt: skip
        heard.clear()
        run.store.put(latest.NAME, Bytes(text))
        assert run.newest().step == 10
        assert any(said in what for what in heard)


def test_X11_latest_raises_what_a_listing_misses(trainer, run, heard, monkeypatch):
    """A checkpoint that a stale listing does not show is found by the hint; an older hint lowers nothing."""
    first, second = trainer.save(10), trainer.save(20)
    monkeypatch.setattr(type(run.store), "folders", lambda _: [first.name])
    assert steps(run.checkpoints()) == [10, 20]
    assert run.newest().step == 20
    latest.write(run.store, first.name)
    monkeypatch.setattr(type(run.store), "folders", lambda _: [first.name, second.name])
    assert run.newest().step == 20


def test_X12_a_run_may_be_moved(folder, tmp_path, monkeypatch):
    """Renamed, reached through a link, or by a relative path from which the process has gone: all works."""
    with Run(folder) as run:
        trainer = Trainer(run)
        trainer.save(10)
        run.pin(10)
    moved = folder.rename(folder.parent / "moved")
    (folder.parent / "link").symlink_to(moved)
    monkeypatch.chdir(folder.parent)
    with Run("moved") as run, Run("link") as linked:
        monkeypatch.chdir(tmp_path)
        for one in (run, linked):
            assert one.newest().pinned
            assert one.verify(10).ok


def test_X14_a_failed_save_leaves_no_step_behind(trainer, run):
    """A save of step 1820 that does not commit is not listed as a checkpoint, and 1620 is accepted after it."""
    trainer.save(1600)
    trainer.begin(1820)
    trainer.resume()
    trainer.save(1620)
    assert [one.step for one in run.checkpoints() if one.state == "committed"] == [1600, 1620]
    assert run.newest().step == 1620
    with pytest.raises(CheckpointNotFound, match="it has 1600, 1620"):
        run.at(1820)


def test_X17_nothing_there(run, url):
    """A missing root, an empty run, and one with nothing but debris have no newest checkpoint."""
    assert run.checkpoints() == []
    assert run.newest() is None
    with pytest.raises(CheckpointNotFound, match="no run"):
        run.info  # noqa: B018 raises
    trainer = Trainer(run)
    assert run.newest() is None
    trainer.begin(10)
    assert run.newest() is None
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 10"):
        run.at(10)


def test_empty_folders_are_nothing(folder):
    """A folder that is empty, as removals leave them on some mounts, is not listed as unfinished."""
    with Run(folder) as run:
        Trainer(run)
        (folder / folder_name(3, new_attempt())).mkdir()
        assert run.checkpoints() == []


def test_a_listing_reads_only_heads(trainer, run):
    """A listing costs one call for the folders, one for marks, and 512 bytes of each index, whatever their number."""
    for step in range(1, 31):
        trainer.save(step)
    counting = CountingStore(open_store(run.url))
    run._open = lambda _url: counting
    assert len(run.checkpoints()) == 30
    assert counting.count("folders") == 1
    assert counting.count("list") == 1
    assert counting.count("read_into") == 30
    assert sum(call.nbytes for call in counting.calls if call.name == "read_into") == 30 * HEAD_BYTES
    assert counting.keys("get") == [latest.NAME]


def test_what_others_remove_is_gone(folder):
    """A listing shows what is there now, also to a run object that has seen, and read, what was there before."""
    with Run(folder) as run, Run(folder) as other:
        one = Trainer(run).save(10)
        assert steps(run.checkpoints()) == [10]
        assert other.remove(one) == []
        assert run.checkpoints() == []
        assert run.newest() is None


def test_sizes_on_request(trainer, run):
    """`sizes` gives the bytes of each checkpoint's files."""
    trainer.save(10)
    (one,) = run.checkpoints(sizes=True)
    files = [entry.nbytes for entry in run.store.list(one.name) if one.attempt in entry.key.rpartition("/")[2]]
    assert one.nbytes == sum(files)
    assert run.checkpoints()[0].nbytes is None


_TEXT = st.text(max_size=20)
_COUNT = st.integers(0, 2**63 - 1)
_ID = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)


@given(run=st.none() | _TEXT, step=st.none() | _COUNT, seq=_COUNT, parent=st.none() | _ID, owner=_COUNT, time=_TEXT)
def test_heads_say_what_indexes_say(run, step, seq, parent, owner, time):
    """The head of an index is what the whole index says, or is left to the whole index."""
    index, _ = contents("a" * 16, run=run, step=step, seq=seq, parent=parent, owner=owner, time=time)
    data = dump(index)
    assert head_of(parse(data)) == head_of(index)
    assert read_head(data[:HEAD_BYTES]) in {head_of(index), None}
    plain = all(32 <= ord(c) < 127 and c not in '"\\' for c in (run or "") + time)
    if plain and max(step or 0, seq, owner) < 10**18:
        assert read_head(data[:HEAD_BYTES]) == head_of(index)


def test_heads_are_strict():
    """What is not written as we write it is no head: it is left to the strict reading of the whole."""
    data = dump(contents("a" * 16, run="r", step=7)[0])
    assert read_head(data) is not None
    for old, new in ((b'"step":7', b'"step":07'), (b'"step":7', b'"step":-7'), (b'"seq":0,', b""),
                     (b"shardstore/1", b"shardstore/2"), (b'"run":"r"', b'"run":"\\u0041"'), (b'{"s', b'{ "s'),
                     (b'"owner":0', b'"owner":0.0')):  # fmt: skip
        assert read_head(data.replace(old, new)) is None
    assert read_head(data[:100]) is None


def _line(*saves: tuple[int, int, str, str | None]) -> set[str]:
    made = [RunCheckpoint("", "", step, attempt, owner=o, parent=parent) for step, o, attempt, parent in saves]
    return newest_line(made)


def test_line_follows_parents():
    """What came after the parent of a save was left behind, also where its own step is higher."""
    assert _line((50, 1, "a", None), (60, 1, "b", "a"), (70, 1, "c", "b"), (75, 2, "d", "a")) == {"a", "d"}
    assert _line((60, 1, "b", "a"), (70, 1, "c", "b"), (75, 2, "d", "a")) == {"d"}  # a has been removed
    assert _line((50, 1, "a", None), (60, 1, "b", "x"), (55, 2, "c", "y")) == {"a", "c"}
    assert _line((50, 1, "a", None), (70, 1, "c", "b"), (90, 1, "d", "c")) == {"a", "c", "d"}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), max_size=12))
def test_line_is_ordered_and_holds_the_newest(saves):
    """Whatever the history: the newest is on the line, and steps rise along it, up to the newest."""
    made = [
        RunCheckpoint("", "", step, str(n), owner=1, seq=n, parent=str(parent) if 0 <= parent < n else None)
        for n, (step, parent) in enumerate(saves)
    ]
    line = newest_line(made)
    on = [one.step for one in made if one.attempt in line]
    assert on == sorted(set(on))
    assert not made or made[-1].attempt in line


def test_run_json_that_was_lost_is_made_again(trainer, run, heard):
    """Without run.json the checkpoints tell the id of the run, and it counts as one that has had a checkpoint."""
    trainer.save(10)
    run.store.delete("run.json")
    assert run.newest().step == 10
    assert run.info.run == trainer.id
    made = run.create()
    assert (made.run, made.committed) == (trainer.id, True)
    assert any("run.json was lost" in text for text in heard)


class Connected(Wrapper):
    """A store that three calls at once serve best."""

    @property
    def capabilities(self):
        return dataclasses.replace(self.inner.capabilities, connections=3)


def test_a_checkpoint_is_verified_over_as_many_connections_as_serve_the_store_best(trainer, run, monkeypatch):
    """As by `shardstore.verify`, not by one thread for each core; who asks for a number gets it."""
    trainer.save(10)
    found, check = [], facade.verify_store
    monkeypatch.setattr(facade, "verify_store", lambda *given: (found.append(given[1]), check(*given))[1])
    monkeypatch.setattr(run, "_open", lambda url, opened=run._open: Connected(opened(url)))
    assert run.verify(10).ok
    assert run.verify(10, threads=2).ok
    assert found == [3, 2]
