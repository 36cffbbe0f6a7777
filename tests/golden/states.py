"""The states that lie in the golden checkpoints, built anew."""

from __future__ import annotations

import datetime as dt
import math
import pathlib
import struct
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardstore.specs import DTYPES

INTS = {
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "uint32": "I",
    "int32": "i",
    "uint64": "Q",
    "int64": "q",
}
FLOATS = {"float16": "e", "float32": "f", "float64": "d"}


def little(name: str) -> bytes:
    """The bytes of the golden tensor of a dtype, written down by hand: little-endian where they are numbers.

    Unsigned ints are 1 and the largest, signed ones 1 and -2, floats 1.5 and -2.0, complex ones 1.5-2j alone. Narrow
    and packed types are the bytes 0x21 and 0x10.
    """
    if name in INTS:
        code = INTS[name]
        return struct.pack(f"<2{code}", 1, 2 ** (8 * struct.calcsize(f"<{code}")) - 1 if code.isupper() else -2)
    if name in FLOATS:
        return struct.pack(f"<2{FLOATS[name]}", 1.5, -2.0)
    known = {
        "bool": b"\1\0", "bfloat16": b"\xc0\x3f\x00\xc0", "complex32": struct.pack("<2e", 1.5, -2.0),
        "complex64": struct.pack("<2f", 1.5, -2.0), "complex128": struct.pack("<2d", 1.5, -2.0),
        "bits16": b"\x21\x43\x10\x00",
    }  # fmt: skip
    return known.get(name, b"\x21\x10")


def dtypes() -> dict[str, Any]:
    """A tensor of every dtype that this torch has, by its name."""
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is experimental
        for name in DTYPES:
            dtype = getattr(torch, name, None)
            if dtype is not None:
                made[name] = torch.frombuffer(bytearray(little(name)), dtype=torch.uint8).view(dtype)
    return {"model": made}


@dataclass
class Point:
    """A class of the user's, which the golden checkpoint has under the name `golden.point`."""

    x: int
    at: torch.Tensor


def bits(text: str) -> float:
    """A float from its bits."""
    return struct.unpack(">d", bytes.fromhex(text))[0]


def values() -> dict[Any, Any]:
    """Every tag of the format, ties, odd strides, odd names."""
    w = torch.arange(12.0).view(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse CSR is in beta
        csr = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr()
    return {
        "model": OrderedDict(
            [
                ("emb.weight", w),
                ("head.weight", w),
                ("t", w.t()),
                ("half", w.to(torch.bfloat16)),
                ("none", torch.zeros(0, 3)),
            ]
        ),
        "x/y": {"%": torch.tensor(3), "": torch.tensor(4.0), "__metadata__": torch.ones(2), "Ωλ": torch.zeros(1)},
        "numbers": [
            *(0, -1, 2**53, 2**53 + 1, -(2**70), 10**40, True, False, None, 1.0, 0.1, -0.0, 5e-324, 1e308),
            *(
                math.inf,
                -math.inf,
                bits("7ff8000000000000"),
                bits("fff8dead0000beef"),
                1.5 - 2j,
                complex(math.inf, -0.0),
            ),
        ],
        "texts": ["", "ä\u2028\x00\U0001f600", b"", b"\x00\xff", bytearray(b"ab"), "$t", {"$t": 1}, {"a": {"$": 2}}],
        "containers": [
            *((), (1,), [(), [], {}], {1, 2}, frozenset({"a"}), set(), OrderedDict(b=1, a=2), Counter({25: 1, "x": 2})),
            {1: "int", "1": "str", None: 0, False: 2, (1, (2,)): 3, 1.5: 4, b"b": 5},
        ],
        "torch": [torch.float32, torch.float8_e4m3fn, torch.device("cuda:3"), torch.device("cpu"), torch.Size([2, 3])],
        "dates": [
            dt.datetime(2024, 1, 2, 3, 4, 5, 678),  # noqa: DTZ001 - naive ones are stored, too
            dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
            dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=45))),
            *(dt.date(2024, 2, 29), dt.time(1, 2, 3), dt.timedelta(days=-1, microseconds=1)),
        ],
        "paths": [pathlib.Path("/a/b c"), pathlib.Path("x")],
        "numpy": [
            *(np.float64(0.1), np.int64(7), np.bool_(True), np.float16(0.5), np.uint8(3), np.complex64(1 - 2j)),
            *(np.str_("ä"), np.bytes_(b"a"), np.datetime64("2024-01-02T03:04:05", "s"), np.timedelta64(5, "D")),
            *(np.arange(6, dtype="<i4").reshape(2, 3).T, np.array([1.5], ">f8"), np.zeros((0, 2), "<f4")),
            *(np.array(["2024-01-02"], "M8[D]"), np.array(True)),
        ],
        "tensors": [
            nn.Parameter(torch.ones(2)),
            nn.Parameter(torch.ones(2), requires_grad=False),
            torch.tensor([1.0], requires_grad=True),
            torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
            csr,
            (w, {"tied": w}),
        ],
        "custom": Point(3, torch.arange(2)),
        7: {"a section with a number": torch.tensor([7])},
    }


def flat() -> OrderedDict[str, torch.Tensor]:
    """A state_dict as a Module makes it, with torch's versions of its parts."""
    return module().state_dict()


def module() -> nn.Module:
    """A small Module with fixed values."""
    made = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), n=nn.BatchNorm1d(3)))
    with torch.no_grad():
        for number, tensor in enumerate(made.state_dict().values()):
            tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape) / 8 + number)
    return made


def objects() -> dict[str, Any]:
    """A Module, an Optimizer that has stepped, and a scheduler with a function that can't be stored."""
    model = module()
    optimizer = torch.optim.AdamW(
        [{"params": [model.a.weight]}, {"params": [model.a.bias], "lr": 0.5}], lr=0.25, foreach=False
    )
    for parameter in (model.a.weight, model.a.bias):
        parameter.grad = torch.ones_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(2.0), "exp_avg": torch.full_like(parameter, 0.5).detach(),
                                      "exp_avg_sq": torch.full_like(parameter, 0.25).detach()}  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5**e, lambda e: 1.0])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 2}


def pieces() -> dict[str, Any]:
    """A tensor that lies in three pieces, as ranks would write it, and one that lies whole beside it."""
    return {"model": {"whole": torch.arange(4.0), "parts": torch.arange(24.0).view(4, 6)}, "n": 1}
