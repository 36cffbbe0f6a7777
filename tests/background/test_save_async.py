"""Background saves: what is in the checkpoint, what happens meanwhile, and how errors come out."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import shardstore
from shardstore.check import verifying
from shardstore.errors import CheckpointExists, StoreError, UnsupportedState
from shardstore.memory import Arena
from shardstore.saving.background import Pending, save_async
from shardstore.storage import Store
from shardstore.storage.port import Capabilities
from tests.kit.faults import Gate, SlowStore, Wrapper
from tests.kit.inject import injected

T = TypeVar("T")

REPOSITORY = Path(shardstore.__file__).parents[1]


@pytest.fixture
def gated() -> Iterator[list[Gate]]:
    """Every store waits before its first data file is put, until the test opens the gate."""
    gates: list[Gate] = []

    def wrap(store: Store) -> Store:
        slow = SlowStore(store)
        gates.append(slow.gate("put", ".safetensors"))
        return slow

    with injected(wrap):
        yield gates
        for gate in gates:
            gate.open()


def started(handle: Pending | None) -> Pending:
    """The handle of a save that was not skipped."""
    assert handle is not None
    return handle


def meet(gates: list[Gate], number: int, handle: Pending) -> Gate:
    """The gate at which the save with that number stands."""
    while len(gates) <= number:
        assert not handle.done()
    gates[number].wait_until_reached()
    return gates[number]


def test_P17_the_snapshot_is_taken_before_it_returns(shm_path: Path, gated: list[Gate]):
    """Tensors of any layout, 0-dim counters, numpy arrays and plain data: later changes never reach the checkpoint."""
    w = torch.randn(300, 200)
    state: dict[str, Any] = {
        "model": {"w": w, "transposed": w.t(), "rows": w[::7], "tied": w},
        "count": {"step": torch.tensor(1), "conj": torch.randn(3, dtype=torch.complex64).conj(), "half": w.half()},
        "plain": {"x": 1, "list": [1, 2], "array": np.arange(4)},
    }
    wanted = {path: value.clone() for path, value in {**state["model"], **state["count"]}.items()}
    handle = started(save_async(state, shm_path / "c"))
    assert handle.staged()
    w.add_(1)
    state["count"]["step"].add_(1)
    state["plain"]["x"] = 9
    state["plain"]["list"].append(3)
    state["plain"]["array"][:] = 0
    state["later"] = 1
    gate = meet(gated, 0, handle)
    assert not handle.done()
    gate.open()
    assert handle.result().nbytes > 0
    loaded = shardstore.load(shm_path / "c")
    assert "later" not in loaded
    assert all(torch.equal(value, wanted[path]) for path, value in {**loaded["model"], **loaded["count"]}.items())
    assert loaded["model"]["w"] is loaded["model"]["tied"]
    assert loaded["plain"]["x"] == 1
    assert loaded["plain"]["list"] == [1, 2]
    assert loaded["plain"]["array"].tolist() == [0, 1, 2, 3]


def test_P16_every_save_holds_the_values_of_its_moment(shm_path: Path):
    """The reused memory never brings an older state into a later checkpoint, nor a later one into an older."""
    tensor = torch.zeros(50_000)
    handles = []
    for step in range(4):
        tensor.fill_(step)
        state = {"model": {"w": tensor, f"only-{step}": torch.full((step + 1,), step)}}
        handles.append(started(save_async(state, shm_path / str(step), step=step)))
    digests = {handle.result().digest for handle in handles}
    assert len(digests) == 4
    for step in range(4):
        model = shardstore.load(shm_path / str(step))["model"]
        assert torch.equal(model["w"], torch.full((50_000,), float(step)))
        assert set(model) == {"w", f"only-{step}"}


def test_one_at_a_time(shm_path: Path, gated: list[Gate]):
    """While a save runs, `busy="skip"` returns None and writes nothing; `busy="wait"` waits for its end."""
    first = started(save_async({"w": torch.ones(9)}, shm_path / "a"))
    gate = meet(gated, 0, first)
    assert save_async({"w": torch.ones(9)}, shm_path / "b", busy="skip") is None
    gate.open()
    second = started(save_async({"w": torch.ones(9)}, shm_path / "c"))
    assert first.done()
    meet(gated, 1, second).open()
    second.result()
    assert sorted(os.listdir(shm_path)) == ["a", "c"]


class Writers(Wrapper):
    """Keeps the names of the threads that put data files."""

    def __init__(self, store: Store, connections: int | None) -> None:
        super().__init__(store)
        self.names: set[str] = set()
        self._connections = connections

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, connections=self._connections)

    def around(self, call: str, key: str, make: Callable[[], T]) -> T:
        if call == "put" and key.endswith(".safetensors"):
            self.names.add(threading.current_thread().name)
        return make()


@pytest.mark.parametrize(
    ("threads", "connections", "names"),
    [(None, None, {"shardstore-save"}), (2, None, {"shardstore"}), (None, 4, {"shardstore"})],
)
def test_one_thread_writes_in_the_background(threads, connections, names, shm_path: Path, monkeypatch):
    """Each thread of low priority interrupts the steps as much again; onto connections, and if asked, there are more.

    A save that the training waits for has as many as there are cores.
    """
    monkeypatch.setattr(verifying, "default_threads", lambda: 2)
    state = {"model": {"a": torch.ones(9), "b": torch.ones(9)}}
    with injected(lambda store: Writers(store, connections)) as stores:
        started(save_async(state, shm_path / "a", shards=2, threads=threads)).result()
        shardstore.save(state, shm_path / "b", shards=2)
    assert [each.names for each in stores] == [names, {"shardstore"}]


def test_a_result_that_takes_too_long(shm_path: Path, gated: list[Gate]):
    """`result(timeout=)` raises TimeoutError, and the save goes on."""
    handle = started(save_async({"w": torch.ones(9)}, shm_path / "a"))
    gate = meet(gated, 0, handle)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    gate.open()
    assert handle.result().step is None


def test_errors_come_out_at_the_result_and_at_the_next_save(shm_path: Path):
    """An error is raised by whoever asks first, and then no more."""
    shardstore.save({"w": torch.ones(1)}, shm_path / "a")
    handle = started(save_async({"w": torch.ones(1)}, shm_path / "a"))
    with pytest.raises(CheckpointExists):
        handle.result()
    started(save_async({"w": torch.ones(1)}, shm_path / "b")).result()
    failing = started(save_async({"w": torch.ones(1)}, shm_path / "no" / "parent"))
    with pytest.raises(StoreError, match="mount point"):
        save_async({"w": torch.ones(1)}, shm_path / "c")
    assert failing.done()
    started(save_async({"w": torch.ones(1)}, shm_path / "c")).result()


def test_what_cannot_be_stored_is_refused_at_once(shm_path: Path):
    """UnsupportedState is raised by the call itself, before a thread is started."""
    with pytest.raises(UnsupportedState, match="x/"):
        save_async({"x": object()}, shm_path / "a")
    assert os.listdir(shm_path) == []


def run(code: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that ends right after it has begun a background save."""
    script = f"import sys, torch, shardstore\nstate = {{'w': torch.ones(3_000_000)}}\nplace = {str(place)!r}\n{code}"
    return subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(7)", 7), ("raise ValueError('earlier')", 1)], ids=["end", "exit", "error"]
)
def test_the_process_finishes_the_save(shm_path: Path, end: str, code: int):
    """A script that ends right after `save_async`, however it ends: committed, with its own exit code and error."""
    done = run(f"shardstore.save_async(state, place)\n{end}", shm_path / "a")
    assert done.returncode == code, done.stderr
    assert ("earlier" in done.stderr) == (code == 1)
    assert shardstore.verify(shm_path / "a").ok


