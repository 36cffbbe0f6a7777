"""What shardstore has to reach, and whether a run reached it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

Rows = list[dict[str, Any]]
LEAST = 0.01  # of the steps' time: less can't be told from nothing
TIMES = "\u00d7"
UNIQUE = f"{TIMES} the unique bytes"
ALLOWED = f"{TIMES} its own bytes and a block a piece"


@dataclass(frozen=True)
class Goal:
    """One demand on shardstore's median.

    With `than`: at least `factor` times as fast as the fastest of those systems (or of all systems of that kind), or
    with `within` at most `factor` times what it takes. Without: at most `most` in `unit`.
    """

    state: str
    task: str
    than: tuple[str, ...] = ()
    factor: float = 0.0
    most: float = 0.0
    unit: str = ""  # µs a tensor, s, MiB, or of the bytes
    within: bool = False

    @property
    def what(self) -> str:
        """The task, and what of it counts if that is not its time."""
        return self.task + {"MiB": ", extra memory", UNIQUE: ", bytes written", ALLOWED: ", bytes read"}.get(
            self.unit, ""
        )

    @property
    def text(self) -> str:
        if not self.than:
            return f"≤ {self.most:g} {self.unit}"
        sign = "≤" if self.within else "≥"
        return f"{sign} {self.factor:g} {TIMES} {_WORDS.get(self.than, ' and '.join(self.than))}"


@dataclass(frozen=True)
class Verdict:
    """What came of a goal. `reached` is None where it wasn't measured."""

    goal: Goal
    measured: str
    reached: bool | None


BARE, DCP, TORCH, CLONE, PEERS = ("bare",), ("dcp-1", "dcp-2"), ("torch",), ("safetensors-clone",), ("peer",)
COPY, NICED, RANKED = ("copy",), ("bare-niced",), ("dcp",)
CLIENTS, BANDWIDTH = ("plain", "peer"), ("bandwidth",)
_WORDS = {
    BARE: "the bare calls",
    DCP: "the best DCP",
    TORCH: "torch.save",
    CLONE: "load_file + clone",
    PEERS: "the best peer",
    COPY: "one copy_ into touched memory",
    NICED: "a bare writer at nice 19",
    RANKED: "DCP",
    CLIENTS: "the best client",
    BANDWIDTH: "the bandwidth",
}
GPT, MANY, PER_TENSOR = "gpt-124m", "many-small", "µs a tensor"


def goals(threads: int) -> list[Goal]:
    """All goals. Memory may be 64 MiB, and 8 MiB for each thread; a background save has a copy of the state besides."""
    buffers = 64 + 8 * threads
    ranked = [
        goal
        for state in ("fsdp-2", "fsdp-4")
        for goal in (
            Goal(state, "save", RANKED, 1.5),
            Goal(state, "load-into", RANKED, 1.5),
            Goal(state, "save", most=1.001, unit=UNIQUE),
            Goal(state, "reshard", most=1, unit=ALLOWED),
        )
    ]
    return [
        Goal(GPT, "save", BARE, 0.85),
        Goal(GPT, "save", DCP, 1.7),
        Goal(GPT, "save", TORCH, 2.5),
        Goal(GPT, "save-durable", BARE, 0.9),
        Goal(GPT, "load-into", BARE, 0.8),
        Goal(GPT, "load-into", DCP, 3),
        Goal(GPT, "load-fresh", BARE, 0.75),
        Goal(GPT, "load-fresh", CLONE, 2),
        Goal(GPT, "load-mapped", BARE, 0.9),
        Goal(GPT, "load-mapped", CLONE, 4),
        Goal(MANY, "save", most=12, unit=PER_TENSOR),
        Goal(MANY, "save", PEERS, 3),
        Goal(MANY, "load-fresh", most=8, unit=PER_TENSOR),
        Goal(MANY, "load-fresh", PEERS, 3),
        Goal(MANY, "load-into", most=9, unit=PER_TENSOR),
        Goal(MANY, "load-into", PEERS, 3),
        Goal(MANY, "open", most=0.15, unit="s"),
        Goal(GPT, "save", most=buffers, unit="MiB"),
        Goal(GPT, "load-into", most=buffers, unit="MiB"),
        Goal(GPT, "stall", COPY, 1.3, within=True),
        Goal(GPT, "stall-workers", COPY, 1.3, within=True),
        Goal(GPT, "beside", NICED, 1.3, within=True),
        Goal(GPT, "stall", most=1424 + buffers, unit="MiB"),
        *ranked,
        Goal("thousand", "plan", most=1, unit="s"),
        Goal("thousand", "commit", most=5, unit="s"),
        Goal(GPT, "s3-save", CLIENTS, 0.9),
        Goal(GPT, "s3-load-into", CLIENTS, 0.9),
        Goal(GPT, "s3-load-fresh", CLIENTS, 0.9),
        Goal(GPT, "s3-paced-save", BANDWIDTH, 0.9),
        Goal(GPT, "s3-paced-load", BANDWIDTH, 0.9),
        Goal(GPT, "s3-save", most=128, unit="MiB"),
        Goal(GPT, "s3-load-into", most=128, unit="MiB"),
    ]


def judge(run: dict[str, Any]) -> list[Verdict]:
    """Every goal against a run, as `__main__` stores it."""
    return [_judged(goal, run) for goal in goals(run["settings"]["threads"])]


def value(row: dict[str, Any]) -> float:
    """What counts of a row of results: seconds, or the share of the steps' time."""
    return max(LEAST, median(row["shares"])) if row.get("shares") else median(row["seconds"])


def _judged(goal: Goal, run: dict[str, Any]) -> Verdict:
    if goal.unit == "MiB":
        rows = [row["extra"] / 2**20 for row in _of(goal, run["peaks"], ("shardstore",)) if "extra" in row]
        return _at_most(goal, rows)
    ours = [row for row in _of(goal, run["results"], ("shardstore",)) if row["seconds"]]
    if goal.than:
        theirs = [row for row in _of(goal, run["results"], goal.than) if row["seconds"]]
        return _compared(goal, ours, theirs)
    if goal.unit in (UNIQUE, ALLOWED):
        moved = [row["traffic"] for row in ours]
        return _at_most(goal, [each.get("written", each.get("read")) / each["of"] for each in moved])
    scale = 1e6 / ours[0]["tensors"] if ours and goal.unit == PER_TENSOR else 1.0
    return _at_most(goal, [value(row) * scale for row in ours])


def _of(goal: Goal, rows: Rows, names: tuple[str, ...]) -> Rows:
    wanted = [row for row in rows if (row["state"], row["task"]) == (goal.state, goal.task)]
    return [row for row in wanted if row["system"] in names or row["kind"] in names]


def _at_most(goal: Goal, values: list[float]) -> Verdict:
    if not values:
        return Verdict(goal, "not measured", None)
    return Verdict(goal, f"{values[0]:.3g} {goal.unit}", values[0] <= goal.most)


def _compared(goal: Goal, ours: Rows, theirs: Rows) -> Verdict:
    if not ours or not theirs:
        return Verdict(goal, "not measured", None)
    best = min(theirs, key=value)
    if goal.within:
        ratio = value(ours[0]) / max(value(best), 1e-9)
        return Verdict(goal, f"{ratio:.2f} {TIMES} {best['system']}", ratio <= goal.factor)
    ratio = value(best) / value(ours[0])
    return Verdict(goal, f"{ratio:.2f} {TIMES} {best['system']}", ratio >= goal.factor)
