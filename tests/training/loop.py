"""A small training with all that makes a resume hard."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardstore.training import Checkpointer

EPOCHS = 3
BATCHES = 8


class Noisy(Dataset):
    """Items that differ by what random numbers are drawn for them, as augmentation does. Counts how many it gave."""

    def __init__(self, noise=0.1):
        self.noise, self.given = noise, 0

    def __len__(self):
        return 16

    def __getitem__(self, at):
        self.given += 1
        return torch.full((4,), float(at)) / 16 + (self.noise * torch.rand(4) if self.noise else 0)


class Training:
    """Model with dropout, AdamW, a scheduler, a shuffling loader with augmentation (`noise`), accumulation."""

    def __init__(self, workers=0, accumulate=1, *, generator=False, stateful=False, noise=0.1, skip="auto", seed=7):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is what is meant
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.accumulate = accumulate
        own = torch.Generator().manual_seed(seed) if generator else None
        kind = DataLoader
        if stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            kind = StatefulDataLoader
        self.data, self.skip = Noisy(noise), skip
        self.loader = kind(self.data, 2, shuffle=True, num_workers=workers, generator=own)
        self.losses = {}

    def run(self, ckpt, stop_after=None, at_step=lambda _: None):
        """The loop; `stop_after`: leave it by an error when so many steps are done."""
        ckpt.resume()
        for _ in range(ckpt.epoch, EPOCHS):
            micro = 0
            for batch in ckpt.batches(self.loader, skip=self.skip):
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
