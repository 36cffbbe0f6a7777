"""The training that is killed: forked from a process that has imported all, so that a life costs next to nothing."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from shardstore.events import Noticed
from shardstore.storage import local, memory
from shardstore.training import Checkpointer, KeepLast, Preempted, saver
from tests.crash.zygote import REPOSITORY, Zygote, _Server
from tests.training.loop import Training

INTERVAL = 2
_CHANGING = (
    "write", "writev", "pwrite", "pwritev", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "link",
)  # fmt: skip


class TrainingZygote(Zygote):
    """Forks child processes that train."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )


class Progress:
    """How far a training is, in a small file that outlives it: written to memory only, so at once and for nothing."""

    def __init__(self, path: str, *, new: bool = False) -> None:
        self._numbers = np.memmap(path, dtype=np.int64, mode="w+" if new else "r+", shape=(3,))
        if new:
            self.completed, self.resumed, self.saving = 0, -1, 0

    completed = property(lambda self: int(self._numbers[0]), lambda self, to: self._numbers.__setitem__(0, to))
    """Steps after which `Checkpointer.step` has returned."""
    resumed = property(lambda self: int(self._numbers[1]), lambda self, to: self._numbers.__setitem__(1, to))
    """Where this life began; -1 before that is known."""
    saving = property(lambda self: int(self._numbers[2]), lambda self, to: self._numbers.__setitem__(2, to))
    """Whether a save is under way."""


def train(
    url: str, progress: str, *, background: bool = False, options: dict[str, Any] | None = None, kill_at: int = 0,
    warn: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end. Answers with digests of all that must be equal; with `preempted`, if a signal came before.

    `kill_at`: SIGKILL comes before that system call, of those that change a file; SIGTERM `warn` calls earlier.
    """
    training, seen, warnings = Training(), Progress(progress), []

    def hear(event: object) -> None:
        if isinstance(event, Noticed) and event.warning:
            warnings.append(event.what)

    def at_step(step: int) -> None:
        seen.completed = step

    how = {"every_steps": INTERVAL, "keep": [KeepLast(2)], "background": background, "storage_options": options}
    try:
        with _told(seen), _killed(kill_at, warn), Checkpointer(url, training.state, listener=hear, **how) as ckpt:
            _begin(ckpt, seen)
            training.run(ckpt, at_step=at_step)
            evidence, losses = training.evidence(), dict(ckpt.run.losses())
            marked = [one.name for one in ckpt.run.checkpoints() if one.quarantined or one.state == "damaged"]
    except Preempted:
        return {"preempted": True, "warnings": warnings}
    digests = {name: digest(value) for name, value in [*evidence.items(), ("losses", losses)]}
    return {"digests": digests, "marked": marked, "warnings": warnings}


def _begin(ckpt: Checkpointer, seen: Progress) -> None:
    """Note where the training goes on, as soon as it does."""
    resume = ckpt.resume

    def noted() -> int:
        seen.resumed = resume()
        return seen.resumed

    ckpt.resume = noted  # type: ignore[method-assign]


@contextmanager
def _told(seen: Progress) -> Iterator[None]:
    """While it saves, this can be seen from outside."""
    save = saver.save_flat

    def told(*arguments: Any, **options: Any) -> Any:
        seen.saving = 1
        try:
            return save(*arguments, **options)
        finally:
            seen.saving = 0

    with mock.patch.object(saver, "save_flat", told):
        yield


@contextmanager
def _killed(number: int, warn: int) -> Iterator[None]:
    """This process gets SIGKILL before its `number`-th system call that changes a file, and SIGTERM before that."""
    left, lock = [number], threading.Lock()

    def counted(call: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            with lock:
                left[0] -= 1
                now = left[0]
            if warn and now == warn:
                os.kill(os.getpid(), signal.SIGTERM)
            if now == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return made

    with ExitStack() as patches:
        for name in _CHANGING if number else ():
            patches.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        yield


def digest(value: Any) -> str:
    """One of all bits of a value, types and order included."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:16]


def _feed(found: Any, value: Any) -> None:
    found.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            _feed(found, key)
            _feed(found, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(found, item)
    else:
        found.update(value.hex().encode() if isinstance(value, float) else repr(value).encode())


def warm_up() -> None:
    """Train once in memory, so that no child finds its way anew. No thread is left: none survives a fork."""
    import tempfile

    import s3fs  # noqa: F401

    torch.set_num_threads(1)
    local._BLINKS = tuple(seconds / 10 for seconds in local._BLINKS)  # nobody else is there who replaces a file
    with tempfile.NamedTemporaryFile() as file:
        Progress(file.name, new=True)
        for background in (False, True):
            train("memory://warm", file.name, background=background)
            memory.reset()
    gc.freeze()


if __name__ == "__main__":
    warm_up()
    _Server({"train": train}).serve()
