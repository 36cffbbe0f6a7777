"""The options of the command line, and that line as a report tells it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from benchmarks.choice import ALL_STATES, ALL_TASKS, DEFAULT_STATES, DEFAULT_TASKS
from benchmarks.states import STATES
from benchmarks.systems import SYSTEMS

_TOLD = ("tasks", "states", "systems", "rounds", "threads", "slow")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The options. Names may be given several at a time; `--all` fills in what is not given."""
    about = "Measure shardstore beside its peers and beside the bare system calls."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    parser.add_argument(
        "--tasks", nargs="+", choices=ALL_TASKS, help="default: all that need no server, without scaling"
    )
    parser.add_argument("--states", nargs="+", choices=list(STATES))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="default: all, but for slow peers")
    parser.add_argument("--all", action="store_true", help="all tasks, states and systems of which none is named")
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up round (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of shardstore and of the bare calls (default 2)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory (default /dev/shm)")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on disk (default /var/tmp)")
    parser.add_argument("--slow", type=float, default=4.0, help="a peer that takes more seconds runs once (default 4)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="where the figures go (default bench.json)"
    )
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="JSON",
        help="measure nothing; put these figures into docs/benchmarks.md, of each task those of the last that has it",
    )  # fmt: skip
    options = parser.parse_args(words)
    options.everybody = options.all or options.systems is not None
    options.tasks = options.tasks or (ALL_TASKS if options.all else DEFAULT_TASKS)
    options.states = options.states or (ALL_STATES if options.all else DEFAULT_STATES)
    options.systems = options.systems or list(SYSTEMS)
    return options


def command(options: argparse.Namespace) -> str:
    """The command line that was given, without paths."""
    words = ["python", "-m", "benchmarks", *(["--all"] if options.all else [])]
    default = arguments(words[3:])
    for key in _TOLD:
        value = getattr(options, key)
        if value != getattr(default, key):
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
