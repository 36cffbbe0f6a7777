"""Which library carries a URL, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shardstore.errors import InvalidArgument
from shardstore.events import Noticed
from shardstore.storage import Store, engines, obstore_client, open_store, unwrap
from shardstore.storage.memory import MemoryStore
from shardstore.storage.obstore_store import ObstoreStore
from shardstore.storage.s3 import S3Store

KEYS = {"key": "k", "secret": "s"}
AZURE = {"account_name": "a", "account_key": "a2V5"}
Open = Callable[..., tuple[Store, list[Noticed]]]


class _Plain(MemoryStore):
    """Stands for a file system of fsspec that is not installed here."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__(f"memory://{id(self)}")
        self.options = options


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a store; gives what lies at its heart, and what was said."""
    monkeypatch.setattr(engines, "_told", set())
    monkeypatch.setattr("shardstore.storage.generic.FsspecStore", _Plain)

    def opened(url: str, **options: Any) -> tuple[Store, list[Noticed]]:
        said: list[Noticed] = []
        return unwrap(open_store(url, storage_options=options, listener=said.append)), said

    return opened


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if obstore were not there."""
    for name in [name for name in sys.modules if name == "obstore" or name.startswith("obstore.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(obstore_client, "_shared", {})


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("s3://bucket/x", KEYS, S3Store),
        ("s3://bucket/x", {**KEYS, "engine": "auto"}, S3Store),
        ("s3://bucket/x", {**KEYS, "engine": "fsspec"}, S3Store),
        ("s3a://bucket/x", {**KEYS, "engine": "obstore"}, ObstoreStore),
        ("gs://bucket/x", {}, ObstoreStore),
        ("gcs://bucket/x", {"engine": "obstore"}, ObstoreStore),
        ("gs://bucket/x", {"engine": "fsspec"}, _Plain),
        ("az://bucket/x", AZURE, ObstoreStore),
        ("abfs://bucket/x", AZURE, ObstoreStore),
        ("abfss://bucket@a.dfs.core.windows.net/x", {}, ObstoreStore),
        ("az://bucket/x", {**AZURE, "engine": "fsspec"}, _Plain),
        ("sftp://host/x", {}, _Plain),
        ("sftp://host/x", {"engine": "fsspec"}, _Plain),
    ],
)
def test_choices(opened: Open, url: str, options: dict[str, Any], kind: type):
    """S3 goes through s3fs, Google and Azure through obstore, all else through fsspec; any of them on request."""
    store, said = opened(url, **options)
    assert type(store) is kind
    assert [notice.what for notice in said] == (
        ["goes through obstore"] if kind is ObstoreStore and options.get("engine") != "obstore" else []
    )


def test_a_choice_is_told_once(opened: Open):
    """For each bucket and process; it is no warning where all is well."""
    first, second, other = (opened(f"gs://{place}")[1] for place in ("bucket/one", "bucket/two", "another"))
    assert [(notice.url, notice.warning) for notice in first + other] == [
        ("gs://bucket", False),
        ("gs://another", False),
    ]
    assert second == []


@pytest.mark.parametrize(("url", "options"), [("gs://bucket/x", {}), ("az://bucket/x", AZURE)])
@pytest.mark.usefixtures("not_installed")
def test_without_obstore(opened: Open, url: str, options: dict[str, Any]):
    """Fsspec is taken, with a warning that says what is lost, and how to get it."""
    store, (notice,) = opened(url, **options)
    assert type(store) is _Plain
    assert store.options == options
    assert notice.warning
    assert "without conditions" in notice.what
    assert "pip install 'shardstore[obstore]'" in notice.what


@pytest.mark.parametrize(("url", "options"), [("s3://bucket/x", KEYS), ("gs://bucket/x", {}), ("az://bucket/x", AZURE)])
@pytest.mark.usefixtures("not_installed")
def test_obstore_is_asked_for_but_not_installed(opened: Open, url: str, options: dict[str, Any]):
    """An error that says what to do, not another engine."""
    with pytest.raises(InvalidArgument, match=r"pip install 'shardstore\[obstore\]'"):
        opened(url, engine="obstore", **options)


@pytest.mark.parametrize("version", ["0.9.5", "0.12.0"])
def test_obstore_is_too_old(opened: Open, monkeypatch: pytest.MonkeyPatch, version: str):
    """What older releases get wrong nobody is let in for."""
    monkeypatch.setattr("obstore.__version__", version)
    monkeypatch.setattr(obstore_client, "_shared", {})
    store, (notice,) = opened("gs://bucket/x")
    assert type(store) is _Plain
    assert f"obstore {version} is too old: pip install 'shardstore[obstore]'" in notice.what
    with pytest.raises(InvalidArgument, match="too old"):
        opened("gs://bucket/x", engine="obstore")


@pytest.mark.usefixtures("not_installed")
def test_s3_does_not_need_obstore(opened: Open):
    """Nothing is said of it."""
    store, said = opened("s3://bucket/x", **KEYS)
    assert (type(store), said) == (S3Store, [])


def test_an_option_without_a_counterpart(opened: Open):
    """Fsspec is taken, with a warning that names the option; where obstore was asked for, it is an error."""
    store, (notice,) = opened("gs://bucket/x", token="browser")
    assert type(store) is _Plain
    assert "no counterpart to token of gcsfs" in notice.what
    with pytest.raises(InvalidArgument, match="no counterpart to token of gcsfs"):
        opened("gs://bucket/x", token="browser", engine="obstore")


def test_our_own_options_reach_no_file_system(opened: Open):
    """Whoever sets how often a request is tried need not know which engine is taken."""
    store, _ = opened(
        "gs://b/x", engine="fsspec", part_bytes=1 << 24, in_flight=2, attempts=3, timeout_s=9, project="p"
    )
    assert store.options == {"project": "p"}


@pytest.mark.parametrize(
    "options",
    [{"part_bytes": 1}, {"in_flight": 0}, {"attempts": 0}, {"timeout_s": "1"}, {"engine": "s3fs"}, {"engine": None}],
)
def test_our_options_are_checked(opened: Open, options: dict[str, Any]):
    """What can't be is an error of the call, named, and no reason to take another engine."""
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        opened("gs://bucket/x", **options)


@pytest.mark.parametrize("url", ["sftp://host/x", "http://host/x"])
def test_schemes_that_obstore_is_not_used_for(opened: Open, url: str):
    """An error that says which it is used for."""
    with pytest.raises(InvalidArgument, match=r"only abfs, abfss, az, gcs, gs, s3, s3a"):
        opened(url, engine="obstore")


def test_obstore_is_imported_late():
    """Who saves to a disk does not pay for it."""
    program = "import sys, shardstore.storage as s; s.open_store('/nowhere'); print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
