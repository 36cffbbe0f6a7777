"""What the tests of the tree share."""

from __future__ import annotations

import pytest

from shardstore.tree import registry


@pytest.fixture
def own_registry():
    """The registry of types, which is as before after the test."""
    before = dict(registry.BY_CLASS), dict(registry.BY_NAME)
    yield registry
    for table, entries in zip((registry.BY_CLASS, registry.BY_NAME), before, strict=True):
        table.clear()
        table.update(entries)
