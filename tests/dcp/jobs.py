"""The ranks of `tests.ranks`, with the steps of these tests."""

from __future__ import annotations

import importlib

from tests.ranks import jobs

JOBS = jobs.JOBS


def warm_up() -> None:
    """Import what takes long."""
    jobs.warm_up()
    for name in ("torch.distributed.checkpoint", "shardstore.dcp", "tests.dcp.steps"):
        importlib.import_module(name)
