"""Ranks that fail, die, sleep, are late or do something else: an error on all in bounded time, never half a checkpoint.

The time for which ranks wait is made short here, and nothing is asserted on how long anything takes: who would wait for
ever runs into the time-out of the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardstore
from tests.crash.zygote import Outcome
from tests.kit.weed import free_ports
from tests.ranks.conftest import Ranks

SECONDS = 2
ADVICE = "every rank of the group must make the same calls (SHARDSTORE_TIMEOUT_SECONDS"


def values(found: list[Outcome]) -> list[Any]:
    """What the ranks returned; None for those that were killed."""
    return [None if outcome.signal else outcome.value for outcome in found]


def committed(url: Path) -> bool:
    """Whether there is an index."""
    return (url / "shardstore.json").exists()


def files(url: Path, pattern: str = "*") -> list[str]:
    """All files below a folder but claims."""
    return sorted(
        str(path.relative_to(url)) for path in url.rglob(pattern) if path.is_file() and ".claims" not in str(path)
    )


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("missing", [[1, 2], [2], [0]])
def test_D01_ranks_that_do_not_come_are_named(tmp_path: Path, ranks: Ranks, missing: list[int], before: int):
    """Some ranks call save, others don't.

    An error that names the latter and says what to do, at the first save of a group and at a later one; afterwards all
    save together as if nothing had been.
    """
    found = ranks.run("absent", 3, seconds=SECONDS, url=str(tmp_path), missing=missing, before=before)
    for rank, mine in enumerate(found):
        if rank not in missing:
            told = mine[before]
            assert told["error"] == "PeerError", told
            assert told["ranks"] == missing
            assert told["phase"] == "begin"
            assert ADVICE in told["text"]
    assert not committed(tmp_path / "partial")
    assert all(mine[-1].get("digest") for mine in found), found
    assert shardstore.verify(str(tmp_path / "after")).ok


PLACES = [
    ("begin", 0), ("begin", 2), ("write", 0), ("write", 1), ("answer", 2), ("commit", 0),
]  # fmt: skip


@pytest.mark.parametrize(("place", "who"), PLACES)
def test_D02_what_one_rank_raises_is_raised_by_all(tmp_path: Path, ranks: Ranks, place: str, who: int):
    """One rank raises, wherever it stands.

    All others raise with its number and its words; no index, no shard is left, and the same processes save at once
    afterwards.
    """
    found = ranks.run("troubled", 3, url=str(tmp_path), who=who, place=place, kind="raise")
    phase = "write" if place != "begin" else place
    for rank, (told, after) in enumerate(found):
        if rank == who:
            assert told["error"] == "ValueError"
        else:
            assert told["error"] == "PeerError"
            assert told["ranks"] == [who]
            assert told["text"] == f"rank {who} failed in the phase {phase!r}: ValueError: trouble of the test"
        assert after["digest"] == found[0][1]["digest"]
    assert not committed(tmp_path / "troubled")
    assert not files(tmp_path / "troubled", "*.safetensors")
    assert shardstore.verify(str(tmp_path / "next")).ok


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("kind", ["interrupt", "exit"])
def test_an_interrupt_on_one_rank_is_told(tmp_path: Path, ranks: Ranks, kind: str, who: int):
    """KeyboardInterrupt and SystemExit in the middle of a rank's writing: it gets them, the others learn of them."""
    found = ranks.run("troubled", 3, url=str(tmp_path), who=who, place="write", kind=kind)
    name = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}[kind]
    assert [told["error"] for told, _ in found] == [name if rank == who else "PeerError" for rank in range(3)]
    assert all(name in told["text"] for rank, (told, _) in enumerate(found) if rank != who)
    assert not committed(tmp_path / "troubled")
    assert all(after["digest"] for _, after in found)


@pytest.mark.parametrize("who", [0, 1])
def test_D02_a_state_that_one_rank_can_not_save(tmp_path: Path, ranks: Ranks, who: int):
    """One rank's state is refused, or its URL is nonsense: the others hear of it before a byte is written."""
    for found in ranks.run("in_planning", 2, url=str(tmp_path), who=who)[1 - who : 2 - who]:
        refused, nowhere, good = found
        assert refused["error"] == nowhere["error"] == "PeerError"
        assert "bad/" in refused["text"]
        assert "nonsense" in nowhere["text"]
        assert good["digest"]
    assert not files(tmp_path / "bad")
    assert not files(tmp_path / "nowhere")


def test_D03_ranks_that_make_other_calls(tmp_path: Path, ranks: Ranks):
    """Another place, step, hash, number of shards, or a call that is wrong on one rank alone.

    Compared before anything is written, and named; the next call, in which all agree, succeeds.
    """
    found = ranks.run("other_arguments", 3, seconds=SECONDS, url=str(tmp_path))
    names = ["url", "step", "hash", "overwrite", "shards"]
    for mine in found:
        for name, told in zip(names, mine[:5], strict=True):
            assert told["error"] == "InvalidArgument", told
            assert told["text"].startswith(f"rank 0 calls save with {name}=")
            assert "rank 1 with" in told["text"]
        assert mine[-1]["digest"] == found[0][-1]["digest"]
    assert found[1][5]["error"] == "InvalidArgument"
    assert found[0][5]["error"] == found[2][5]["error"] == "PeerError"
    assert found[0][5]["ranks"] == [1]
    assert {name.split("/")[0] for name in files(tmp_path)} == {"good"}


def test_D05_a_file_that_vanishes_before_the_commit(tmp_path: Path, ranks: Ranks):
    """A shard of rank 1 is gone when rank 0 commits: all raise, and there is no index."""
    found = ranks.run("vanishing", 2, url=str(tmp_path / "c"))
    assert [told["error"] for told in found] == ["KeyMissing"] * 2
    assert all("00002-of-" in told["text"] for told in found)
    assert not files(tmp_path / "c")


