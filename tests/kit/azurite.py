"""Azurite, the emulator of Azure Blob Storage, where it is installed (npm: azurite)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tests.kit.weed import HOST, Process, answers, free_ports, wait_until

CONTAINER = "container"
# The account that its documentation gives, which every Azurite has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-08-06"


def binary() -> str:
    """The program `azurite-blob`, named by the variable AZURITE or on the PATH; else the test is skipped."""
    found = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if not found:
        pytest.skip("needs azurite-blob (npm: azurite) on the PATH, or its path in AZURITE")
    return found


def options_for(endpoint: str, **more: Any) -> dict[str, Any]:
    """`storage_options` for the server."""
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}/{ACCOUNT}"
    return {"connection_string": text, **more}


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """The URL of a running server with one container."""
    program, port = binary(), free_ports(1)[0]
    endpoint = f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="shardstore-test-") as folder:
        command = [program, "--blobHost", HOST, "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
        command += ["--silent", "--skipApiVersionCheck"]
        process = Process(command, Path(folder) / "server.log")
        try:
            wait_until(lambda: answers(f"{endpoint}/"), "an Azurite that answers", process)
            _make_container(endpoint)
            yield endpoint
        finally:
            process.stop(signal.SIGTERM)


@pytest.fixture
def container() -> str:
    """The URL of an empty place."""
    return f"az://{CONTAINER}/{secrets.token_hex(6)}/run/step-7"


def _make_container(endpoint: str) -> None:
    """By its REST API, signed with the shared key: shardstore itself never makes one."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
    text = "PUT" + "\n" * 12 + f"{headers}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(
        f"{endpoint}/{ACCOUNT}/{CONTAINER}?restype=container", method="PUT",
        headers={"x-ms-date": date, "x-ms-version": _VERSION, "Authorization": f"SharedKey {ACCOUNT}:{signature}"},
    )  # fmt: skip
    urllib.request.urlopen(request).close()
