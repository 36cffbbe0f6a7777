"""A small training with all that makes a resume hard; `python -m tests.training.loop` is what tests kill."""

from __future__ import annotations

import os
import random
import signal
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardstore.training import Checkpointer, KeepLast

EPOCHS = 3
BATCHES = 8


class Noisy(Dataset):
    """Items that differ by what random numbers are drawn for them, as augmentation does."""

    def __len__(self):
        return 16

    def __getitem__(self, at):
        return torch.full((4,), float(at)) / 16 + 0.1 * torch.rand(4)


class Training:
    """Model with dropout, AdamW, a scheduler, a shuffling loader with augmentation, accumulation over two batches."""

    def __init__(self, workers=0, accumulate=1, generator=False, seed=7):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is what is meant
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.accumulate = accumulate
        own = torch.Generator().manual_seed(seed) if generator else None
        self.loader = DataLoader(Noisy(), 2, shuffle=True, num_workers=workers, generator=own)
        self.losses = {}

    def run(self, ckpt, stop_after=None, at_step=lambda _: None):
        """The loop; `stop_after`: leave it by an error when so many steps are done."""
        ckpt.resume()
        for _ in range(ckpt.epoch, EPOCHS):
            micro = 0
            for batch in ckpt.batches(self.loader):
                loss = self.model(batch).square().mean() + random.random() * 0.01 + np.random.rand() * 0.01  # noqa: NPY002
                loss.backward()
                micro += 1
                if micro % self.accumulate:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.losses[ckpt.completed + 1] = loss.item()
                ckpt.step(loss=loss)
                at_step(ckpt.completed)
                if ckpt.completed == stop_after:
                    raise KeyboardInterrupt

    def evidence(self):
        """All that must be the same after a resume."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(), "lr": self.scheduler.get_last_lr(),
            "rng": [torch.rand(3), random.random(), float(np.random.rand())],  # noqa: NPY002
        }  # fmt: skip


def whole(folder, **how):
    """The evidence, and the losses, of a training that nothing interrupts."""
    training = Training(**how)
    with Checkpointer(folder, training.state) as ckpt:
        training.run(ckpt)
        evidence = training.evidence()
        losses = dict(ckpt.run.losses())
    return evidence, losses


def _kill_at(number, grace):
    """SIGKILL this process before its system call of that number that changes a file, SIGTERM `grace` calls earlier."""
    left = [number]

    def counted(call):
        def made(*arguments, **options):
            left[0] -= 1
            if grace and left[0] == grace:
                os.kill(os.getpid(), signal.SIGTERM)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return made

    for name in (
        "write",
        "writev",
        "pwrite",
        "pwritev",
        "fsync",
        "rename",
        "replace",
        "unlink",
        "mkdir",
        "rmdir",
        "link",
    ):
        setattr(os, name, counted(getattr(os, name)))


def main(folder, kill_at, mode):
    """Train in a folder to the end; the evidence goes to a file beside it."""
    torch.set_num_threads(1)
    training = Training()
    if kill_at:
        _kill_at(kill_at, 12 if mode == "preempted" else 0)
    how = {"every_steps": 2, "keep": [KeepLast(2)], "background": mode == "background"}
    with Checkpointer(folder, training.state, **how) as ckpt:
        training.run(ckpt)
        evidence, losses = training.evidence(), dict(ckpt.run.losses())
    torch.save((evidence, losses), f"{folder}.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
