"""`Checkpointer` with several ranks: they save, stop and resume together."""

from __future__ import annotations

import signal
from pathlib import Path

import shardstore
from tests.ranks.conftest import Ranks


def _same(ranks_found: list[dict]) -> dict:
    assert all(found["print"] == ranks_found[0]["print"] for found in ranks_found)
    return ranks_found[0]


def test_a_resume_is_bit_equal_and_every_rank_has_its_own_random_states(tmp_path: Path, ranks: Ranks):
    """Stopped by a kill of all after step 5 and resumed: weights, moments and each rank's RNG as without a stop."""
    whole = ranks.run("train", 2, url=str(tmp_path / "whole"), total=8)
    killed = ranks.outcomes("train", 2, url=str(tmp_path / "run"), total=8, kill={"0": 5, "1": 5})
    assert all(outcome.value is None for outcome in killed)
    resumed = ranks.run("train", 2, url=str(tmp_path / "run"), total=8)
    assert _same(resumed)["print"] == _same(whole)["print"]
    assert [found["random"] for found in resumed] == [found["random"] for found in whole]
    assert whole[0]["random"] != whole[1]["random"]
    assert next(one.step for one in shardstore.Run(str(tmp_path / "run")).candidates()) == 8


def test_a_signal_to_one_rank_ends_all_at_the_same_step_with_one_checkpoint(tmp_path: Path, ranks: Ranks):
    """SIGTERM to rank 1 of 2 at step 3: both leave after the next step, with 143, and that step is saved once."""
    found = ranks.run(
        "train", 2, url=str(tmp_path / "run"), total=50, every_steps=None, signals={"1": [signal.SIGTERM, 3]}
    )
    assert [one["code"] for one in found] == [143, 143]
    assert [one["completed"] for one in found] == [5, 5]
    assert [one.step for one in shardstore.Run(str(tmp_path / "run")).candidates()] == [5]


def test_a_wish_to_save_of_one_rank_is_one_save_of_all(tmp_path: Path, ranks: Ranks):
    """SIGUSR1 to rank 1: one checkpoint at the next step, and training goes on; also with background saves."""
    for background in (False, True):
        run = tmp_path / f"run{background}"
        ranks.run(
            "train", 2, url=str(run), total=9, every_steps=None, background=background,
            signals={"1": [signal.SIGUSR1, 3]},
        )  # fmt: skip
        assert sorted(one.step for one in shardstore.Run(str(run)).candidates()) == [5, 9]


def test_another_number_of_ranks_goes_on_and_says_what_is_not_the_same(tmp_path: Path, ranks: Ranks):
    """Saved by 2, resumed by 3: weights and moments are whole, and the listener is told of the random states."""
    two = ranks.run("train", 2, url=str(tmp_path / "run"), total=4)
    three = ranks.run("train", 3, url=str(tmp_path / "run"), total=4)
    assert _same(three)["print"] == _same(two)["print"]
    assert any("2 ranks have saved, 3 resume" in text for text in three[0]["noticed"])


def test_where_one_rank_meets_damage_all_fall_back_together(tmp_path: Path, ranks: Ranks):
    """A flipped bit in a file of rank 1's: both ranks resume from the older step, and the newest is in quarantine."""
    ranks.run("train", 2, url=str(tmp_path / "run"), total=4)
    newest = next(path for path in (tmp_path / "run").glob("step-00000004-*"))
    file = max(newest.glob("state/00002-of-*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = ranks.run("train", 2, url=str(tmp_path / "run"), total=6)
    assert all(len(one["losses"]) == 4 for one in found)
    whole = ranks.run("train", 2, url=str(tmp_path / "whole"), total=6)
    assert _same(found)["print"] == _same(whole)["print"]
    run = shardstore.Run(str(tmp_path / "run"))
    assert [one.step for one in run.checkpoints() if one.quarantined] == [4]
