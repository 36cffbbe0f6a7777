"""States that their number tells, all of it, so that a mixture of two of them can't pass for either."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.same import assert_same

BIG = 100_000
"""States from this number on hold 9 MiB in one tensor, which takes three blocks."""


def state(number: int) -> dict[str, Any]:
    """The state of a number. Every third one has no weights, and the number of its tensors differs, too."""
    made: dict[str, Any] = {"step": number, "history": [number, f"epoch {number}", (number / 7, None)]}
    rows = 2_359_296 if number >= BIG else 64 + number % 5
    if number % 3 != 2:
        table = torch.full((rows,), float(number))
        made["model"] = {"table": table, "bias": torch.arange(5) + number, "tied": table}
    moments = {f"m{n}": torch.full((8, n + 1), number + n / 10, dtype=torch.float64) for n in range(1 + number % 2)}
    made["optimizer"] = {"moments": moments, "count": number}
    return made


def number_of(loaded: dict[str, Any]) -> int:
    """The number of a loaded state; AssertionError unless it is that state, wholly."""
    number = loaded["step"]
    assert_same(loaded, state(number))
    return number
