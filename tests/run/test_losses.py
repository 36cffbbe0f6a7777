"""The loss history: one value a step, whatever happened."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.errors import InvalidArgument, StoreError
from shardstore.run import LossWriter, loss_log, losses, matches
from shardstore.run.losses import LossEvent, Recorded, merge, parse_line
from shardstore.storage import Bytes, open_store
from tests.kit.faults import Fault, FaultyStore

ROOT = Path(shardstore.__file__).parents[1]


def _written(store, epoch: int, *values: tuple[int, float], resume: int | None = None) -> LossWriter:
    writer = LossWriter(store, epoch)
    if resume is not None:
        writer.event("resume", resume, attempt="a" * 16)
    for step, value in values:
        writer.record(step, {"loss": value})
    writer.close()
    return writer


def test_one_value_a_step_for_the_life_of_the_run(url):
    """Three owners, two resumes, one of them far back: each step has the value of the line that goes on."""
    store = open_store(url)
    _written(store, 1, *((step, 1.0) for step in range(1, 151)))
    _written(store, 2, *((step, 2.0) for step in range(101, 181)), resume=100)
    _written(store, 3, *((step, 3.0) for step in range(51, 61)), resume=50)
    found = loss_log.read(store)
    assert list(found) == list(range(1, 61))
    assert [found[step] for step in (1, 50, 51, 60)] == [1.0, 1.0, 3.0, 3.0]
    assert [(event.kind, event.step, event.epoch) for event in found.events] == [("resume", 100, 2), ("resume", 50, 3)]
    assert found.events[0].facts == {"attempt": "a" * 16}


def test_a_zombie_changes_nothing(url):
    """What a fenced owner goes on recording does not come back into the history."""
    store = open_store(url)
    old = LossWriter(store, 1)
    for step in range(1, 21):
        old.record(step, {"loss": 1.0})
    _written(store, 2, (11, 2.0), resume=10)
    for step in range(21, 41):
        old.record(step, {"loss": 1.0})
    old.close()
    assert dict(loss_log.read(store)) == {**dict.fromkeys(range(1, 11), 1.0), 11: 2.0}


def test_nan_and_infinities_are_strict_json(url):
    """They are kept, as strings, and come back as numbers."""
    store = open_store(url)
    _written(store, 1, (1, math.nan), (2, math.inf), (3, -math.inf), (4, 0.1))
    found = loss_log.read(store)
    assert math.isnan(found[1])
    assert [found[2], found[3], found[4]] == [math.inf, -math.inf, 0.1]
    text = b"".join(store.get(entry.key, limit=9999).data for entry in store.list("losses/")).decode()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [row["loss"] for row in rows] == ["nan", "inf", "-inf", 0.1]


@given(st.floats())
def test_values_come_back_to_the_bit(value):
    """Every double is what it was."""
    recorded = parse_line(losses.line_of(1, {"loss": value}))
    assert isinstance(recorded, Recorded)
    assert recorded.values["loss"] == value or (math.isnan(value) and math.isnan(recorded.values["loss"]))


@pytest.mark.parametrize("tail", [b'{"step":4,"lo', b'{"step":4,"loss":4.0}', b"\0" * 40, b"\xff{"])
def test_torn_last_lines_are_survived(url, tail):
    """What a dead process has left without a newline is no line, and is not complained about."""
    store = open_store(url)
    store.put(loss_log.log_name(1), Bytes(losses.line_of(3, {"loss": 3.0}) + tail))
    notices: list[str] = []
    found = loss_log.read(store, notices.append)
    assert (dict(found), found.unread, notices) == ({3: 3.0}, 0, [])


_DAMAGED = {
    "garbage": b"garbage",
    "array": b"[]",
    "empty": b"{}",
    "no value": b'{"step":1}',
    "step is text": b'{"step":"1","loss":1}',
    "step below 0": b'{"step":-1,"loss":1}',
    "step is a bool": b'{"step":true,"loss":1}',
    "bare nan": b'{"step":1,"loss":NaN}',
    "two steps": b'{"step":1,"step":2,"loss":1}',
    "value is an array": b'{"step":1,"loss":[1]}',
    "value is text": b'{"step":1,"loss":"big"}',
    "event is a number": b'{"event":7,"step":1}',
    "zeros": b"\0\0\0",
    "too long": b'{"step":1,"loss":1' + b" " * 70_000 + b"}",
    "too deep": b"[" * 60_000,
}


@pytest.mark.parametrize("line", _DAMAGED.values(), ids=_DAMAGED)
def test_damaged_lines_are_left_out_and_told(url, line):
    """A line that can't be understood costs its own step only, and is told."""
    store = open_store(url)
    data = [losses.line_of(1, {"loss": 1.0}), line + b"\n", losses.line_of(2, {"loss": 2.0})]
    store.put(loss_log.log_name(1), Bytes(*data))
    notices: list[str] = []
    found = loss_log.read(store, notices.append)
    assert (dict(found), found.unread) == ({1: 1.0, 2: 2.0}, 1)
    assert "1 lines can't be understood" in notices[0]


