"""A version 2 of the format, made for these tests: index and meta each have one more member."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardstore import schemas
from shardstore.cli import main
from shardstore.index import codec
from shardstore.tree import meta

GOLDEN = Path(__file__).parents[1] / "golden"
NOTE = "made of version 1"


class Index2(codec._Index):
    """The index of version 2."""

    note: codec.Short = "new"


@pytest.fixture
def version_2(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process one that writes version 2, of the index, of the meta, or of both."""

    def start(*, index: bool = True, structure: bool = True) -> None:
        if index:
            monkeypatch.setattr(schemas.INDEX, "current", "shardstore/2")
            monkeypatch.setattr(
                schemas.INDEX, "steps", {"shardstore/1": lambda old: {**old, "schema": "shardstore/2", "note": NOTE}}
            )
            monkeypatch.setattr(codec, "_Index", Index2)
        if structure:
            monkeypatch.setattr(schemas.META, "current", "shardstore-meta/2")
            monkeypatch.setattr(schemas.META, "steps", {"shardstore-meta/1": _meta_2})
            monkeypatch.setattr(meta, "_MEMBERS", [*meta._MEMBERS, "note"])

    return start


def _meta_2(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "schema": "shardstore-meta/2", "note": NOTE}


@pytest.fixture(params=["dtypes", "values", "flat", "module", "objects", "nothing", "pieces"])
def golden(request: pytest.FixtureRequest, shm_path: Path) -> Path:
    """A copy of each golden checkpoint of version 1."""
    return Path(shutil.copytree(GOLDEN / request.param, shm_path / request.param))


@pytest.fixture
def checkpoint(shm_path: Path) -> Path:
    """A copy of one of them."""
    return Path(shutil.copytree(GOLDEN / "module", shm_path / "module"))


@pytest.fixture
def call() -> Callable[..., Result]:
    """Call the command line in this process."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words], prog_name="shardstore")


@pytest.fixture
def call_json(call: Callable[..., Result]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Call it with --json; the exit code and the one document on stdout."""

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        result = call(*words, "--json")
        return result.exit_code, json.loads(result.stdout)

    return run
