"""Small trainings with Adam, for the tests of formats that hold one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardstore.memory import load

Training = tuple[nn.Module, torch.optim.Optimizer]


class Tied(nn.Module):
    """A model with a tie and a buffer, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.emb(tokens)))


def tied(groups: bool = False) -> Training:
    """That model with AdamW, in two groups on request."""
    torch.manual_seed(11)
    model = Tied()
    decay, other = [model.emb.weight], list(model.norm.parameters())
    params: Any = [{"params": other, "weight_decay": 0.0}, {"params": decay}] if groups else model.parameters()
    return model, torch.optim.AdamW(params, lr=0.01)


def train(training: Training, steps: int, seed: int = 0) -> list[float]:
    """Some steps on random tokens; the losses."""
    model, optimizer = training
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 7, (3, 5), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(training: Training, **more: Any) -> dict[str, Any]:
    """The state that is saved."""
    return {"model": training[0], "optimizer": training[1], **more}


def numbers(tensor: Any) -> list[float]:
    """The values of a tensor, lazy or not."""
    values: list[float] = load(tensor).reshape(-1).tolist()
    return values
