"""Train a small model with FSDP2, save, and go on with any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp.py     # trains 10 steps and saves
    torchrun --nproc-per-node 3 examples/fsdp.py     # loads the same bits into 3 ranks, trains 10 more and saves
    python examples/fsdp.py                          # and one plain process goes on from there

The sums that are printed are those of all weights and moments, whole: what was saved is what is loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardstore

STEPS = 10
BATCH = 12
WIDTH = 61  # a prime, so that no number of ranks divides it: parts may be uneven, and empty


def build() -> dict[str, Any]:
    """A model with its optimizer: spread over all ranks where there are some, plain where this process is alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    if dist.is_initialized():
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "step": 0}


def train(state: dict[str, Any], steps: int) -> None:
    """Some steps, each rank on its own part of the batch."""
    model, optimizer = state["model"], state["optimizer"]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(state["step"], state["step"] + steps):
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))[rank::size]
        loss = (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
    say(f"step {state['step']}: loss {loss.item():.4f} on rank 0")


def checksum(state: dict[str, Any]) -> str:
    """A sum over all weights and moments, whatever the layout; all ranks must call it."""
    names = {id(param): name for name, param in state["model"].named_parameters()}
    tensors = dict(state["model"].named_parameters())
    for param, moments in state["optimizer"].state.items():
        tensors |= {f"{names[id(param)]}.{key}": value for key, value in moments.items()}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode() + whole.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def say(text: str) -> None:
    """Print on one rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Load what is there, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "url", nargs="?", default="fsdp-checkpoint", help="where the checkpoint lies (a folder, s3://...)"
    )
    url = parser.parse_args().url
    if "WORLD_SIZE" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    state = build()
    try:
        shardstore.load(url, into=state)
        say(f"loaded step {state['step']}, sum {checksum(state)}")
    except shardstore.CheckpointNotFound:
        say("nothing to load: training from the start")
    train(state, STEPS)
    saved = shardstore.save(state, url, step=state["step"], overwrite=True)
    say(f"saved step {saved.step}, sum {checksum(state)}: {saved.nbytes} bytes in {saved.seconds:.2f} s")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