def test_other_values_stand_beside_the_loss(url):
    """Values of other names have histories of their own; those of one step belong together, also if given later."""
    store = open_store(url)
    writer = LossWriter(store, 1)
    writer.record(1, {"loss": 3.0, "lr": 0.1})
    writer.record(2, {"loss": 2.0})
    writer.record(2, {"val_loss": 2.5})
    writer.close()
    found = loss_log.read(store)
    assert dict(found) == {1: 3.0, 2: 2.0}
    assert dict(found.of("val_loss")) == {2: 2.5}
    assert found.names == ["loss", "lr", "val_loss"]
    assert found.row(2) == {"loss": 2.0, "val_loss": 2.5}
    assert found.row(9) == {}


@pytest.mark.parametrize(
    ("step", "values"),
    [(-1, {"loss": 1}), (1.0, {"loss": 1}), (True, {"loss": 1}), (1, {}), (1, {"loss": "x"}), (1, {"step": 1}),
     (1, {"loss": None}), (1, {"event": 1}), (1, {"l" * 70_000: 1})],
)  # fmt: skip
def test_what_is_no_loss_is_refused(url, step, values):
    """A wrong step, name or value is refused, and nothing is written."""
    writer = LossWriter(open_store(url), 1)
    with pytest.raises(InvalidArgument):
        writer.record(step, values)
    writer.close()
    assert list(open_store(url).list()) == []


def test_lines_survive_sigkill(folder):
    """On a local file system each line is there as soon as `record` has returned, whatever kills the process."""
    script = """
import os, signal, sys
from shardstore.run import Run
run = Run(sys.argv[1])
run.create()
run.take_owner()
for step in range(1, 101):
    run.record_loss(step, step / 4, lr=0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, folder], env=env, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    found = loss_log.read(open_store(folder))
    assert dict(found) == {step: step / 4 for step in range(1, 101)}


def test_segments_are_never_changed():
    """Where nothing can be appended, each flush writes a file of its own; earlier ones stay as they are."""
    store = open_store("memory://losses-segments")
    writer = LossWriter(store, 3)
    writer.record(1, {"loss": 1.0})
    writer.flush()
    before = {entry.key: store.get(entry.key, limit=999) for entry in store.list()}
    writer.flush()  # nothing new: nothing written
    writer.record(2, {"loss": 2.0})
    writer.close()
    names = [entry.key for entry in store.list()]
    assert names == ["losses/00000003-00000000.jsonl", "losses/00000003-00000001.jsonl"]
    assert {key: store.get(key, limit=999) for key in before} == before
    assert dict(loss_log.read(store)) == {1: 1.0, 2: 2.0}


def test_a_failing_flush_loses_nothing():
    """What a store does not take is written by the next flush."""
    store = open_store("memory://losses-failing")
    writer = LossWriter(FaultyStore(store, Fault(1, calls=frozenset({"put"}))), 1)
    writer.record(1, {"loss": 1.0})
    with pytest.raises(StoreError):
        writer.flush()
    writer.record(2, {"loss": 2.0})
    writer.flush()
    assert dict(loss_log.read(store)) == {1: 1.0, 2: 2.0}


def test_a_full_disk_tears_one_line_only(folder, monkeypatch):
    """After a line that could be written in part only, the next ones are whole, and the log still matches."""
    store = open_store(folder)
    writer = LossWriter(store, 1)
    writer.record(1, {"loss": 1.0})
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, data[:7])
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StoreError, match="no space is left"):
            writer.record(2, {"loss": 2.0})
    writer.record(3, {"loss": 3.0})
    writer.close()
    found = loss_log.read(store)
    assert (dict(found), found.unread) == ({1: 1.0, 3: 3.0}, 1)
    assert matches(store, writer.reference())


def test_references_tell_a_changed_log(url):
    """A checkpoint's reference fits the log as it was and as it grew; not one that was cut, changed or lost."""
    store = open_store(url)
    writer = LossWriter(store, 1)
    for step in range(1, 11):
        writer.record(step, {"loss": step / 3})
    writer.flush()
    reference = json.loads(json.dumps(writer.reference()))
    assert matches(store, reference)
    writer.record(11, {"loss": 11.0})
    writer.close()
    assert matches(store, reference)
    (first, *_) = [entry.key for entry in store.list("losses/")]
    data = store.get(first, limit=9999).data
    for changed in (data[:50], data.replace(b'"step":5', b'"step":6'), b""):
        store.put(first, Bytes(changed))
        assert not matches(store, reference)
    with pytest.raises(InvalidArgument):
        matches(store, {"epoch": 1})


