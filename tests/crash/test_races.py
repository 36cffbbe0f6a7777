"""Several at one place: racing creators and overwriters, readers in the midst of it, and a process that was asleep."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.errors import CheckpointExists, Superseded
from shardstore.index import HF_NAME, NAME
from shardstore.storage import Store
from tests.crash.jobs import graceful
from tests.crash.places import age, in_line, look, patient, recovers, settled, tidy
from tests.crash.states import BIG, number_of, state
from tests.crash.zygote import Outcome, Zygote
from tests.kit.contract import together
from tests.kit.faults import Wrapper
from tests.kit.inject import injected

pytestmark = pytest.mark.torture

RACERS = 4
ROUNDS = 5
MOST = 1000


def won(outcome: Outcome) -> bool:
    """Whether a child's save came about; the only other way is FileExistsError."""
    assert outcome.value is not None, outcome
    assert outcome.value["error"] is None or "FileExistsError" in outcome.value["kinds"], outcome
    return outcome.value["error"] is None


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_L11_threads_that_create(shm_path: Path, turn: int):
    """One wins, the others get FileExistsError and leave nothing behind."""
    place = shm_path / "x"
    results = together(RACERS, lambda n: shardstore.save(state(n), place, step=n, threads=1))
    winners = [n for n, result in enumerate(results) if not isinstance(result, Exception)]
    assert len(winners) == 1
    assert all(isinstance(result, FileExistsError) for n, result in enumerate(results) if n not in winners), results
    assert settled(place, *winners) in winners
    assert tidy(place)


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_L11_processes_that_create(shm_path: Path, zygote: Zygote, turn: int):
    """Processes that stand at their commits and are let go at once: one wins, the others get FileExistsError."""
    place = shm_path / "x"
    racers = [zygote.start("save", place=place, number=n, signal=signal.SIGSTOP, nth=2, at=NAME) for n in range(RACERS)]
    assert all(racer.wait().stopped for racer in racers)
    for racer in racers:
        racer.wake()
    winners = [n for n, racer in enumerate(racers) if won(racer.wait())]
    assert len(winners) == 1
    assert settled(place, *winners) in winners
    assert tidy(place)


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_processes_that_overwrite(shm_path: Path, zygote: Zygote, turn: int):
    """Of those who replace the same checkpoint one wins; the others replaced nothing, and are told."""
    place = shm_path / "x"
    shardstore.save(state(100), place, step=100)
    racers = [
        zygote.start("save", place=place, number=n, overwrite=True, signal=signal.SIGSTOP, nth=2, at=NAME)
        for n in range(RACERS)
    ]
    assert all(racer.wait().stopped for racer in racers)
    for racer in racers:
        racer.wake()
    winners = [n for n, racer in enumerate(racers) if won(racer.wait())]
    assert len(winners) == 1
    assert settled(place, *winners) in winners
    assert in_line(place)
    recovers(place, winners[0], 200)


@pytest.mark.parametrize("grace", [60.0, 0.0])
def test_readers_while_processes_overwrite(shm_path: Path, zygote: Zygote, grace: float):
    """Every load is one whole version; where replaced files go at once, it may be Superseded instead."""
    place = shm_path / "x"
    shardstore.save(state(0), place, step=0)
    numbers = {0: [1, 3, 5, BIG, 7, 9, 11], 1: [2, 4, 6, BIG + 2, 8, 10, 12]}
    writers = [zygote.start("overwrite", place=place, numbers=each * 2, grace=grace) for each in numbers.values()]
    readers = [zygote.start("read", place=place, times=25) for _ in range(2)]
    read = [reader.wait().value for reader in readers]
    written = [writer.wait().value for writer in writers]
    for answer in read:
        assert answer is not None
        assert answer["error"] is None or (grace == 0 and "Superseded" in answer["kinds"]), answer["error"]
        assert set(answer["seen"]) <= {0, *numbers[0], *numbers[1]}
    assert all(answer is not None and answer["error"] is None for answer in written), written
    last = settled(place, *(answer["saved"][-1] for answer in written if answer["saved"]))
    assert in_line(place)
    recovers(place, last, 200)


