"""Where a training stands, in the section that `shardstore.training.Checkpointer` keeps for it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shardstore.run.names import SCHEMA, SECTION

NO_LOG = {"epoch": 0, "lines": 0, "sha256": "0" * 64}
"""What refers to no loss history."""


def section(step: int, epoch: int, batch: int, rng: dict[str, Any]) -> dict[str, Any]:
    """The section of a training after `step` steps, of which `batch` in the epoch `epoch`, both counted from 0.

    The random states at the start of the epoch are unknown: a loader that shuffles by the global generators would
    shuffle differently.
    """
    return {
        "schema": SCHEMA, "step": step, "epoch": epoch, "batch": batch, "rng": rng, "epoch_rng": None, "loader": None,
        "losses": dict(NO_LOG), "config": None, "user_schema": None,
    }  # fmt: skip


def rng_of(python: Any, numpy: Any, torch_cpu: torch.Tensor, cuda: list[torch.Tensor]) -> dict[str, Any]:
    """Random states in the form of that section, each tried. `python`: of `random.getstate`; `numpy`: of `get_state`.

    Raises whatever these generators raise for states that are none.
    """
    random.Random().setstate(python)  # noqa: S311 - a trial
    legacy = np.random.RandomState()
    legacy.set_state(numpy)
    torch.Generator(device="cpu").set_state(torch_cpu)
    return {
        "python": python, "numpy": legacy.get_state(legacy=False), "torch": torch_cpu, "cuda": cuda, "generators": {},
        "loader": [],
    }  # fmt: skip


def seeded(seed: int) -> dict[str, Any]:
    """The random states after seeding everything, for sources that have none."""
    python = random.Random(seed).getstate()  # noqa: S311
    numpy = np.random.RandomState(seed).get_state()
    return rng_of(python, numpy, torch.Generator(device="cpu").manual_seed(seed).get_state(), [])


def same_as_new(place: dict[str, Any]) -> bool:
    """Whether a section says no more than `section` does."""
    rng, more = place["rng"], ("epoch_rng", "loader", "config", "user_schema")
    return all(place.get(name) is None for name in more) and not rng["generators"] and not rng["loader"]


__all__ = ["NO_LOG", "SECTION", "rng_of", "same_as_new", "section", "seeded"]
