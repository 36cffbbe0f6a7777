"""`open_store` and `join`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardstore.errors import InvalidArgument
from shardstore.storage import Bytes, LocalStore, MemoryStore, RetryingStore, join, open_store, unwrap
from tests.kit.contract import REPOSITORY


def test_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Text, pathlib and file:// mean the same folder; nothing is made or read before the first put."""
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "a", f"{tmp_path}/a", f"{tmp_path}/a/", f"file://{tmp_path}/a", "a", "./a", Path("a")):
        store = open_store(url)
        assert isinstance(store, RetryingStore)
        assert isinstance(unwrap(store), LocalStore)
        assert not (tmp_path / "a").exists()
        store.put("k", Bytes(b"x"))
        assert (tmp_path / "a/k").read_bytes() == b"x"
        (tmp_path / "a/k").unlink()
        (tmp_path / "a").rmdir()


@pytest.mark.parametrize("path", ["x/a://b", "100%41", "~/x", "$HOME", "a::b", "weird:name", "1://x"])
def test_paths_are_not_interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str):
    """Only a scheme at the very beginning makes a URL; per cent signs, tildes and variables stay as they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    open_store(path).put("k", Bytes(b"x"))
    assert (tmp_path / path / "k").exists()


def test_memory():
    """memory:// is a store of this process."""
    assert isinstance(unwrap(open_store("memory://x/y")), MemoryStore)


@pytest.mark.parametrize("url", ["nosuch://bucket/run"])
def test_a_scheme_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str):
    """Refused when it is opened or first used, and never taken for a folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=url):
        open_store(url).put("k", Bytes(b"x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", [Path("s3://bucket/run"), Path("memory://x")])
def test_a_url_in_pathlib_is_refused(url: Path):
    """Pathlib makes s3:/bucket of s3://bucket, which would be a folder."""
    with pytest.raises(InvalidArgument, match="pathlib"):
        open_store(url)


@pytest.mark.parametrize("bad", ["", "a\0b", b"x", "file://"])
def test_what_is_no_place(bad: str):
    """Refused at once."""
    with pytest.raises(InvalidArgument):
        open_store(bad)


def test_storage_options_of_a_folder(tmp_path: Path):
    """A local path takes none; an empty mapping is none."""
    open_store(tmp_path, storage_options={})
    with pytest.raises(InvalidArgument, match="endpoint_url"):
        open_store(tmp_path, storage_options={"endpoint_url": "x"})


def test_join():
    """The place of a key, for messages."""
    assert join("a/b/", "c") == join("a/b", "c") == "a/b/c"
    assert join("memory://x", "c/d") == "memory://x/c/d"
    assert join("a", "") == "a"


def test_no_heavy_imports():
    """Storage alone needs neither torch nor numpy nor fsspec."""
    script = "import sys, shardstore.storage; sys.exit(bool({'torch', 'numpy', 'fsspec', 's3fs'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False).returncode == 0
