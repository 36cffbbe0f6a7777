"""One checkpoint from many processes, loaded at any number of them and in any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardstore
from tests.ranks.conftest import Ranks
from tests.ranks.models import print_of_data

SAVED = [
    ("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4),
    ("fsdp+tp", 4), ("ddp", 2),
]  # fmt: skip
LOADED = [*SAVED, ("hsdp", 2), ("ddp", 3)]

Saved = dict[tuple[str, int], tuple[str, dict[str, str]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Saved:
    """A trained model with its AdamW, saved from every layout; where, and the digests of all its tensors."""
    folder, found = tmp_path_factory.mktemp("layouts"), {}
    for layout, size in SAVED:
        url = str(folder / f"{layout}-{size}")
        prints = ranks.run("save", size, layout=layout, url=url)
        assert prints == [prints[0]] * size
        found[layout, size] = url, prints[0]
    return found


@pytest.mark.parametrize(("layout", "size"), LOADED)
def test_every_layout_loads_from_every_other(ranks: Ranks, saved: Saved, layout: str, size: int):
    """Weights and moments of all ten checkpoints are bit-equal in models and optimizers that never made a step."""
    loaded = ranks.run("load_all", size, layout=layout, urls=[url for url, _ in saved.values()])
    for mine in loaded:
        assert dict(zip(saved, mine, strict=True)) == {key: prints for key, (_, prints) in saved.items()}


def test_every_layout_loads_as_data(ranks: Ranks, saved: Saved):
    """In one process without ranks and on each of two ranks; and every checkpoint is whole."""
    wanted = [prints for _, prints in saved.values()]
    assert [print_of_data(shardstore.load(url)) for url, _ in saved.values()] == wanted
    assert ranks.run("load_data", 2, urls=[url for url, _ in saved.values()]) == [wanted] * 2
    assert all(shardstore.verify(url).ok for url, _ in saved.values())


def test_layouts_that_torch_gets_wrong_are_refused(tmp_path: Path, ranks: Ranks):
    """FSDP2 of 3 over tensor parallelism of 2, 7 rows.

    Torch claims that a rank holds other rows than it does, so they would be filed under a wrong place. Named on every
    rank, and nothing is written.
    """
    found = ranks.run("save_untrained", 6, layout="fsdp+tp", url=str(tmp_path / "c"), wide=7)
    assert "UnsupportedState" in {told["error"] for told in found}
    assert all("model/inner.weight" in told["text"] and "is in doubt" in told["text"] for told in found), found
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_ties_load_into_tensors_that_are_cut_differently(tmp_path: Path, ranks: Ranks):
    """One stored tensor, wanted whole, by rows and by columns at once: every rank gets the bytes of each."""
    tensor = torch.arange(600 * 300.0).view(600, 300)
    shardstore.save({"x": dict.fromkeys("abc", tensor)}, str(tmp_path / "c"))
    assert ranks.run("load_ties_apart", 2, url=str(tmp_path / "c")) == [[True] * 3] * 2


def test_parts_are_not_taken_from_a_mesh_that_is_gone(ranks: Ranks):
    """A slice of a mesh is a new object each time, and its id is used again when it dies: no part is misplaced."""
    assert ranks.run("short_lived_meshes", 4) == [0] * 4
