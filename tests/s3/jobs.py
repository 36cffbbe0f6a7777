"""Child processes that save over S3, at the price of a fork."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import shardstore
from shardstore.errors import ShardstoreError
from shardstore.storage import conditions
from tests.crash.states import state
from tests.crash.zygote import REPOSITORY, Zygote, _Server
from tests.kit.s3 import hasty


class S3Zygote(Zygote):
    """Forks child processes that do the jobs of this module, or another."""

    def __init__(self, module: str = __name__) -> None:
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )


def save(url: str, endpoint: str, number: int, *, overwrite: bool = False, engine: str = "fsspec") -> dict[str, Any]:
    """Save the state of a number; answers with the name of the error's class, if there is one."""
    options = hasty(endpoint, engine=engine)
    for condition in (conditions.IF_ABSENT, conditions.IF_MATCH):  # known: all requests are those of the save itself
        for asked in (endpoint, f"s3:{endpoint}"):  # as either engine names it
            conditions.known[asked, "bucket", condition] = True
    try:
        shardstore.save(state(number), url, step=number, overwrite=overwrite, threads=1, storage_options=options)
    except ShardstoreError as error:
        return {"error": type(error).__name__}
    return {"error": None}


if __name__ == "__main__":
    import s3fs  # noqa: F401  so that the children have it

    _Server({"save": save}).serve()
