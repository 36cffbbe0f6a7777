"""The steps of the tests, by name: what each rank does between joining and leaving."""

from __future__ import annotations

from typing import Any

import shardstore
from tests.ranks.faulty import told
from tests.ranks.jobs import step
from tests.ranks.models import build, print_of, print_of_data
from tests.ranks.states import make


@step
def save(layout: str, url: str, wide: int = 8, trained: int = 2) -> dict[str, str]:
    """Train in a layout and save."""
    state = build(layout, wide=wide, trained=trained)
    shardstore.save(state, url)
    return print_of(state)


@step
def load_into(layout: str, url: str, wide: int = 8) -> dict[str, str]:
    """Load into a fresh model of a layout, whose optimizer has never stepped."""
    state = build(layout, seed=1, wide=wide)
    shardstore.load(url, into=state)
    return print_of(state)


@step
def load_fresh(url: str) -> dict[str, str]:
    """Load everything as data."""
    return print_of_data(shardstore.load(url))


@step
def save_each(url: str, names: list[str], **options: Any) -> dict[str, Any]:
    """Save several states, each at a place of its own; what came of each."""
    return {name: told(lambda name=name: shardstore.save(make(name), f"{url}/{name}", **options)) for name in names}
