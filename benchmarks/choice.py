"""What a plain run measures: enough to judge every goal, in eleven minutes. `--all` measures the rest."""

from __future__ import annotations

from benchmarks.states import STATES
from benchmarks.systems import SYSTEMS
from benchmarks.tasks import TASKS

LOCAL = [name for name, task in TASKS.items() if not task.server]
APART = ["peak", "ranks", "thousand"]  # in processes of their own
S3 = [*(name for name, task in TASKS.items() if task.server == "s3"), "s3-peak"]
FUSE = [name for name, task in TASKS.items() if task.server == "fuse"]

DEFAULT_STATES = ["gpt-124m", "many-small", "run-10k", "fsdp-2", "fsdp-4", "thousand"]
ALL_STATES = [name for name in STATES if not name.startswith("toy")]
DEFAULT_TASKS = [*LOCAL, *APART]
ALL_TASKS = [*DEFAULT_TASKS, *S3, *FUSE, "scaling"]

WHY = "a plain run leaves that to `make bench-all`"
_LEFT_OUT: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt-124m", "save"): ("torch-nocrc", "torch_checkpointing", "tensorizer", "flat"),
    ("gpt-124m", "save-durable"): ("torch-nocrc", "dcp-1", "torch_checkpointing", "tensorizer", "flat"),
    ("gpt-124m", "load-into"): ("torch_checkpointing",),
    ("gpt-124m", "load-fresh"): ("tensorizer",),
    ("gpt-124m", "stall"): ("torch_checkpointing",),
    ("gpt-124m", "beside"): ("torch_checkpointing", "bare-writer"),
    ("gpt-124m", "peak"): tuple(name for name, system in SYSTEMS.items() if system.kind == "peer" and name != "dcp-2"),
    ("many-small", "save"): ("torch-nocrc", "dcp-1", "dcp-2", "torch_checkpointing", "flat"),
    ("many-small", "load-into"): ("torch-mmap", "dcp-1", "torch_checkpointing", "flat"),
    ("many-small", "load-fresh"): ("torch-mmap", "flat"),
    ("many-small", "load-mapped"): ("torch-mmap", "flat"),
    ("many-small", "open"): ("torch", "dcp-1"),
}


def left_out(state: str, task: str) -> tuple[str, ...]:
    """The systems that a plain run does not measure at a task: slow ones, and others than those that goals name."""
    return _LEFT_OUT.get((state, task), ())