class Disturbed(Wrapper):
    """Does something before its n-th call."""

    def __init__(self, store: Store, nth: int, act: Callable[[], Any]) -> None:
        super().__init__(store)
        self.calls = 0
        self._nth = nth
        self._act = act

    def around(self, call: str, key: str, make: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.calls == self._nth:
            self._act()
        return make()


def disturbed(work: Callable[[], Any], nth: int, act: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether there was an n-th call, before which `act` was done, and what the work returned."""
    done: list[int] = []

    def once() -> None:
        if not done:
            done.append(nth)
            act()

    with injected(lambda store: Disturbed(store, nth, once)):
        result = work()
    return bool(done), result


def replace(place: Path, number: int) -> None:
    """Overwrite, with the replaced files removed at once."""
    with graceful(0):
        shardstore.save(state(number), place, step=number, overwrite=True, threads=1)


@pytest.mark.parametrize("number", [3, 4, BIG])
@pytest.mark.parametrize("then", [5, 7])
def test_a_load_overtaken_at_every_operation(shm_path: Path, number: int, then: int):
    """The checkpoint is replaced, and its files removed, in the midst of a load: the old state or the new, whole."""
    for nth in range(1, MOST):
        place = shm_path / f"n{nth}"
        shardstore.save(state(number), place, step=number)
        happened, loaded = disturbed(
            lambda place=place: number_of(shardstore.load(place)), nth, _replacing(place, then)
        )
        assert loaded in {number, then}
        if not happened:
            break


@pytest.mark.parametrize("then", [5, 7])
def test_a_verify_overtaken_at_every_operation(shm_path: Path, then: int):
    """A checkpoint that is replaced while it is verified is not called damaged."""
    for nth in range(1, MOST):
        place = shm_path / f"n{nth}"
        shardstore.save(state(4), place, step=4)
        happened, report = disturbed(lambda place=place: shardstore.verify(str(place)), nth, _replacing(place, then))
        problems = [problem.message for found in report.checkpoints for problem in found.problems]
        assert report.ok, f"operation {nth}: {problems}"
        if not happened:
            break


def _replacing(place: Path, number: int) -> Callable[[], None]:
    def act() -> None:
        with injected(lambda store: store):
            replace(place, number)

    return act


def test_an_open_checkpoint_that_was_replaced(shm_path: Path):
    """Within the time of grace an open checkpoint can be read on; once its files have gone, it is Superseded."""
    place = shm_path / "x"
    shardstore.save(state(4), place, step=4)
    with shardstore.open(place) as old:
        shardstore.save(state(6), place, overwrite=True)
        assert old["model/table"][:3].tolist() == [4, 4, 4]
    with shardstore.open(place) as old:
        replace(place, 7)
        with pytest.raises(Superseded) as caught:
            old["model/table"].load()
        assert isinstance(caught.value, CheckpointExists)
    assert settled(place, 7) == 7


@pytest.mark.parametrize("level", ["store", "system"])
def test_a_creator_that_was_asleep(shm_path: Path, zygote: Zygote, level: str):
    """Stopped at every step of a save; another saves there, then the first one goes on: one wins, both know it."""
    for nth in range(1, MOST):
        place = shm_path / f"n{nth}"
        sleeper = zygote.start("save", place=place, number=3, signal=signal.SIGSTOP, nth=nth, level=level)
        stopped = sleeper.wait()
        committed = look(place) is not None
        if stopped.stopped:
            age(place, 11)
            _save_beside(place, 4, exists=committed)
            assert settled(place, 3 if committed else 4) is not None
            sleeper.wake()
            assert won(sleeper.wait()) == committed, f"step {nth}"
        assert settled(place, 3 if committed else 4) is not None
        assert tidy(place), f"step {nth}"
        recovers(place, look(place), 5)
        if not stopped.stopped:
            assert committed
            break


def _save_beside(place: Path, number: int, *, exists: bool) -> None:
    with injected(patient):
        if exists:
            with pytest.raises(FileExistsError):
                shardstore.save(state(number), place, step=number)
        else:
            shardstore.save(state(number), place, step=number)


@pytest.mark.parametrize("level", ["store", "system"])
@pytest.mark.parametrize("others", [[4], [5], [4, 6]], ids=str)
def test_an_overwriter_that_was_asleep(shm_path: Path, zygote: Zygote, level: str, others: list[int]):
    """Stopped at every step of an overwrite; others overwrite, then the first one goes on: the last commit stays."""
    for nth in range(1, MOST):
        place = shm_path / f"n{nth}"
        shardstore.save(state(0), place, step=0)
        sleeper = zygote.start(
            "save", place=place, number=3, overwrite=True, signal=signal.SIGSTOP, nth=nth, level=level
        )
        stopped = sleeper.wait()
        committed = look(place) == 3
        if not stopped.stopped:
            assert committed
            break
        age(place, 11)
        with injected(patient):
            for number in others:
                shardstore.save(state(number), place, step=number, overwrite=True)
        sleeper.wake()
        late = _saw_nothing(place, sleeper.wait(), committed=committed, nth=nth)
        last = 3 if late else others[-1]
        assert settled(place, last) == last, f"step {nth}"
        # What has no weights deletes the derived index, which no claim guards: the sleeper's may come after that.
        assert in_line(place) or (others == [5] and HF_NAME in useless(place)), f"step {nth}"
        recovers(place, last, 7)


def useless(place: Path) -> set[str]:
    """The files that `verify` calls leftovers."""
    (report,) = shardstore.verify(str(place)).checkpoints
    return {key for leftover in report.leftovers for key in leftover.keys}


def _saw_nothing(place: Path, outcome: Outcome, *, committed: bool, nth: int) -> bool:
    """Whether the sleeper came back before it had looked, so that it replaced what the others had saved."""
    late = won(outcome) and not committed
    assert not late or nth == 1
    return late
