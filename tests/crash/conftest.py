"""Child processes and places for the tests of crashes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote
from tests.kit.weed import weed, weed_mounts

__all__ = ["weed", "weed_mounts", "zygote"]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks child processes that have all imported."""
    with Zygote() as made:
        yield made
