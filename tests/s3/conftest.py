"""Fixtures for all tests here; all of them need the S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.s3 import _proxy, no_waits, place, proxy, seaweed

__all__ = ["_proxy", "no_waits", "place", "proxy", "seaweed"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.s3)
