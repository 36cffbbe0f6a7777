"""Fixtures for tests on S3: one SeaweedFS for a session, a place of its own for each test, a fault proxy in between.

Import them into a `conftest.py`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import stamina

from shardstore.events import to_log
from shardstore.storage import s3
from shardstore.storage.s3 import S3Store
from tests.kit.proxy import FaultProxy
from tests.kit.seaweed import KEY, OTHER_KEY, OTHER_SECRET, SECRET, SeaweedFS

BUCKET = "bucket"
MIB = 1 << 20


def options_for(endpoint: str, **more: Any) -> dict[str, Any]:
    """`storage_options` for the server, or a proxy in front of it."""
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, **more}


def hasty(endpoint: str, **more: Any) -> dict[str, Any]:
    """The same, for a client that gives up soon, and tells its pid."""
    config = {"read_timeout": 2, "connect_timeout": 2, "user_agent_extra": f"pid/{os.getpid()}"}
    return options_for(endpoint, attempts=4, part_bytes=5 * MIB, config_kwargs=config, **more)


@dataclass(frozen=True)
class Place:
    """A prefix that nobody else uses, with a store there that goes straight to the server, for looking at it."""

    url: str
    store: S3Store

    @property
    def prefix(self) -> str:
        return self.url.split("/", 3)[3] + "/"

    def keys(self) -> set[str]:
        """What lies there."""
        return {entry.key for entry in self.store.list()}

    def read(self, key: str) -> bytes:
        """The content of an object."""
        return self.store.get(key, limit=1 << 30).data

    def index(self) -> dict[str, Any] | None:
        """The index as plain JSON, None where there is none."""
        return json.loads(self.read("shardstore.json")) if "shardstore.json" in self.keys() else None

    def uploads(self) -> list[str]:
        """The keys of multipart uploads that are neither complete nor aborted."""
        found = self.store._client.call("list_multipart_uploads", Prefix=self.prefix)
        return [upload["Key"].removeprefix(self.prefix) for upload in found.get("Uploads", ())]


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedFS]:
    """The server, with one bucket."""
    with SeaweedFS() as server:
        store = S3Store(f"s3://{BUCKET}", options_for(server.s3), to_log)
        store._client.call("create_bucket")
        store.close()
        yield server


@pytest.fixture
def place(seaweed: SeaweedFS) -> Iterator[Place]:
    """An empty place."""
    url = f"s3://{BUCKET}/{secrets.token_hex(6)}/run/step-7"
    store = S3Store(url, options_for(seaweed.s3), to_log)
    yield Place(url, store)
    store.close()


@pytest.fixture
def proxy(seaweed: SeaweedFS) -> Iterator[FaultProxy]:
    """A proxy in front of the server that does nothing yet."""
    with FaultProxy(seaweed.ports["s3.port"], {KEY: SECRET, OTHER_KEY: OTHER_SECRET}) as made:
        yield made
    s3._probed.clear()  # a later proxy may get the same port


@pytest.fixture
def no_waits() -> Iterator[None]:
    """Retries are made at once."""
    stamina.set_testing(True, attempts=64, cap=True)
    yield
    stamina.set_testing(False)


def probed(options: Mapping[str, Any]) -> None:
    """Let the store find out now what the server does with conditions, so that the requests of a test are its own."""
    s3._probed[str(options["endpoint_url"]), BUCKET] = True