DEATHS = [
    ("begin", 0), ("begin", 1), ("write", 0), ("write", 2), ("answer", 0), ("answer", 1), ("commit", 0),
]  # fmt: skip


@pytest.mark.parametrize(("place", "who"), DEATHS)
def test_a_rank_that_is_killed(tmp_path: Path, ranks: Ranks, place: str, who: int):
    """SIGKILL at every phase: the others raise and name it, and nothing is committed.

    When rank 0 is gone after it has heard all, nobody can tell, and every file stays.
    """
    found = ranks.outcomes(
        "troubled", 3, seconds=SECONDS, url=str(tmp_path), who=who, place=place, kind="die", again=False
    )
    assert found[who].signal == 9
    for rank, mine in enumerate(values(found)):
        if rank == who:
            continue
        (told,) = mine
        if place == "commit":
            assert told["error"] == "CommitUnknown", told
        else:
            assert told["error"] == "PeerError", told
            assert told["ranks"] == [who]
    assert not committed(tmp_path / "troubled")
    if place == "commit":
        assert len(files(tmp_path / "troubled", "*.safetensors")) == 3
    with pytest.raises(shardstore.CheckpointNotFound):
        shardstore.load(str(tmp_path / "troubled"))


def test_rank_0_is_killed_right_after_the_commit(tmp_path: Path, ranks: Ranks):
    """The answer is lost, the checkpoint is there: CommitUnknown, nobody removes a file, and it loads."""
    url = tmp_path / "c"
    fault = {"nth": 1, "calls": ["put"], "when": "killed", "key": "shardstore.json"}
    found = ranks.outcomes("store_trouble", 3, seconds=SECONDS, url=str(url), who=0, fault=fault)
    assert found[0].signal == 9
    assert [told["error"] for told in values(found)[1:]] == ["CommitUnknown"] * 2
    assert shardstore.verify(str(url)).ok
    assert shardstore.load(str(url))["split"]["w"].flatten().tolist() == list(range(24))


def test_a_rank_that_is_cut_off_after_the_commit_removes_nothing(tmp_path: Path, ranks: Ranks):
    """Its answer is lost, and rank 0 gives up the next save: that says nothing of the first, which stays whole."""
    found = ranks.run("cut_off", 2, seconds=10, url=str(tmp_path))
    assert found[0][0]["digest"], found
    assert found[0][1]["error"] == "PeerError"
    assert found[1][0]["error"] == "CommitUnknown", found
    assert shardstore.verify(str(tmp_path / "first")).ok


@pytest.mark.parametrize("place", ["begin", "write", "commit"])
def test_the_store_of_the_process_group_dies_with_rank_0(tmp_path: Path, ranks: Ranks, place: str):
    """Without torchrun it lies in rank 0: the others end as well, though there are no notes to read any more."""
    (port,) = free_ports(1)
    found = ranks.outcomes(
        "troubled", 3, seconds=SECONDS, hosted=port, url=str(tmp_path), who=0, place=place, kind="die", again=False
    )  # fmt: skip
    for mine in values(found)[1:]:
        assert mine[0]["error"] == ("CommitUnknown" if place == "commit" else "PeerError"), mine
    assert not committed(tmp_path / "troubled")


@pytest.mark.parametrize(("who", "key"), [(0, ".safetensors"), (1, ".safetensors"), (0, "shardstore.json")])
def test_a_rank_whose_disk_fails(tmp_path: Path, ranks: Ranks, who: int, key: str):
    """A write of one rank fails for good: StoreError there, the first cause everywhere, and nothing is left."""
    fault = {"nth": 1, "errno": 28, "calls": ["put"], "key": key, "times": 9}
    found = ranks.run("store_trouble", 3, url=str(tmp_path / "c"), who=who, fault=fault)
    assert found[who]["error"] == "StoreError"
    assert all("no space is left" in told["text"] for told in found)
    assert not files(tmp_path / "c", "*.safetensors")
    assert not committed(tmp_path / "c")


@pytest.mark.parametrize(("place", "who"), [("begin", 1), ("write", 2), ("write", 0), ("commit", 0)])
def test_D16_a_rank_that_sleeps_for_ever(tmp_path: Path, ranks: Ranks, place: str, who: int):
    """No rank waits longer than the time-out, and each says who is missing and in which phase."""
    found = ranks.outcomes(
        "troubled", 3, asleep=who, seconds=SECONDS, url=str(tmp_path), who=who, place=place, kind="sleep", again=False
    )  # fmt: skip
    for rank, mine in enumerate(values(found)):
        if rank == who:
            continue
        (told,) = mine
        if place == "commit":
            assert told["error"] == "CommitUnknown"
            assert "rank 0 can't be heard any more" in told["text"]
        else:
            assert told["error"] == "PeerError"
            assert (told["ranks"], told["phase"]) == ([who], place)
    assert not committed(tmp_path / "troubled")


def test_a_rank_that_comes_late(tmp_path: Path, ranks: Ranks):
    """It is told at once that the others have given up, instead of waiting for them; the next save is whole."""
    found = ranks.run("late", 3, seconds=SECONDS, url=str(tmp_path))
    assert [mine[0]["error"] for mine in found] == ["PeerError"] * 3
    assert [mine[0]["ranks"] for mine in found] == [[2]] * 3
    assert "comes too late" in found[2][0]["text"]
    assert all(mine[1].get("digest") for mine in found), found
    assert not committed(tmp_path / "late")
    assert shardstore.verify(str(tmp_path / "next")).ok
