"""Groups of ranks: some save while others don't, in the background, to several roots, over others, to S3."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardstore
from tests.kit.weed import ACCESS_KEY, SECRET_KEY, Weed, weed_s3  # noqa: F401
from tests.ranks.conftest import Ranks

WHOLE = [float(at) for at in range(24)]


def test_groups_of_some_ranks(tmp_path: Path, ranks: Ranks):
    """Two of four ranks save while the others do something else, two pairs save at once, then all do.

    Who is no member, and a DTensor that lies on other ranks as well, are refused by name.
    """
    found = ranks.run("subsets", 4, url=str(tmp_path))
    assert all(told["digest"] for one in found[:2] for told in one["pair"]), found
    assert all("not a member" in one["outsider"]["text"] for one in found[2:])
    assert [bool(one["cross"].get("digest")) for one in found] == [True] * 4, found
    assert found[0]["cross"] == found[2]["cross"] != found[1]["cross"]
    assert len({one["all"]["digest"] for one in found}) == 1
    assert all("not in group=" in one["too small"]["text"] for one in found[:2])
    assert all(one["alone"]["digest"] for one in found)
    assert all("let all of them save it" in one["split alone"]["text"] for one in found)
    assert all("must be a process group" in one["no group"]["text"] for one in found)
    for at in range(2):
        with shardstore.open(f"{tmp_path}/cross{at}") as lazy:
            assert lazy["model/w"][:].flatten().tolist() == [0.5 + at + place for place in range(10)]


def test_background_saves(tmp_path: Path, ranks: Ranks):
    """Each holds the state of its call, though that changes at once and another save runs in the foreground.

    All ranks get the same result. To skip a save is for one process alone.
    """
    found = ranks.run("in_the_background", 3, url=str(tmp_path))
    assert all(told["digest"] for one in found for told in one[:4]), found
    assert [one[:4] for one in found] == [found[0][:4]] * 3
    assert all(one[4]["error"] == "InvalidArgument" for one in found)
    for turn in range(2):
        for name, more in (("async", 0), ("sync", 100)):
            state = shardstore.load(f"{tmp_path}/{name}{turn}")
            assert state["split"]["w"].flatten().tolist() == [at + 100 * turn + more for at in WHOLE]
            assert state["same"]["w"][1] == 1 + 100 * turn + more


def test_a_background_save_that_fails_on_one_rank(tmp_path: Path, ranks: Ranks):
    """The error is raised at the result, on every rank; the next background save works."""
    found = ranks.run("failing_in_the_background", 3, url=str(tmp_path))
    assert [one[0]["error"] for one in found] == ["PeerError", "ValueError", "PeerError"]
    assert all(one[1]["digest"] for one in found)


def test_several_roots(tmp_path: Path, ranks: Ranks):
    """Shards of all ranks are striped over two roots, which load in any order."""
    found = ranks.run("several_roots", 3, url=str(tmp_path))
    assert all(one["digest"] and one["w"] == WHOLE for one in found)
    roots = [tmp_path / name / "c" for name in ("one", "two")]
    assert all(list(root.rglob("*.safetensors")) for root in roots)
    assert shardstore.verify([str(root) for root in roots]).ok


def test_over_another_checkpoint(tmp_path: Path, ranks: Ranks):
    """A checkpoint that is there is refused on all ranks, and replaced with overwrite=True.

    `expect` holds all ranks to the digest that the save gave.
    """
    found = ranks.run("over_another", 3, url=str(tmp_path / "c"))
    for again, old, values, digest in found:
        assert again["error"] == "CheckpointExists"
        assert old["error"] == "Damaged"
        assert values == [at + 1 for at in WHOLE]
        assert digest == found[0][3]
    assert shardstore.verify(str(tmp_path / "c")).ok


def test_on_s3(ranks: Ranks, weed_s3: Weed):  # noqa: F811
    """Save and load with three ranks on a real S3 server."""
    import s3fs

    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": weed_s3.s3}}
    s3fs.S3FileSystem(**options).mkdir("ranks")
    found = ranks.run("on_s3", 3, url="s3://ranks/c", options=options)
    assert all(one.get("digest") and one["w"] == WHOLE for one in found), found


def test_another_process_group_in_the_same_processes(tmp_path: Path, ranks: Ranks):
    """Nothing of a process group that was destroyed is used again."""
    found = ranks.run("another_world", 2, url=str(tmp_path), port=ranks.port)
    assert all(told.get("digest") for one in found for told in one), found


@pytest.mark.parametrize("size", [2, 4])
def test_D12_only_metadata_travels(tmp_path: Path, ranks: Ranks, size: int):
    """Two exchanges a save.

    A few kilobytes go to rank 0, whatever the tensors weigh; every rank puts its own share, all together the bytes that
    there are; nothing is pickled.
    """
    rows = 2048
    found = ranks.run("traffic", size, url=str(tmp_path), rows=rows)
    unique = rows * 1024 * 6 + 1_200_000
    for one in found:
        assert one["phases"] == ["begin", "write"]
        assert one["sent"] < 10_000 * size
        assert one["put"] < 1.1 * unique / size + 1_200_000
    assert unique <= sum(one["put"] for one in found) < unique + 4096 * size


def test_stages_need_one_exchange_more(tmp_path: Path, ranks: Ranks):
    """States that differ are united in a third exchange."""
    assert ranks.run("traffic_of_stages", 2, url=str(tmp_path / "c")) == [["begin", "merge", "write"]] * 2


def test_each_rank_reads_what_it_needs(shm_path: Path, ranks: Ranks):
    """Saved by 4, loaded by 3.

    A rank reads its own bytes and at most a block more for each piece that it needs some of; ranks say nothing to each
    other.
    """
    rows, needed = 8192, 5  # two pieces of each of the two split tensors, and one tensor that all have
    ranks.run("traffic", 4, url=str(shm_path), rows=rows)
    for one in ranks.run("reads", 3, url=f"{shm_path}/0", rows=rows):
        assert one["good"]
        assert one["said"] == 0
        assert one["read"] <= one["own"] + needed * 4 * 2**20
        assert one["read"] < 0.8 * (rows * 1024 * 6)
