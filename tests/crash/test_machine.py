"""Saves, overwrites, faults, sleepers, readers and pruning in any order, against a model that is a dict."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import shardstore
from shardstore.check import GRACE_SECONDS
from shardstore.errors import CheckpointNotFound, CommitUnknown, ShardstoreError, StoreError
from shardstore.index import HF_NAME
from shardstore.storage import Store
from tests.crash.places import DAY, age, files, look, named, prune, settled, temps
from tests.crash.states import number_of, state
from tests.kit.faults import Fault, FaultyStore, Wrapper
from tests.kit.inject import injected
from tests.kit.same import assert_same

FOREVER = 1_000_000
PATIENCE_S = 60.0
PLACES = ("x", "y")

places = st.sampled_from(PLACES)
kinds = st.integers(0, 29)
operations = st.integers(1, 30)


class Bed(Wrapper):
    """A store whose n-th call does not begin before it is woken."""

    def __init__(self, store: Store, nth: int) -> None:
        super().__init__(store)
        self._nth = nth
        self._calls = 0
        self.lies = threading.Event()
        self.awake = threading.Event()

    def around(self, call: str, key: str, make: Callable[[], Any]) -> Any:
        self._calls += 1
        if self._calls == self._nth:
            self.lies.set()
            if not self.awake.wait(PATIENCE_S):
                raise TimeoutError("nobody woke it")
        return make()


@dataclass(eq=False)
class Sleeper:
    """A save on a thread of its own that sleeps in the midst of it."""

    place: str
    number: int
    overwrite: bool
    bed: Bed
    thread: threading.Thread
    seen: int | None
    looked: bool
    committed: bool
    attempts: set[str]
    result: list[Any] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """The model: at each place there is nothing, or one state, by its number. No number comes twice."""

    sleepers = Bundle("sleepers")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="shardstore-test-", dir=_memory()))
        self.model: dict[str, int | None] = dict.fromkeys(PLACES)
        self.states = 0
        self.asleep: list[Sleeper] = []

    # -- saves

    @rule(place=places, kind=kinds, overwrite=st.booleans())
    def save(self, place: str, kind: int, overwrite: bool) -> None:
        """A save without trouble does what the model says."""
        self._expect(place, self._new(kind), overwrite=overwrite)

    @rule(place=places, kind=kinds, overwrite=st.booleans(), nth=operations, when=st.sampled_from(["before", "after"]))
    def hiccup(self, place: str, kind: int, overwrite: bool, nth: int, when: Any) -> None:
        """So does one with a call that failed in a way that passes, or of which the answer was lost."""
        with injected(lambda store: FaultyStore(store, Fault(nth, when=when))):
            self._expect(place, self._new(kind), overwrite=overwrite)

    @rule(place=places, kind=kinds, overwrite=st.booleans(), nth=operations, times=st.sampled_from([1, 2, FOREVER]))
    def trouble(self, place: str, kind: int, overwrite: bool, nth: int, times: int) -> None:
        """One or two calls that fail for good, or a process that dies: the version before, or the one after."""
        number = self._new(kind)
        with injected(lambda store: FaultyStore(store, Fault(nth, errno=errno.EROFS, times=times))):
            result = self._try(place, number, overwrite=overwrite)
        may = self.model[place] is None or overwrite
        assert isinstance(result, shardstore.Saved | StoreError | CommitUnknown | FileExistsError)
        assert isinstance(result, StoreError | FileExistsError) or may
        assert not isinstance(result, FileExistsError) or not may
        if look(self.root / place) == number:
            assert may
            self.model[place] = number
        else:
            assert not isinstance(result, shardstore.Saved)

    def _new(self, kind: int) -> int:
        """A number that no state had yet, of one of 30 kinds."""
        self.states += 1
        return 30 * self.states + kind

    def _expect(self, place: str, number: int, *, overwrite: bool) -> None:
        result = self._try(place, number, overwrite=overwrite)
        if self.model[place] is None or overwrite:
            assert isinstance(result, shardstore.Saved), result
            self.model[place] = number
        else:
            assert isinstance(result, FileExistsError), result

    def _try(self, place: str, number: int, *, overwrite: bool) -> Any:
        try:
            return shardstore.save(state(number), self.root / place, step=number, overwrite=overwrite, threads=1)
        except ShardstoreError as error:
            return error

    # -- sleepers

    @rule(target=sleepers, place=places, kind=kinds, overwrite=st.booleans(), nth=operations)
    def fall_asleep(self, place: str, kind: int, overwrite: bool, nth: int) -> Any:
        """A save begins, and stops before its n-th operation; what it has done by then counts."""
        number, seen, marks = self._new(kind), self.model[place], self._attempts(place)
        made: list[Bed] = []

        def wrap(store: Store) -> Store:
            made.append(Bed(store, nth))
            return made[-1]

        result: list[Any] = []
        thread = threading.Thread(
            target=lambda: result.append(self._try(place, number, overwrite=overwrite)), daemon=True
        )
        with injected(wrap):
            thread.start()
            while thread.is_alive() and not (made and made[0].lies.is_set()):
                thread.join(0.001)
        committed = look(self.root / place) == number
        if committed:
            self.model[place] = number
        sleeper = Sleeper(
            place, number, overwrite, made[0], thread, seen, nth > 1, committed, self._attempts(place) - marks, result
        )
        if not thread.is_alive():
            self._judge(sleeper)
            return multiple()
        self.asleep.append(sleeper)
        return sleeper

    @rule(sleeper=consumes(sleepers))
    def wake(self, sleeper: Sleeper) -> None:
        """It goes on: its commit comes about only if what it replaces still is what it saw."""
        self.asleep.remove(sleeper)
        if not sleeper.looked:
            sleeper.seen = self.model[sleeper.place]
        sleeper.bed.awake.set()
        sleeper.thread.join(PATIENCE_S)
        assert not sleeper.thread.is_alive()
        self._judge(sleeper)

    def _judge(self, sleeper: Sleeper) -> None:
        (result,) = sleeper.result
        if sleeper.committed:
            assert isinstance(result, shardstore.Saved), result
        elif sleeper.seen == self.model[sleeper.place] and (sleeper.seen is None or sleeper.overwrite):
            assert isinstance(result, shardstore.Saved), result
            self.model[sleeper.place] = sleeper.number
        else:
            assert isinstance(result, FileExistsError), result

    def _attempts(self, place: str) -> set[str]:
        return {name[8:24] for name in files(self.root / place) if name.startswith("attempt-")}

    # -- time

    @rule(place=places, seconds=st.sampled_from([GRACE_SECONDS / 2, GRACE_SECONDS + 1, DAY + 1]))
    def time_passes(self, place: str, seconds: float) -> None:
        """Marks get older, but for those of sleepers, which refresh theirs each minute."""
        live = set().union(*(sleeper.attempts for sleeper in self.asleep))
        age(self.root / place, seconds, only=self._attempts(place) - live)

    @rule(place=places)
    def prune(self, place: str) -> None:
        """What goes is of no use to the checkpoint that is there, nor to a sleeper."""
        needed = named(self.root / place)
        live = {attempt for sleeper in self.asleep for attempt in sleeper.attempts}
        gone = prune(self.root / place)
        assert not needed.intersection(gone)
        assert not any(attempt in key for key in gone for attempt in live)

    # -- readers

    @rule(place=places, only=st.sampled_from(["step", "optimizer/*", "optimizer/moments.m0", "history"]))
    def load_a_part(self, place: str, only: str) -> None:
        """A part is that of the whole."""
        number = self.model[place]
        if number is None:
            with pytest.raises(CheckpointNotFound):
                shardstore.load(self.root / place, only=only)
            return
        whole = state(number)
        wanted = {
            "step": {"step": whole["step"]},
            "optimizer/*": {"optimizer": whole["optimizer"]},
            "optimizer/moments.m0": {"optimizer": {"moments": {"m0": whole["optimizer"]["moments"]["m0"]}}},
            "history": {"history": whole["history"]},
        }
        assert_same(shardstore.load(self.root / place, only=only), wanted[only])

    @rule(place=places)
    def load_into(self, place: str) -> None:
        """What was in the target is filled with what was saved."""
        number = self.model[place]
        if number is None:
            return
        target = state(number)
        blank(target)
        filled = shardstore.load(self.root / place, into=target)
        assert number_of(filled) == number
        assert target["optimizer"]["moments"]["m0"] is filled["optimizer"]["moments"]["m0"]

    @rule()
    def verify_all(self) -> None:
        """One report for every place where there is anything, whole where there is a checkpoint."""
        try:
            report = shardstore.verify(str(self.root))
        except CheckpointNotFound:
            assert set(self.model.values()) == {None}
            return
        steps = {os.path.basename(found.url): found.step for found in report.checkpoints if found.error is None}
        assert steps == {place: number for place, number in self.model.items() if number is not None}

    # -- always

    @invariant()
    def every_place_is_as_the_model_says(self) -> None:
        for place, number in self.model.items():
            assert settled(self.root / place, number) == number

    def teardown(self) -> None:
        """All wake up; after a day nothing useless is left."""
        try:
            for sleeper in list(self.asleep):
                self.wake(sleeper)
            for place in PLACES:
                age(self.root / place, 2 * DAY)
                prune(self.root / place)
                self.every_place_is_as_the_model_says()
                assert files(self.root / place) - {HF_NAME} == named(self.root / place)
                assert temps(self.root / place) == []
        finally:
            for sleeper in self.asleep:
                sleeper.bed.awake.set()
            shutil.rmtree(self.root)


def blank(value: Any) -> None:
    """Make zeros of all tensors of a state, in place."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, dict):
        for inner in value.values():
            blank(inner)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


TestMachine = Machine.TestCase
# To make a failure small would take minutes: a step writes, reads and verifies real files. Twenty steps can be read.
TestMachine.settings = settings(max_examples=100, stateful_step_count=20, phases=set(Phase) - {Phase.shrink})
TestMachine.pytestmark = [pytest.mark.torture, pytest.mark.slow]
