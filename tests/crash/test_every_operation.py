"""A fault at the n-th operation, for every n of a save and of an overwrite, until a run ends without one.

Whatever the fault: what is loaded afterwards is the state before or the state after, no checkpoint loses a file,
`verify` finds it whole or unfinished, and the next save works.
"""

from __future__ import annotations

import errno
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import shardstore
from shardstore.errors import CheckpointExists, CommitUnknown, ShardstoreError, StoreError
from shardstore.index import NAME, mark_name
from shardstore.storage import Store
from tests.crash.places import files, in_line, named, prune, recovers, settled, temps
from tests.crash.states import BIG, number_of, state
from tests.crash.zygote import Zygote
from tests.kit.faults import CountingStore, Fault, FaultyStore
from tests.kit.inject import injected

pytestmark = pytest.mark.torture

FOREVER = 1_000_000
BEFORE, AFTER, NEXT = 3, 4, 5
MOST = 1000  # of operations: an end for a loop that would find none

OVERWRITES = [pytest.param(False, id="save"), pytest.param(True, id="overwrite")]


class Case:
    """One save under a fault: what was there before, and what it did."""

    def __init__(self, place: Path, *, overwrite: bool, before: int = BEFORE) -> None:
        self.place = place
        self.overwrite = overwrite
        self.before = before if overwrite else None
        self.stores: list[CountingStore] = []
        self.error: ShardstoreError | None = None
        if overwrite:
            shardstore.save(state(before), place, step=before)
        self.old = named(place)
        self.announced = {mark_name(json.loads((place / NAME).read_bytes())["attempt"])} if overwrite else set()
        """What may stay behind: the word that the old checkpoint is to be replaced, which harms nothing."""

    def run(self, *faults: Fault, threads: int = 1) -> bool:
        """Save; returns whether any fault came up."""
        faulty: list[FaultyStore] = []

        def wrap(store: Store) -> Store:
            faulty.append(FaultyStore(store, *faults))
            self.stores.append(CountingStore(faulty[-1]))
            return self.stores[-1]

        with injected(wrap):
            try:
                shardstore.save(state(AFTER), self.place, step=AFTER, overwrite=self.overwrite, threads=threads)
            except ShardstoreError as error:
                self.error = error
        return any(store.fired for store in faulty)

    @property
    def commit_called(self) -> bool:
        return any(NAME in store.keys("put") for store in self.stores)

    def check(self) -> int | None:
        """What must hold whatever the fault was; returns the number that is there."""
        allowed = {AFTER} if self.error is None else {self.before, AFTER} if self.commit_called else {self.before}
        seen = settled(self.place, *allowed)
        assert self.old <= files(self.place)
        assert temps(self.place) == []
        return seen


def numbers() -> Iterator[int]:
    """1, 2, 3, ... up to the number of operations that no save has."""
    yield from range(1, MOST)
    pytest.fail("no run ended without a fault")


def places(folder: Path) -> Iterator[tuple[int, Path]]:
    """Numbers, each with a new place."""
    for nth in numbers():
        yield nth, folder / f"n{nth}"


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hiccup_at_every_operation_is_survived(shm_path: Path, when: str, overwrite: bool):
    """One call that fails in a way that may pass, or of which the answer is lost, never fails a save."""
    for nth, place in places(shm_path):
        case = Case(place, overwrite=overwrite)
        fired = case.run(Fault(nth, errno=errno.EIO, when=when))
        assert case.error is None, f"operation {nth}: {case.error}"
        assert case.check() == AFTER
        assert in_line(place)
        if not fired:
            break


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("threads", [1, 2])
def test_N04_an_error_at_every_operation(shm_path: Path, overwrite: bool, code: int, threads: int):
    """A call that fails for good: an error with its cause and nothing left behind, or a save that is complete."""
    for nth, place in places(shm_path):
        case = Case(place, overwrite=overwrite)
        left = files(place)
        fired = case.run(Fault(nth, errno=code), threads=threads)
        seen = case.check()
        if case.error is not None:
            assert isinstance(case.error, StoreError)
            assert case.error.errno == code
            assert seen == case.before
            assert left <= files(place) <= left | case.announced, f"operation {nth}"
        recovers(place, seen, NEXT)
        if not fired:
            assert case.error is None
            break


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_trouble_that_outlasts_the_retries_at_every_operation(shm_path: Path, overwrite: bool, when: str):
    """Five calls in a row that fail or lose their answers: an error, and nothing left unless the commit was called."""
    for nth, place in places(shm_path):
        case = Case(place, overwrite=overwrite)
        left = files(place)
        fired = case.run(Fault(nth, errno=errno.EIO, when=when, times=5))
        seen = case.check()
        if case.error is not None and not case.commit_called:
            assert isinstance(case.error, StoreError)
            assert left <= files(place) <= left | case.announced, f"operation {nth}"
        recovers(place, seen, NEXT)
        if not fired:
            assert case.error is None
            break


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_store_that_is_gone_from_every_operation_on(shm_path: Path, overwrite: bool, code: int):
    """From the n-th call on nothing works, not even cleaning up: what stays is under a mark, and can be pruned."""
    for nth, place in places(shm_path):
        case = Case(place, overwrite=overwrite)
        fired = case.run(Fault(nth, errno=code, times=FOREVER))
        seen = case.check()
        assert case.error is None or isinstance(case.error, StoreError | CommitUnknown)
        recovers(place, seen, NEXT)
        if not fired:
            assert case.error is None
            break


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_L01_a_lost_answer_to_the_commit_in_a_store_that_stays_silent(shm_path: Path, overwrite: bool):
    """The index is written, the answer and all later ones are lost: CommitUnknown, and no file is removed."""
    case = Case(shm_path / "x", overwrite=overwrite)
    case.run(Fault(1, calls=frozenset({"put"}), key=NAME, when="after", times=FOREVER), _silence(overwrite=overwrite))
    assert isinstance(case.error, CommitUnknown)
    assert case.check() == AFTER
    recovers(case.place, AFTER, NEXT)