_RECORDS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.one_of(
            st.builds(
                Recorded, st.integers(0, 12), st.dictionaries(st.sampled_from("ab"), st.floats(0, 1), min_size=1)
            ),
            st.builds(LossEvent, st.sampled_from(["start", "resume", "pivot", "fork"]), st.integers(0, 12)),
        ),
    ),
    max_size=40,
).map(lambda found: sorted(found, key=lambda pair: pair[0]))


@given(_RECORDS)
def test_merging_is_what_the_rule_says(records):
    """Against a plain model: a table from which every cut removes all later steps."""
    table: dict[int, dict[str, float]] = {}
    last: tuple[int, int] | None = None
    for epoch, record in records:
        if isinstance(record, LossEvent):
            if record.kind in {"start", "resume"}:
                table = {step: row for step, row in table.items() if step <= record.step}
            continue
        same = last == (epoch, record.step) and record.step in table
        row = table.get(record.step, {}) if same else {}
        table = {step: row for step, row in table.items() if step < record.step}
        table[record.step] = {**row, **record.values}
        last = epoch, record.step
    found = merge(records)
    assert {step: found.row(step) for step in table} == table
    for name in "ab":
        assert dict(found.of(name)) == {step: row[name] for step, row in table.items() if name in row}
        assert list(found.of(name)) == sorted(found.of(name))
    assert len(found.events) == sum(isinstance(record, LossEvent) for _, record in records)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=6))
def test_a_run_that_dies_again_and_again(lives):
    """Each life resumes at some step that is there, and trains on: the history is that of the last line."""
    records: list[tuple[int, Recorded | LossEvent]] = []
    line: list[float] = []
    for epoch, (back, steps) in enumerate(lives, start=1):
        line = line[: max(0, len(line) - back)]
        records.append((epoch, LossEvent("resume", len(line), epoch)))
        for _ in range(steps):
            line.append(float(epoch))
            records.append((epoch, Recorded(len(line), {"loss": float(epoch)})))
    assert dict(merge(records)) == dict(enumerate(line, start=1))


@given(_RECORDS, st.integers(0, 12))
def test_a_history_can_be_inherited(records, upto):
    """The lines that a fork inherits give the same values up to its step, and no event is lost there."""
    found = merge(records)
    lines = [parse_line(line) for line in found.lines(upto)]
    again = merge((0, line) for line in lines if line is not None)
    for name in "ab":
        wanted = {step: value for step, value in found.of(name).items() if step <= upto}
        assert dict(again.of(name)) == wanted
    assert len(again.events) == sum(event.step <= upto for event in found.events)
