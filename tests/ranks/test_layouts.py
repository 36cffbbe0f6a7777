"""One checkpoint from many processes, loaded at any number of them and in any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardstore
from tests.ranks.conftest import Ranks
from tests.ranks.models import print_of_data

PAIRS = [
    ("fsdp", 2, "fsdp", 3), ("fsdp", 3, "fsdp", 4), ("fsdp", 4, "fsdp", 1), ("fsdp", 1, "fsdp", 2),
    ("hsdp", 4, "fsdp", 2), ("tp", 2, "fsdp", 3), ("fsdp", 3, "tp", 2), ("fsdp+tp", 4, "hsdp", 4),
    ("fsdp", 2, "ddp", 2), ("ddp", 2, "fsdp+tp", 4), ("plain", 1, "fsdp+tp", 4), ("fsdp+tp", 4, "plain", 1),
]  # fmt: skip


@pytest.mark.parametrize(("before", "n", "after", "m"), PAIRS)
def test_every_layout_loads_into_every_other(tmp_path: Path, ranks: Ranks, before: str, n: int, after: str, m: int):
    """Weights and moments are bit-equal at another number of ranks and in another layout, as objects and as data."""
    url = str(tmp_path / "c")
    saved = ranks.run("save", n, layout=before, url=url)
    assert all(found == saved[0] for found in saved)
    loaded = ranks.run("load_into", m, layout=after, url=url)
    assert loaded == [saved[0]] * m
    assert print_of_data(shardstore.load(url, group=None)) == saved[0]
    assert shardstore.verify(url).ok
