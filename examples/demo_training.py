"""The training that the demo kills, stops and forks: `python examples/demo_training.py RUN [CONFIG as JSON]`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from _gpt import Config, build, train_step
from _telling import fingerprint
from _text import python_text

from shardstore.training import Checkpointer, KeepEvery, KeepLast


def main(run: str, config: Config) -> None:
    """Train to the end from wherever the run is; what was reached is printed as JSON."""
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)  # one order of adding up, so one result
    text = python_text(config.text_bytes)
    model, optimizer, scheduler = build(config, seed=1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    keep = [KeepLast(2), KeepEvery(20)]
    with Checkpointer(run, state, every_steps=10, keep=keep, config=asdict(config)) as ckpt:
        begin = ckpt.resume()
        samples = ckpt.run.sidecar("samples")
        for _ in range(begin, config.steps):
            saved = ckpt.step(loss=train_step(model, optimizer, scheduler, text))
            if saved is not None:
                samples.write([*samples.read([]), {"step": saved.step, "text": sample(model)}])
    print(json.dumps({"from": begin, "weights": fingerprint(model)}))


@torch.no_grad()
def sample(model: torch.nn.Module, length: int = 24) -> str:
    """What the model thinks comes after `Python `, always the likeliest byte; draws no random numbers."""
    model.eval()
    tokens = list(b"Python ")
    for _ in range(length):
        seen = torch.tensor([tokens[-model.config.context :]])
        tokens.append(int(model(seen)[0, -1].argmax()))
    model.train()
    return bytes(tokens).decode("ascii", "replace")


if __name__ == "__main__":
    main(sys.argv[1], Config(**json.loads(sys.argv[2])) if len(sys.argv) > 2 else Config())
