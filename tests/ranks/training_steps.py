"""Trainings of several ranks, by name."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import torch
import torch.distributed as dist

from shardstore.training import Checkpointer, Preempted
from tests.ranks.jobs import step
from tests.ranks.models import build, print_of


@step
def train(
    url: str, total: int, *, layout: str = "fsdp", background: bool = False,
    signals: dict[str, list[int]] | None = None, kill: dict[str, int] | None = None, every_steps: int | None = 2,
) -> dict[str, Any]:  # fmt: skip
    """Train to `total`; `signals`: by rank, a signal and the step at which it comes; `kill`: by rank, at which step."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(rank)
    state = build(layout)
    noticed: list[str] = []
    listener = lambda event: noticed.append(getattr(event, "what", ""))  # noqa: E731
    number, at = (signals or {}).get(str(rank), (0, -1))
    losses, saved, code = [], [], 0
    try:
        with Checkpointer(url, state, every_steps=every_steps, background=background, listener=listener) as ckpt:
            for now in range(ckpt.resume(), total):
                if (kill or {}).get(str(rank)) == now:
                    os.kill(os.getpid(), signal.SIGKILL)
                losses.append(_step(state, now))
                if now == at:
                    os.kill(os.getpid(), number)
                done = ckpt.step(loss=losses[-1])
                if done is not None:
                    saved.append(done.step)
    except Preempted as stop:
        code = int(stop.code or 0)
    return {
        "print": print_of(state), "losses": losses, "saved": saved, "code": code, "completed": ckpt.completed,
        "random": [random.random(), float(torch.rand(()))], "noticed": [text for text in noticed if text],
    }  # fmt: skip


def _step(state: dict[str, Any], now: int) -> float:
    """A step in which chance has a part, the same on every rank for the data and different for each beside."""
    generator = torch.Generator().manual_seed(now)
    loss = state["model"](torch.randn(4, 6, generator=generator) + 0 * torch.rand(())).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return float(loss.detach())
