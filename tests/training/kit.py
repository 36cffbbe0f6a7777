"""Small states, runs and stores for tests of training."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from shardstore import storage
from shardstore.events import Noticed
from shardstore.training import Checkpointer


class Told(list):
    """A listener that keeps what people are told."""

    def __call__(self, event):
        if isinstance(event, Noticed):
            self.append(event)

    def __bool__(self):
        return True

    @property
    def warnings(self):
        return [event.what for event in self if event.warning]


def small(seed=0):
    """A state of one layer and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def train(state):
    """One step on random data; returns the loss."""
    loss = state["model"](torch.randn(4, 3)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.item()


def trained(folder, steps, *, state=None, resume=None, **how):
    """Train up to a step, saved at each, in a process of its own, as it were; returns the state."""
    state = state or small()
    with Checkpointer(folder, state, **{"every_steps": 1, **how}) as ckpt:
        for _ in range(ckpt.resume(**resume or {}), steps):
            ckpt.step(loss=train(state))
    return state


def weights(state):
    """A copy of the weights."""
    return {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}


def saves(folder):
    """Folders of checkpoints with an index, by step; the newest of each step wins."""
    found = sorted(Path(folder).glob("step-*/shardstore.json"), key=lambda path: path.stat().st_mtime_ns)
    return {int(path.parent.name.split("-")[1]): path.parent for path in found}


def shard(folder):
    """The file with the weights of a checkpoint."""
    return next(Path(folder).glob("model-*.safetensors"))


@contextmanager
def stores(wrap):
    """Put `wrap(store)` between each store that a run opens and the retries around it, which don't wait."""

    def open_store(*arguments, **options):
        opened = storage.open_store(*arguments, **options)
        opened.inner = wrap(opened.inner)
        opened._retries._wait_s = 0
        return opened

    with mock.patch("shardstore.run.facade.open_store", open_store):
        yield
