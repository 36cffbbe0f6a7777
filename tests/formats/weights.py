"""States of weights for the tests of formats, and hostile ways to change a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shardstore.memory import load
from shardstore.specs import DTYPES, Lazy

OTHER_TOOLS = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
]  # fmt: skip
"""Dtypes that the safetensors format has."""


def everything() -> dict[str, torch.Tensor]:
    """One tensor of each dtype that safetensors has, odd shapes, a view, a tie."""
    torch.manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        if name in OTHER_TOOLS and hasattr(torch, name):
            bits = torch.randint(0, 2 if name == "bool" else 200, (6, 2 * dtype.itemsize), dtype=torch.uint8)
            tensors[f"t.{name}"] = bits.view(getattr(torch, name))
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["view"] = torch.arange(12.0).view(3, 4).t()[1:, ::2]
    tensors["tied"] = tensors["t.float32"]
    tensors['odd "name" \u00e9/..'] = torch.ones(3, dtype=torch.bfloat16)
    return tensors


def loaded(value: Any) -> Any:
    """Plain data with every lazy tensor in memory."""
    if isinstance(value, Lazy):
        return load(value)
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(loaded, value))
    return value


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """The same with some bytes changed, cut, doubled, or all of it replaced."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(made) - 1)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "double"]))
        if kind == "set" and made:
            made[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del made[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            made[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            made[at:at] = made[at : at + 20]
    return bytes(made)


def marker(folder: Path) -> tuple[Path, Any]:
    """A file that must not come to be, and an object whose unpickling would make it."""
    planted = folder / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return exec, (f"open({str(planted)!r}, 'w').close()",)

    return planted, Evil()
