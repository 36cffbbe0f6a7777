"""The flat file of a C trainer, as people convert it: step and count, then weights and AdamW's moments in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardstore
from benchmarks.states import Case, difference

STEP = 7
NAME = f"step_{STEP:06d}.bin"
MOMENTS = ("exp_avg", "exp_avg_sq")


@contextmanager
def written(case: Case, folder: Path) -> Iterator[None]:
    """A state of GPT's kind as such a file."""
    parts = (case.state["model"], *(case.state["optimizer"][key] for key in MOMENTS))
    with (folder / NAME).open("wb") as file:
        np.array([STEP, sum(tensor.numel() for tensor in parts[0].values())], "<i4").tofile(file)
        for part in parts:
            for tensor in part.values():
                tensor.numpy().tofile(file)
    yield


def read(case: Case, folder: Path) -> dict[str, Any]:
    """The file by plain numpy, as a state of the same structure."""
    with (folder / NAME).open("rb") as file:
        count = int(np.fromfile(file, "<i4", 2)[1])
        parts = [torch.from_numpy(np.fromfile(file, "<f4", count)) for _ in range(3)]
    model, *moments = (_cut(part, case.state["model"]) for part in parts)
    return {"model": model, "optimizer": dict(zip(MOMENTS, moments, strict=True))}


def _cut(numbers: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    pieces = numbers.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


def wrong(case: Case, folder: Path) -> str | None:
    """What is wrong with the checkpoint that was made of the file."""
    got = shardstore.load(folder / "checkpoint")
    if states := got["optimizer"].get("state"):
        got["optimizer"] = {key: {name: values[key] for name, values in states.items()} for key in MOMENTS}
    return difference(case.state, {key: got[key] for key in ("model", "optimizer")})
