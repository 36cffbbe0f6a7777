"""SIGKILL at random moments, life after life, until enough have died; and what must hold after each death."""

from __future__ import annotations

import os
import random
import secrets
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.zygote import Child, Outcome
from tests.torture.jobs import INTERVAL, Progress, TrainingZygote

WARNED_S = 0.05
"""How long after a SIGTERM, at most, the SIGKILL comes."""


@dataclass
class Place:
    """A store to torture: its name, the URL below which runs are made, and how it is opened."""

    name: str
    url: str
    options: dict[str, Any] | None = None


@dataclass
class Count:
    """What has happened on one store. `lost`: the most steps that a death has cost, in the fore- and background."""

    name: str
    kills: int = 0
    saving: int = 0
    warned: int = 0
    preempted: int = 0
    runs: int = 0
    seconds: float = 0.0
    lost: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.name:<6} {self.kills:>4} killed, {self.saving} of them in a save, {self.warned} warned by SIGTERM "
            f"({self.preempted} more ended by that); {self.runs} runs ended; lost at most "
            f"{self.lost['foreground']} steps, {self.lost['background']} in the background (interval {INTERVAL}); "
            f"{len(self.losses)} losses, "
            f"{len(self.differences)} differences; {self.seconds:.0f} s"
        )

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not self.losses and not self.differences


class Torture:
    """Kills trainings on one store. `expected`: the digests of a training that nothing stopped."""

    def __init__(self, zygote: TrainingZygote, place: Place, chance: random.Random, scratch: Path) -> None:
        self._zygote, self._place, self._chance, self._scratch = zygote, place, chance, scratch
        self._seconds = 1.0
        self.count = Count(place.name)

    def run(self, kills: int, expected: dict[str, str]) -> Count:
        """Until so many have died, and the last run has ended."""
        began = time.perf_counter()
        self._check(self._to_the_end(deadly=False), expected)  # also to learn how long a run takes
        while self.count.kills < kills:
            self._check(self._to_the_end(deadly=True, kills=kills), expected)
        self.count.seconds = time.perf_counter() - began
        return self.count

    def _to_the_end(self, *, deadly: bool, kills: int = 0) -> dict[str, Any]:
        """One run, in as many lives as it takes; returns what the last one has to say."""
        url = f"{self._place.url}/{secrets.token_hex(6)}"
        path = str(self._scratch / f"{self._place.name}-progress")
        progress = Progress(path, new=True)
        background = deadly and self._chance.random() < 1 / 3
        for _ in range(100):
            begun, progress.resumed = progress.completed, -1
            started = time.perf_counter()
            child = self._zygote.start(
                "train", url=url, progress=path, background=background, options=self._place.options
            )
            outcome = self._kill(child, progress) if deadly and self.count.kills < kills else child.wait()
            self._check_loss(url, begun, progress.resumed, background=background)
            progress.completed = max(progress.resumed, progress.completed) if progress.resumed >= 0 else begun
            if outcome.value and "digests" in outcome.value:
                self._seconds = self._seconds if deadly else time.perf_counter() - started
                self.count.runs += 1
                return {**outcome.value, "url": url}
            if outcome.value is None and outcome.signal not in (signal.SIGKILL, signal.SIGTERM):
                self.count.losses.append(f"{url} did not go on by itself: see the traceback")
                return {}
            progress.saving = 0
        self.count.losses.append(f"{url} never came to its end")
        return {}

    def _kill(self, child: Child, progress: Progress) -> Outcome:
        """Let it live for a random time, in a fifth of the cases with a short warning."""
        warned = self._chance.random() < 0.2
        with closing(_Pidfd(child.pid)) as alive:
            ended = alive.ends_within(self._chance.uniform(0, self._seconds * 0.75))
            if warned and not ended:
                alive.send(signal.SIGTERM)
                ended = alive.ends_within(self._chance.uniform(0, WARNED_S))
            if not ended:
                alive.send(signal.SIGKILL)
        outcome = child.wait()
        if outcome.signal == signal.SIGKILL:
            self.count.kills += 1
            self.count.warned += warned
            self.count.saving += progress.saving
        elif outcome.signal == signal.SIGTERM or (outcome.value and "preempted" in outcome.value):
            self.count.preempted += 1
        return outcome

    def _check_loss(self, url: str, completed: int, resumed: int, *, background: bool) -> None:
        """No death costs more than an interval; in the background the save that was under way is lost, too."""
        if resumed < 0:
            return  # it died before it knew
        mode = "background" if background else "foreground"
        lost = completed - resumed
        self.count.lost[mode] = max(self.count.lost[mode], lost)
        if lost > INTERVAL * (2 if background else 1):
            self.count.losses.append(f"{url}: {completed} steps were done, and it went on from {resumed}")

    def _check(self, ended: dict[str, Any], expected: dict[str, str]) -> None:
        if not ended:
            return
        different = [name for name, digest in expected.items() if ended["digests"][name] != digest]
        if different:
            self.count.differences.append(f"{ended['url']}: {', '.join(different)}")
        if ended["marked"] or any("passed over" in what for what in ended["warnings"]):
            self.count.losses.append(f"{ended['url']}: {ended['marked']} {ended['warnings']}")


class _Pidfd:
    """A process that is no child of this one."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ends_within(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))

    def send(self, number: int) -> None:
        signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def torturing(scratch: Path) -> Iterator[tuple[TrainingZygote, dict[str, str]]]:
    """What forks trainings, and the digests of one that nothing stopped, nor saved."""
    with TrainingZygote() as zygote:
        path = str(scratch / "whole-progress")
        Progress(path, new=True)
        whole = zygote.run("train", url="memory://whole", progress=path).value
        yield zygote, whole["digests"]
