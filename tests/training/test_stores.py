"""Training on stores that are no file systems."""

from __future__ import annotations

import pytest

from shardstore.errors import StoreError
from shardstore.run import Run
from shardstore.training import Checkpointer, KeepLast
from tests.kit.mishaps import access_denied
from tests.kit.proxy import FaultProxy
from tests.kit.s3 import _proxy, no_waits, place, proxy, seaweed
from tests.kit.same import assert_same
from tests.training.kit import small, trained, weights

__all__ = ["_proxy", "no_waits", "place", "proxy", "seaweed"]


def lives(url, options, background):
    """A training of seven steps in three lives; what it has left, and whether the end is that of one life."""
    how = {"keep": [KeepLast(2)], "background": background, "storage_options": options, "every_steps": 2}
    for steps in (3, 5):
        trained(url, steps, **how)
    state = small(seed=9)
    with Checkpointer(url, state, **how) as ckpt:
        assert ckpt.resume() == 5
    state = trained(url, 7, **how)
    with Run(url, options) as run:
        assert list(run.losses()) == list(range(1, 8))
        assert [one.step for one in run.checkpoints()] == [5, 6, 7]
        assert run.verify(7).ok
    return weights(state)


@pytest.mark.parametrize("background", [False, True])
def test_a_run_in_memory(tmp_path, background):
    """For tests of training code: all works but surviving the process."""
    expected = weights(trained(tmp_path / "run", 7))
    assert_same(lives(f"memory://training-{background}", None, background), expected)


@pytest.mark.s3
def test_a_run_in_a_bucket(tmp_path, place):
    """Resume, losses in segments, retention and background saves on S3."""
    assert_same(lives(place.url, place.options, background=True), weights(trained(tmp_path / "run", 7)))


@pytest.mark.s3
def test_a_forbidden_read_ends_the_resume_and_leaves_no_mark(place, proxy: FaultProxy):
    """403 says nothing of the bytes: no older checkpoint is taken, and when it has passed, the newest is."""
    trained(place.url, 2, storage_options=place.options)
    options = {**place.options, "endpoint_url": proxy.url, "attempts": 2}
    proxy.on("get_object", access_denied, key=r"safetensors$", times=1000)
    with Checkpointer(place.url, small(), storage_options=options) as ckpt, pytest.raises(StoreError, match="denied"):
        ckpt.resume()
    proxy.clear()
    with Checkpointer(place.url, small(), storage_options=options) as ckpt:
        assert ckpt.resume() == 2
    with Run(place.url, place.options) as run:
        assert not any(one.quarantined for one in run.checkpoints())
