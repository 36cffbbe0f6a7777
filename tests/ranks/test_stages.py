"""Pipeline stages: ranks with different keys make one checkpoint, and any cut of the model loads from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardstore
from tests.ranks.conftest import Ranks
from tests.ranks.models import print_of, print_of_data
from tests.ranks.stages import build


def united(found: list[dict[str, str]]) -> dict[str, str]:
    """The prints of all stages, which agree on what they share."""
    whole: dict[str, str] = {}
    for one in found:
        assert all(whole.get(name, value) == value for name, value in one.items())
        whole |= one
    return whole


CUTS = [(2, 2, False), (3, 3, False), (4, 2, False), (4, 2, True)]


@pytest.mark.parametrize(("size", "stages", "fsdp"), CUTS)
def test_stages_load_as_stages_whole_and_as_data(tmp_path: Path, ranks: Ranks, size: int, stages: int, fsdp: bool):
    """Weights and moments come back bit-equal.

    Into the same stages, into whole models on other numbers of ranks, into one process, and as data; what two stages
    share is stored once.
    """
    url = str(tmp_path / "c")
    saved = ranks.run("save_stages", size, url=url, stages=stages, fsdp=fsdp)
    assert all(one["digest"] for one in saved), saved
    whole = united([one["print"] for one in saved])
    again = ranks.run("load_stages", size, url=url, stages=stages, fsdp=fsdp)
    assert again == [one["print"] for one in saved]
    assert ranks.run("load_whole", 2, url=url, stages=stages) == [whole] * 2
    alone = build(stages, seed=1, trained=0, whole=True)
    shardstore.load(url, into=alone)
    assert print_of(alone) == whole
    assert print_of_data(shardstore.load(url)) == whole
    stored = [path for path in shardstore.open(url) if path.startswith("model/")]
    assert len(stored) == len({name for name in whole if name.startswith("model.")})
    assert shardstore.verify(url).ok


def test_the_checkpoint_of_a_whole_model_loads_into_stages(tmp_path: Path, ranks: Ranks):
    """With strict=False, which says that a stage wants a part only; of the optimizer, too."""
    url = str(tmp_path / "c")
    state = build(2, whole=True)
    shardstore.save(state, url)
    names = print_of(state)
    assert united(ranks.run("load_stages_of_whole", 2, url=url, stages=2)) == names


def test_an_optimizer_that_never_stepped_comes_back_so(tmp_path: Path, ranks: Ranks):
    """Stages whose optimizers have no state yet: none is invented, neither at the save nor at the load."""
    url = str(tmp_path / "c")
    saved = ranks.run("save_stages", 2, url=url, stages=2, trained=0)
    loaded = ranks.run("load_stages", 2, url=url, stages=2)
    assert loaded == [one["print"] for one in saved]
    assert not any(name.startswith("optimizer") for name in united(loaded))
    assert shardstore.load(url)["optimizer"]["state"] == {}


@pytest.mark.parametrize(("size", "fsdp"), [(2, False), (4, True)])
def test_stages_that_disagree_on_what_they_share_are_refused(tmp_path: Path, ranks: Ranks, size: int, fsdp: bool):
    """An embedding with other values on two stages, whole or spread by FSDP2, is named; nothing stays."""
    found: list[dict[str, Any]] = ranks.run("unequal_stages", size, url=str(tmp_path / "c"), fsdp=fsdp)
    assert all(one["error"] == "UnsupportedState" for one in found)
    assert all("model/embedding.weight" in one["text"] and "PerRank" in one["text"] for one in found)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_stage_still_misses_what_it_wants(tmp_path: Path, ranks: Ranks):
    """What a stage has and the checkpoint lacks is an error, though what it lacks is not."""
    url = str(tmp_path / "c")
    ranks.run("save_stages", 2, url=url, stages=2)
    found = ranks.run("load_more", 2, url=url)
    assert found[0]["error"] == "Mismatch"
    assert "layer9" in found[0]["text"]


def test_ties_that_one_rank_of_a_stage_has_are_refused(tmp_path: Path, ranks: Ranks):
    """Tied on its first rank, with values of their own on the second: that rank's values can't get lost."""
    found = ranks.run("ties_of_one_rank", 3, url=str(tmp_path / "c"))
    assert [one.get("error") for one in found] == ["PeerError", "UnsupportedState", "PeerError"], found
    assert all("x/b" in one["text"] and "tied" in one["text"] for one in found)
    assert not list(tmp_path.rglob("*.safetensors"))
