"""A training that may be killed at any time and started again: `python examples/train.py [FOLDER]`."""

from __future__ import annotations

import sys

import torch

from shardstore.training import Checkpointer, KeepLast

folder = sys.argv[1] if len(sys.argv) > 1 else "run"

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with Checkpointer(folder, state, every_steps=100, keep=[KeepLast(3)]) as ckpt:
    for _ in range(ckpt.resume(), 1000):
        loss = (model(torch.randn(16, 8)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(loss=loss)
    print(f"{ckpt.completed} steps are done, the last loss is {ckpt.run.losses()[1000]:.4f}")
