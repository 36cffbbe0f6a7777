"""How cost grows with the work: tensors, bytes, shards, threads, checkpoints in a run. And its plots."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shardstore
from benchmarks import long_run
from benchmarks.goals import TIMES
from benchmarks.machine import memory_free, settle
from benchmarks.peak import extra
from benchmarks.states import Tree

MEANING = "1 where twice the work takes twice as much, 0 where it takes no more"
MIB = 1 << 20
TENSORS = [10**2, 10**3, 10**4, 10**5]
BYTES = [10**6, 10**7, 10**8, 10**9, 4 * 10**9]
SHARDS = [2**at for at in range(9)]
THREADS = [1, 2, 3, 4]
GIGA = 10**9  # bytes of the state of other axes
CHECKPOINTS = [1, 10, 10**2, 10**3, 10**4]

Axis = dict[str, Any]  # name, about, xs, lines: each name, unit (s or MiB) and values


def measure(place: Path, rounds: int) -> list[Axis]:
    """All axes."""
    giga = _state(GIGA, 1024)
    return [
        _axis("tensors", "Tensors of 1 KB", TENSORS, lambda n: _costs(_state(n * 1024, n), place, rounds)),
        _axis("bytes", "Bytes, in 64 tensors", _fitting(BYTES), lambda n: _costs(_state(n, 64), place, rounds)),
        _axis("shards", "Shards of 1 GB", SHARDS, lambda n: _costs(giga, place, rounds, shards=n)),
        _axis("threads", "Threads, for 1 GB", THREADS, lambda n: _costs(giga, place, rounds, threads=n)),
        _axis("checkpoints", "Checkpoints in a run", CHECKPOINTS, lambda n: _listed(n, place, rounds)),
    ]


def _fitting(sizes: list[int]) -> list[int]:
    """The sizes of which memory holds a state, its files and what is loaded."""
    return [size for size in sizes if 3.5 * size < memory_free()]


def _axis(name: str, about: str, xs: list[int], cost: Callable[[int], dict[str, float]]) -> Axis:
    """`cost` gives the values of each line at one point."""
    began = time.perf_counter()
    points = [cost(x) for x in xs]
    print(f"scaling: {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    lines = [
        {"name": line, "unit": "MiB" if "memory" in line else "s", "values": [point[line] for point in points]}
        for line in points[0]
    ]
    return {"name": name, "about": about, "xs": xs, "lines": lines}


def _state(nbytes: int, tensors: int) -> Tree:
    return {f"t{at:06d}.weight": torch.rand(nbytes // tensors // 4) for at in range(tensors)}


def _costs(
    state: Tree, place: Path, rounds: int, shards: int | None = None, threads: int | None = None
) -> dict[str, float]:
    """Seconds and extra memory of a save, a load and an open."""
    nbytes = sum(tensor.nbytes for tensor in state.values())

    def save(url: Path) -> None:
        shardstore.save(state, url, shards=shards, threads=threads)

    def load(url: Path) -> Tree:
        return shardstore.load(url, threads=threads)

    def look(url: Path) -> int:
        with shardstore.open(url) as checkpoint:
            return len(checkpoint)

    with _folder(place) as folder:
        url = folder / "checkpoint"
        saves = [_timed(save, folder / str(turn), nbytes, keep=False) for turn in range(rounds + 1)]
        memory = extra(lambda: save(url))[0]
        loaded = load(url)
        if loaded.keys() != state.keys() or not all(torch.equal(loaded[name], state[name]) for name in state):
            raise ValueError("the result is wrong")
        del loaded
        loads = [_timed(load, url, nbytes) for _ in range(rounds)]
        looks = [_timed(look, url, 0) for _ in range(rounds)]
        taken = extra(lambda: load(url))[0]
    return {
        "save": median(saves[1:]), "load": median(loads), "open": median(looks),
        "memory of a save": memory / MIB, "memory of a load, its tensors too": taken / MIB,
    }  # fmt: skip


def _listed(count: int, place: Path, rounds: int) -> dict[str, float]:
    """Seconds of a listing, and of finding the newest."""
    with _folder(place) as folder, long_run.written(count, folder), shardstore.Run(folder) as run:
        if len(run.checkpoints()) != count:
            raise ValueError("the result is wrong")
        return {
            "checkpoints()": median(_timed(lambda _: run.checkpoints(), folder, 0) for _ in range(rounds)),
            "newest()": median(_timed(lambda _: run.newest(), folder, 0) for _ in range(rounds)),
        }


def _timed(act: Callable[[Path], Any], url: Path, nbytes: int, *, keep: bool = True) -> float:
    settle(nbytes * 5 // 4)
    start = time.perf_counter()
    act(url)
    seconds = time.perf_counter() - start
    if not keep:
        shutil.rmtree(url)
    return seconds


@contextmanager
def _folder(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=place) as folder:
        yield Path(folder)


def exponent(xs: Sequence[float], ys: Sequence[float], least: float = 1e-9) -> float:
    """The slope of the upper half of a line, by least squares of the logarithms. Less than `least` counts as that."""
    middle = math.sqrt(xs[0] * xs[-1])
    points = [(math.log(x), math.log(max(y, least))) for x, y in zip(xs, ys, strict=True) if x >= middle]
    x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - x0) ** 2 for x, _ in points)
    return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0


def slope_of(axis: Axis, line: dict[str, Any]) -> float:
    """The exponent of a line of a plot. Memory below 1 MiB is what the allocator happens to do."""
    slope = exponent(axis["xs"], line["values"], 1.0 if line["unit"] == "MiB" else 1e-9)
    return round(slope, 2) + 0.0  # no minus before zero


def sentence(axis: Axis, line: dict[str, Any]) -> str:
    """What the exponent of a line says."""
    slope = slope_of(axis, line)
    values = [f"{value:.3g} {line['unit']}" for value in (line["values"][0], line["values"][-1])]
    spread = f"{values[0]} at {axis['xs'][0]:,}, {values[1]} at {axis['xs'][-1]:,}"
    what = "as much" if line["unit"] == "MiB" else "as long"
    return (
        f"{line['name']}: exponent {slope:.2f}, twice the {axis['name']} take {2**slope:.2f} {TIMES} {what}; {spread}."
    )


def draw(axes: list[Axis], folder: Path) -> None:
    """One plot for each axis: seconds, and memory where that was measured."""
    if not axes:
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "shardstore"  # the same figures make the same file
    folder.mkdir(exist_ok=True)
    for axis in axes:
        units = list(dict.fromkeys(line["unit"] for line in axis["lines"]))
        figure = Figure(figsize=(4.5 * len(units), 3.5), layout="constrained")
        for unit, plot in zip(units, figure.subplots(1, len(units), squeeze=False)[0], strict=True):
            for line in (line for line in axis["lines"] if line["unit"] == unit):
                plot.plot(axis["xs"], line["values"], marker="o", label=f"{line['name']}: {slope_of(axis, line):.2f}")
            plot.set(xscale="log", yscale="log", xlabel=axis["about"], ylabel=unit)
            plot.set_xticks(axis["xs"], [f"{x:g}" for x in axis["xs"]])
            plot.minorticks_off()
            plot.legend(title="exponent", fontsize="small")
            plot.grid(visible=True, alpha=0.3)
        figure.savefig(folder / f"{axis['name']}.svg", metadata={"Date": None})
