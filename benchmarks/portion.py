"""Which rows a partial read wants."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.states import Case, leaves

LARGEST, SHARE = 3, 0.01

Portion = Mapping[str, slice]  # dotted name -> rows


def portion(case: Case) -> Portion:
    """1 % of the bytes of a state, as rows out of the middle of its three largest tensors."""
    largest = sorted(leaves(case.state), key=lambda item: -item[1].nbytes)[:LARGEST]
    each = SHARE * case.nbytes / len(largest)
    wanted = {}
    for name, tensor in largest:
        count = max(1, round(each / tensor[0].nbytes))
        start = (len(tensor) - count) // 2
        wanted[name] = slice(start, start + count)
    return wanted


def missed(case: Case, got: Mapping[str, torch.Tensor]) -> str | None:
    """What is wrong with what a partial read gave, None if nothing is."""
    tensors = dict(leaves(case.state))
    for name, rows in portion(case).items():
        want = tensors[name][rows]
        if got[name].dtype != want.dtype or not torch.equal(got[name], want):
            return f"other rows of {name}"
    return None
