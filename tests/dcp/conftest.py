"""Ranks that save and load through torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote
from tests.ranks.conftest import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Groups of ranks."""
    with Zygote("tests.dcp.jobs") as zygote:
        yield Ranks(zygote)