@pytest.mark.parametrize("end", ["", "raise ValueError('earlier')"], ids=["end", "error"])
def test_a_failed_save_makes_the_process_fail(shm_path: Path, end: str):
    """Nobody asked for the result: the exit code is not 0, the error is shown, and an earlier one is not hidden."""
    done = run(f"shardstore.save_async(state, place)\n{end}", shm_path / "no" / "parent")
    assert done.returncode == 1
    assert "mount point" in done.stderr
    assert ("earlier" in done.stderr) == bool(end)


def test_a_forked_child_has_no_part_in_it(shm_path: Path):
    """A child forked during a save (a DataLoader worker) ends at once and well, and its own save is its own."""
    code = (
        "import os\n"
        "handle = shardstore.save_async(state, place)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if shardstore.saving.background._background.current is None else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "handle.result()\n"
    )
    done = run(code, shm_path / "a")
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
    assert shardstore.verify(shm_path / "a").ok


def test_the_arena_is_used_again():
    """The memory of the first copy serves the next, unless that is larger; empty tensors need none."""
    arena = Arena()
    first = arena.stage([torch.ones(1000), torch.empty(0, 3)], 2)
    size, start = arena.nbytes, first[0].data_ptr()
    second = arena.stage([torch.zeros(900, dtype=torch.float64)], 2)
    assert (arena.nbytes, second[0].data_ptr()) == (size, start)
    assert torch.equal(second[0], torch.zeros(900, dtype=torch.float64))
    third = arena.stage([torch.full((2 * size,), 3, dtype=torch.uint8)], 2)
    assert arena.nbytes >= 2 * size
    assert int(third[0].sum()) == 6 * size


def test_warm_up_makes_the_memory_early(shm_path: Path):
    """After `warm_up` the save needs no further memory for its copy."""
    state = {"w": torch.ones(2_000_000)}
    make: Callable[[Any], int] = shardstore.warm_up
    nbytes = make(state)
    assert nbytes >= 8_000_000
    started(save_async(state, shm_path / "a")).result()
    assert make(state) == nbytes