def _silence(*, overwrite: bool) -> Fault:
    """Reads of the index fail, but for the one with which an overwrite begins."""
    return Fault(1 + overwrite, errno=errno.EIO, calls=frozenset({"get"}), key=NAME, times=FOREVER)


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_killed_at_every_store_operation(
    shm_path: Path, zygote: Zygote, overwrite: bool, when: str, threads: int
):
    """SIGKILL before and after the n-th call of the store."""
    alarm = {"level": "store", "when": when, "threads": threads}
    assert _kill_at_every_step(shm_path, zygote, overwrite=overwrite, alarm=alarm) > 10


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("when", ["before", "midway"])
def test_a_process_killed_at_every_system_call(shm_path: Path, zygote: Zygote, overwrite: bool, when: str):
    """SIGKILL before the n-th system call that changes something, or in the midst of it, if it is a write."""
    assert _kill_at_every_step(shm_path, zygote, overwrite=overwrite, alarm={"level": "system", "when": when}) > 40


def _kill_at_every_step(folder: Path, zygote: Zygote, *, overwrite: bool, alarm: dict[str, object]) -> int:
    """Returns the number of steps of a save that ends."""
    done = False
    for nth, place in places(folder):
        case = Case(place, overwrite=overwrite)
        outcome = zygote.run(
            "save", place=place, number=AFTER, overwrite=overwrite, signal=signal.SIGKILL, nth=nth, **alarm
        )
        seen = settled(place, case.before, AFTER)
        assert case.old <= files(place), f"step {nth}"
        assert seen == AFTER or not done, f"step {nth} takes back the commit"
        done = done or seen == AFTER
        recovers(place, seen, NEXT)
        if outcome.signal == 0:
            assert outcome.value["error"] is None
            assert seen == AFTER
            return outcome.value["steps"]
        assert outcome.signal == signal.SIGKILL
    return 0


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_a_process_killed_while_it_saves_blocks(shm_path: Path, zygote: Zygote, overwrite: bool):
    """SIGKILL in the midst of some of the writes of a file of several blocks."""
    before, after = BIG, BIG + 1
    for nth in (5, 9, 13, 17):
        place = shm_path / f"n{nth}"
        case = Case(place, overwrite=overwrite, before=before)
        outcome = zygote.run(
            "save",
            place=place,
            number=after,
            overwrite=overwrite,
            signal=signal.SIGKILL,
            nth=nth,
            level="system",
            when="midway",
        )
        assert outcome.signal == signal.SIGKILL
        assert settled(place, case.before) == case.before
        recovers(place, case.before, after)


@pytest.mark.parametrize("call", ["load", "open", "verify"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_an_error_at_every_operation_of_a_reader(shm_path: Path, call: str, code: int):
    """A read that fails is an error of the store; the state is never wrong, and never called damaged."""
    place = shm_path / "x"
    shardstore.save(state(AFTER), place, step=AFTER)
    work = _READERS[call]
    for nth in numbers():
        fault = Fault(nth, errno=code, times=1 if code == errno.EIO else FOREVER)
        with injected(_failing(fault)) as faulty:
            if code == errno.EIO:
                assert work(place)
            else:
                with suppress(StoreError):
                    assert work(place) or any(store.fired for store in faulty)
        if not any(store.fired for store in faulty):
            break


def _failing(fault: Fault) -> Callable[[Store], Store]:
    return lambda store: FaultyStore(store, fault)


def _opened(place: Path) -> bool:
    with shardstore.open(place) as opened:
        return all(opened[path].load().sum() >= 0 for path in opened)


def _verified(place: Path) -> bool:
    report = shardstore.verify(str(place))
    problems = [problem.kind for found in report.checkpoints for problem in found.problems]
    assert set(problems) <= {"unreadable"}
    return report.ok


_READERS: dict[str, Callable[[Path], bool]] = {
    "load": lambda place: number_of(shardstore.load(place)) == AFTER,
    "open": _opened,
    "verify": _verified,
}


def test_an_interrupt_while_files_are_written(shm_path: Path):
    """Ctrl-C before the commit: the files of the attempt go, and what was there stays."""
    case = Case(shm_path / "x", overwrite=True)
    left = files(case.place)

    class Interrupting(FaultyStore):
        def around(self, call: str, key: str, make: Callable[[], object]) -> object:
            if call == "put" and "meta" in key and threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().around(call, key, make)

    with injected(Interrupting), pytest.raises(KeyboardInterrupt):
        shardstore.save(state(AFTER), case.place, overwrite=True, threads=1)
    assert files(case.place) == left
    assert settled(case.place, BEFORE) == BEFORE


def test_leftovers_of_a_live_save_are_kept(shm_path: Path, zygote: Zygote):
    """What a killed save left is not removed before its mark is a day old, and a checkpoint beside it never."""
    case = Case(shm_path / "x", overwrite=True)
    outcome = zygote.run("save", place=case.place, number=AFTER, overwrite=True, signal=signal.SIGKILL, nth=6)
    assert outcome.signal == signal.SIGKILL
    left = files(case.place)
    assert left > case.old
    assert prune(case.place) == []
    assert files(case.place) == left
    with pytest.raises(CheckpointExists):
        shardstore.save(state(AFTER), case.place)
    assert files(case.place) == left
