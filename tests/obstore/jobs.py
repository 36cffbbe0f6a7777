"""Child processes that save through obstore, at the price of a fork: the parent itself never makes a request by it."""

from __future__ import annotations

from typing import Any

import shardstore
from shardstore.errors import ShardstoreError
from shardstore.storage import conditions
from tests.crash.states import state
from tests.crash.zygote import _Server
from tests.kit.s3 import hasty


def save(url: str, endpoint: str, number: int, *, overwrite: bool = False) -> dict[str, Any]:
    """Save the state of a number; answers with the name of the error's class, if there is one."""
    options = hasty(endpoint, engine="obstore")
    for condition in (conditions.IF_ABSENT, conditions.IF_MATCH):  # known, so that all requests are of the save itself
        conditions.known[f"s3:{endpoint}", "bucket", condition] = True
    try:
        shardstore.save(state(number), url, step=number, overwrite=overwrite, threads=1, storage_options=options)
    except ShardstoreError as error:
        return {"error": type(error).__name__}
    return {"error": None}


if __name__ == "__main__":
    import obstore.store  # noqa: F401  so that the children have it

    _Server({"save": save}).serve()
