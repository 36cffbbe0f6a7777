"""DCP on several ranks: what it saves through our writer loads at any number of them, by whatever way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardstore
from shardstore.errors import Unfinished
from tests.kit.damage import flip, shards_of
from tests.kit.same import assert_same
from tests.ranks.conftest import Ranks
from tests.ranks.models import print_of_data

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("before", "n", "after", "m"), [("fsdp", 2, "fsdp", 3), ("fsdp", 3, "plain", 1), ("fsdp+tp", 4, "fsdp", 2)]
)
def test_what_dcp_saves_loads_anywhere(tmp_path: Path, ranks: Ranks, before: str, n: int, after: str, m: int):
    """Weights, moments and step are bit-equal by `dcp.load`, by `shardstore.load` into objects, and as data."""
    url = str(tmp_path / "c")
    saved = ranks.run("dcp_save", n, layout=before, url=url)
    assert shardstore.verify(url).ok
    assert ranks.run("dcp_load", m, layout=after, url=url) == [[saved[0], 2]] * m
    assert ranks.run("load_into", m, layout=after, url=url) == [saved[0]] * m
    assert print_of_data(shardstore.load(url)) == saved[0]
    with shardstore.open(url) as opened:
        assert opened["model/inner.weight"].shape == (8, 6)


@pytest.mark.parametrize(("before", "n", "after", "m"), [("fsdp", 3, "fsdp", 2), ("plain", 1, "fsdp", 2)])
def test_what_we_save_dcp_loads(tmp_path: Path, ranks: Ranks, before: str, n: int, after: str, m: int):
    """`dcp.load` reads what `shardstore.save` wrote of a Module and an optimizer, sharded or not."""
    url = str(tmp_path / "c")
    saved = ranks.run("save", n, layout=before, url=url)
    assert ranks.run("dcp_load_weights", m, layout=after, url=url) == [saved[0]] * m


def test_planners_that_cache_their_plans(tmp_path: Path, ranks: Ranks):
    """Where a rank gets no new plan, it still writes to the place of this save, not to that of the first."""
    ranks.run("dcp_cached", 2, url=str(tmp_path / "c"))
    for at in range(3):
        whole = torch.arange(7.0) + at
        assert_same(shardstore.load(str(tmp_path / f"c{at}")), {"w": whole, "plain": whole * 2, "n": at})
        assert shardstore.verify(str(tmp_path / f"c{at}")).ok
        assert not list((tmp_path / f"c{at}").glob("attempt-*"))


def test_async_save_on_a_thread(tmp_path: Path, ranks: Ranks):
    """`dcp.async_save` commits the same through our writer."""
    url = str(tmp_path / "c")
    saved = ranks.run("dcp_save", 2, layout="fsdp", url=url, background=True)
    assert print_of_data(shardstore.load(url)) == saved[0]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "OSError: the disk has gone"), ("vanish", "of-00002"), ("differ", "n/: rank 0 and rank 1 have"),
        ("refuse", "UnsupportedState: f/: a builtin_function"),
    ],
)  # fmt: skip
def test_trouble_on_a_rank_commits_nothing(tmp_path: Path, ranks: Ranks, what: str, said: str):
    """One rank fails, a file is gone before the commit, or ranks contradict: an error on all, no index, no marks."""
    url = tmp_path / "c"
    found = ranks.run("dcp_trouble", 2, url=str(url), what=what)
    for failures, marking in found:
        assert said in "".join(failures.values())
        assert not marking
    assert not (url / "shardstore.json").exists()
    assert not shardstore.verify(str(url)).ok if any(url.iterdir()) else True


def test_a_killed_rank_commits_nothing(tmp_path: Path, ranks: Ranks):
    """A rank that is killed while it writes: the others get an error, and the place is unfinished."""
    url = tmp_path / "c"
    found = ranks.outcomes("dcp_trouble", 2, url=str(url), what="kill")
    assert found[1].signal == 9
    assert found[0].value[0]
    with pytest.raises(Unfinished):
        shardstore.load(str(url))


def test_a_bit_flip_is_told_by_every_rank(tmp_path: Path, ranks: Ranks):
    """The error that DCP hands on names the file and the tensor."""
    url = tmp_path / "c"
    ranks.run("dcp_trouble", 2, url=str(url), what="")
    shards = shards_of(url)
    assert len(shards) == 2
    for shard in shards:
        flip(url / shard, (url / shard).stat().st_size - 1)
    for errors in ranks.run("dcp_damaged", 2, url=str(url)):
        assert len(errors) == 2
        assert all("Damaged: " in error and "w/" in error for error in errors)
        assert all(any(shard in error for error in errors) for shard in shards)


def test_a_part_alone_is_refused(tmp_path: Path, ranks: Ranks):
    """DCP lets one rank save its part of a sharded tensor as if it were all; we don't."""
    found = ranks.run("dcp_alone", 2, url=str(tmp_path / "c"))
    assert "UnsupportedState: model/w: the ranks that save don't hold all of it" in found[0]
    assert not (tmp_path / "c" / "shardstore.json").exists()
