"""Save a training state, and load it into freshly built objects: `python examples/quickstart.py [FOLDER]`.

FOLDER must not hold a checkpoint yet; without it a temporary folder is used.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import shardstore


def build() -> dict:
    """A model, its optimizer and how far they have come: a state is a dict of whatever belongs together."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}


def train(state: dict) -> None:
    """One step on random data."""
    state["model"](torch.randn(16, 8)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["step"] += 1


def main(folder: Path) -> None:
    """The three lines are those that call shardstore."""
    state = build()
    for _ in range(3):
        train(state)
    saved = shardstore.save(state, folder, step=state["step"])
    print(f"saved {saved.nbytes:,} bytes to {saved.url} in {saved.seconds:.3f} s")

    again = shardstore.load(folder, into=build())  # new objects; a part of the checkpoint that does not fit is an error
    print(f"loaded step {again['step']} into new objects")

    weights = shardstore.load(folder, only="model")["model"]  # or as plain tensors
    same = all(torch.equal(weights[name], tensor) for name, tensor in state["model"].state_dict().items())
    print("equal to what was saved:", same)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="shardstore-quickstart-") as temporary:
            main(Path(temporary, "checkpoint"))
