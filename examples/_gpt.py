"""A small GPT on bytes, and its training: AdamW with two groups, a one-cycle learning rate, dropout.

Nothing here knows of shardstore.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - what everybody calls it
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR


@dataclass(frozen=True)
class Config:
    """The sizes of a model and of its training. `steps`: how long the one cycle of the learning rate is."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 8
    dropout: float = 0.1
    steps: int = 60
    peak_lr: float = 1e-3
    text_bytes: int = 1_000_000


class Block(nn.Module):
    """Attention, then an MLP, each added to what comes in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self._attention(self.norm_1(x)))
        return x + self._dropped(self.mlp(self.norm_2(x)))

    def _attention(self, x: Tensor) -> Tensor:
        split = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        queries, keys, values = split
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Decoder only, one token for each byte; the embedding and the output layer are one tensor, tied."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token, self.position = nn.Embedding(256, config.width), nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        self.apply(_start)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(config: Config, seed: int) -> tuple[GPT, Optimizer, LRScheduler]:
    """A new model with random weights, and the optimizer and the scheduler that train it."""
    torch.manual_seed(seed)
    model = GPT(config)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=config.peak_lr)
    return model, optimizer, OneCycleLR(optimizer, config.peak_lr, total_steps=config.steps)


def train_step(model: GPT, optimizer: Optimizer, scheduler: LRScheduler, text: Tensor) -> float:
    """One step on random places of the text. Which ones, and the dropout, come from torch's global generator."""
    config = model.config
    starts = torch.randint(len(text) - config.context, (config.batch, 1))
    chunk = text[starts + torch.arange(config.context + 1)].long()
    loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()
