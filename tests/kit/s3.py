"""Fixtures for tests on S3: one SeaweedFS for a session, a place of its own for each test, a fault proxy in between.

Import them into a `conftest.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import stamina

from shardstore.errors import KeyMissing
from shardstore.events import to_log
from shardstore.index import NAME
from shardstore.storage import conditions
from shardstore.storage.s3 import S3Store
from tests.kit.proxy import FaultProxy
from tests.kit.weed import ACCESS_KEY, SECRET_KEY, Weed, server

BUCKET = "bucket"
MIB = 1 << 20


def options_for(endpoint: str, **more: Any) -> dict[str, Any]:
    """`storage_options` for the server, or a proxy in front of it."""
    return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": endpoint, **more}


def hasty(endpoint: str, **more: Any) -> dict[str, Any]:
    """The same, for a client that gives up soon, and tells its pid."""
    config = {"read_timeout": 2, "connect_timeout": 2, "user_agent_extra": f"pid/{os.getpid()}"}
    return options_for(endpoint, attempts=4, part_bytes=5 * MIB, config_kwargs=config, **more)


@dataclass(frozen=True)
class Place:
    """A prefix that nobody else uses, with a store there that goes straight to the server, for looking at it."""

    url: str
    store: S3Store
    options: dict[str, Any]

    @property
    def prefix(self) -> str:
        return self.url.split("/", 3)[3] + "/"

    def names(self) -> set[str]:
        """The keys of what lies there."""
        return {entry.key for entry in self.store.list()}

    def read(self, key: str) -> bytes:
        """The content of an object."""
        return self.store.get(key, limit=1 << 30).data

    def index(self) -> dict[str, Any] | None:
        """The index as plain JSON, None where there is none."""
        with suppress(KeyMissing):
            return json.loads(self.read(NAME))
        return None

    def uploads(self) -> list[str]:
        """The keys of multipart uploads that are neither complete nor aborted."""
        found = self.store._client.call("list_multipart_uploads", Prefix=self.prefix)
        return [upload["Key"].removeprefix(self.prefix) for upload in found.get("Uploads", ())]


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Weed]:
    """The server, with one bucket."""
    with tempfile.TemporaryDirectory(prefix="shardstore-test-") as folder, ExitStack() as stack:
        made = _started(Path(folder), stack)
        store = S3Store(f"s3://{BUCKET}", options_for(made.s3), to_log)
        store._client.call("create_bucket")
        yield made


def _started(folder: Path, stack: ExitStack) -> Weed:
    """A server; started again, with other ports, where somebody took one of them in the meantime."""
    for number in range(3):
        with suppress(RuntimeError):
            return stack.enter_context(server(folder / str(number), s3=True))
    return stack.enter_context(server(folder / "last", s3=True))


@pytest.fixture
def place(seaweed: Weed) -> Iterator[Place]:
    """An empty place."""
    url = f"s3://{BUCKET}/{secrets.token_hex(6)}/run/step-7"
    options = options_for(seaweed.s3)
    store = S3Store(url, options, to_log)
    yield Place(url, store, options)
    store.close()


@pytest.fixture(scope="session")
def _proxy(seaweed: Weed) -> Iterator[FaultProxy]:
    with FaultProxy(int(seaweed.s3.rpartition(":")[2]), {ACCESS_KEY: SECRET_KEY}) as made:
        yield made


@pytest.fixture
def proxy(_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy in front of the server that does nothing yet. What a server does with conditions is not known yet."""
    conditions.known.clear()
    yield _proxy
    _proxy.clear()
    conditions.known.clear()


@pytest.fixture
def no_waits() -> Iterator[None]:
    """Retries are made at once."""
    with stamina.set_testing(True, attempts=64, cap=True):
        yield
