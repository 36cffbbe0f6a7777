"""The rows on a FUSE mount, with a toy state on a real one."""

import json
import os

import pytest

from benchmarks import __main__ as tool
from benchmarks import mount
from benchmarks.runner import Settings, library, measure
from benchmarks.states import Case
from benchmarks.systems import SYSTEMS
from benchmarks.tasks import TASKS
from tests.benchmarks.test_benchmarks import served

pytestmark = [pytest.mark.mounts, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def point(tmp_path_factory):
    """A mount of the benchmark's own."""
    if why := mount.missing():
        pytest.skip(why)
    with mount.started(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.fixture(scope="module")
def shelf(point):
    """What loads read, saved once."""
    case = Case.of("toy", threads=2)
    with library(case, point) as made:
        yield case, made


@pytest.mark.parametrize(("task", "name"), served("fuse"))
def test_every_system_does_every_task_right(task, name, shelf, point, tmp_path):
    """Each gives back the saved bits through the mount, is measured, and leaves no folder of a save."""
    case, made = shelf
    if not TASKS[task].saves:
        made.of(SYSTEMS[name])
    before = os.listdir(point._root / "buckets")
    settings = Settings(rounds=1, slow=0, memory=tmp_path, disk=tmp_path, server=point)
    (row,) = measure(case, TASKS[task], [SYSTEMS[name]], made, settings)
    assert row.error is None
    assert len(row.seconds) == 1
    assert row.warm
    assert sorted(os.listdir(point._root / "buckets")) == sorted(before)


def test_a_mount_that_is_renewed_has_the_same_files_at_the_same_place(point):
    """Files stay, what the mount had cached of them is gone."""
    folder = point.new()
    (folder / "file").write_bytes(b"bytes")
    cache = point._root.with_name(f"{mount.NAME}.cache")
    (cache / "left").touch()
    point.renew()
    assert (folder / "file").read_bytes() == b"bytes"
    assert not (cache / "left").exists()
    assert os.path.ismount(point._root)
    point.remove(folder)


def test_without_a_mount_every_row_is_left_out(tmp_path, monkeypatch):
    """No fuse3 or no root: the tool says so, and is content."""
    monkeypatch.setattr(mount, "missing", lambda: "needs root, to mount")
    out = tmp_path / "figures.json"
    words = ["--states", "toy", "--tasks", "fuse-save", "--memory", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    assert tool.main() == 0
    rows = json.loads(out.read_text())["results"]
    assert {each["system"] for each in rows} == {"shardstore", "torch", "safetensors", "dcp-2", "bare"}
    assert {each["skipped"] for each in rows} == {"needs root, to mount"}


def test_why_nothing_can_be_mounted(monkeypatch):
    """What makes the tests skip is the reason in the report."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mount.missing() == "needs root, to mount"
