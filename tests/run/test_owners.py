"""Who writes to a run."""

from __future__ import annotations

import os
import pickle
import socket

import pytest

from shardstore.errors import Fenced, StoreError
from shardstore.run import owners
from shardstore.run.owners import Owner, claim, current
from shardstore.storage import Bytes, open_store
from tests.kit.contract import together
from tests.kit.faults import Fault, FaultyStore, SlowStore

GONE = 2**22 + 1  # above the highest pid that Linux gives


def _put(store, epoch: int, **members) -> None:
    """The file of an owner that is not this process."""
    owner = Owner(store, epoch)
    owner._who.update(members)
    owner.beat()


def test_epochs_rise_and_older_owners_are_fenced(trainer, run):
    """Each owner takes the next epoch; the older one learns at its next check who has taken over."""
    first = run.take_owner()
    first.check()
    second = run.take_owner()
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(Fenced, match="taken over by another process") as caught:
        first.check()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.epoch, error.by, error.host, error.pid) == (1, 2, socket.gethostname(), os.getpid())
    second.check()


def test_epochs_stay_above_those_of_checkpoints(trainer, run):
    """Also where the files of owners were lost, a new owner's checkpoints sort above all that are there."""
    trainer.save(10, owner=7)
    assert run.take_owner().epoch == 8


def test_racing_owners_get_epochs_of_their_own(url):
    """Owners that start at once get different epochs, and one of them is above all others."""
    epochs = together(6, lambda _: claim(open_store(url)).epoch)
    assert sorted(epochs) == [1, 2, 3, 4, 5, 6]


def test_a_lost_answer_is_cleared_up(url):
    """Where the answer to the claim is lost, the file that is there tells that it was ours; no epoch is skipped."""
    store = FaultyStore(open_store(url), Fault(1, calls=frozenset({"put"}), when="after"))
    assert claim(store).epoch == 1
    assert store.fired
    assert claim(store).epoch == 2


def test_names_that_are_no_epochs_count_for_nothing(url):
    """Files of other names in owners/ fence nobody off."""
    store = open_store(url)
    for name in ("9.json", "00000009.json.bak", "00000009", "0000000x.json"):
        store.put(f"owners/{name}", Bytes(b"{}"))
    owner = claim(store)
    assert owner.epoch == 1
    owner.check()


@pytest.mark.parametrize(
    ("who", "age", "live"),
    [
        ({}, 0, True),
        ({}, 119, True),
        ({}, 121, False),
        ({"pid": GONE}, 0, False),
        ({"pid": GONE, "host": "another"}, 0, True),
        ({"host": "another"}, 121, False),
    ],
)
def test_who_is_live(url, monkeypatch, who, age, live):
    """Live is who was heard of within two minutes by the store's clock, unless its process is known to be dead."""
    store = open_store(url)
    _put(store, 1, **who)
    now = store.stat("owners/00000001.json").modified + age
    monkeypatch.setattr(type(store), "now", lambda _: now)
    assert current(store).live is live


def test_release_ends_it_at_once_but_keeps_the_epoch(url):
    """An owner that has ended is not live, whatever its age; the next one gets a higher epoch."""
    store = open_store(url)
    with claim(store) as owner:
        owner.keep_alive()
        assert current(store).live
    found = current(store)
    assert (found.ended, found.live, found.epoch) == (True, False, 1)
    assert claim(store).epoch == 2


def test_beats_come_on_a_thread_and_survive_a_failing_store(url):
    """The thread beats again after the store has failed, and ends with the owner."""
    faulty = FaultyStore(open_store(url))
    slow = SlowStore(faulty)
    owner = claim(slow)
    faulty._plan, faulty._seen = (Fault(1, calls=frozenset({"put"})),), [0]
    second = slow.gate("put", "00000001.json", "after")
    owner.keep_alive(0.001)
    second.wait_until_reached()  # only a put that came through stands there
    assert faulty.fired == [("put", "owners/00000001.json")]
    second.open()
    owner.release()
    assert owner._thread is not None
    assert not owner._thread.is_alive()


def test_the_first_error_is_not_masked(url):
    """An error in the block comes out, also where the release fails, too."""
    store = open_store(url)
    owner = claim(FaultyStore(store, Fault(2, calls=frozenset({"put"}), times=9)))
    with pytest.raises(ZeroDivisionError), owner:
        raise ZeroDivisionError
    owner = claim(FaultyStore(store, Fault(2, calls=frozenset({"put"}), times=9)))
    with pytest.raises(StoreError), owner:
        pass


def test_damaged_owner_files_still_fence(trainer, run):
    """A higher epoch counts by its name, whatever stands in it."""
    owner = run.take_owner()
    run.store.put(owners.key_of(5), Bytes(b"garbage"))
    with pytest.raises(Fenced) as caught:
        owner.check()
    assert caught.value.by == 5
