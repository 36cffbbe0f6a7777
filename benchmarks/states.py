"""What is saved: named states, made anew with the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Tree = dict[str, Any]  # tensors, or dicts of the same


@dataclass(frozen=True)
class Kind:
    """A state that can be asked for by name. `each`: what its tables count, in µs; empty: GB/s.

    `tasks`: it is for these only. `ranks`: so many processes save it together; `benchmarks.ranks` measures that.
    """

    about: str
    build: Callable[[], Tree] = field(repr=False)
    each: str = ""
    tasks: tuple[str, ...] = ()
    ranks: int = 0


def gpt_shapes(layers: int, width: int, words: int, context: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a GPT-2."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (words, width), "wpe.weight": (context, width)}
    for layer in range(layers):
        for name, shape in {
            "ln_1": (width,),
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "ln_2": (width,),
            "mlp.c_fc": (width, 4 * width),
            "mlp.c_proj": (4 * width, width),
        }.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


GPT_124M = {"layers": 12, "width": 768, "words": 50257, "context": 1024}
TOY = {"layers": 1, "width": 32, "words": 512, "context": 16}


def _gpt(**size: int) -> Tree:
    """The tensors of a GPT-2 of that shape with AdamW's two moments, all in float32."""
    shapes, make = gpt_shapes(**size), _maker()
    model = {name: make(shape) for name, shape in shapes.items()}
    moments = {key: {name: make(shape) for name, shape in shapes.items()} for key in ("exp_avg", "exp_avg_sq")}
    return {"model": model, "optimizer": moments}


def _mixed(**size: int) -> Tree:
    """The same as trained in mixed precision: weights in bfloat16, of which float32 has the master copy."""
    tree = _gpt(**size)
    return {"model": like(tree["model"], torch.Tensor.bfloat16), "master": tree["model"], **tree["optimizer"]}


def _many(count: int, numbers: int) -> Tree:
    """That many tensors of so many float32 numbers, each with memory of its own."""
    make = _maker()
    return {f"t{at:06d}.weight": make((numbers,)) for at in range(count)}


def _maker() -> Callable[[tuple[int, ...]], torch.Tensor]:
    numbers = np.random.Generator(np.random.SFC64(0))
    return lambda shape: torch.from_numpy(numbers.random(shape, dtype=np.float32))


BASIC = ("save", "load-into", "load-fresh", "load-mapped", "partial")
LISTS = ("list", "newest")
_FSDP = "a GPT-2 of 124M parameters with AdamW in float32, sharded by FSDP2"

STATES = {
    "gpt-124m": Kind(
        "a GPT-2 of 124M parameters with AdamW's moments in float32: 444 tensors, 1.49 GB", lambda: _gpt(**GPT_124M)
    ),
    "many-small": Kind("100,000 tensors of 1 KB in one flat dict", lambda: _many(100_000, 256), each="tensor"),
    "one-huge": Kind("one tensor of 2 GB", lambda: _many(1, 500_000_000), tasks=BASIC),
    "bf16-mix": Kind(
        "a GPT-2 of 124M parameters in bfloat16, master weights and AdamW's moments in float32: 592 tensors, 1.74 GB",
        lambda: _mixed(**GPT_124M),
        tasks=BASIC,
    ),
    "run-10k": Kind("a run of 10,000 checkpoints", lambda: _many(10_000, 1), each="checkpoint", tasks=LISTS),
    "fsdp-2": Kind(f"{_FSDP}, on 2 ranks of gloo", dict, ranks=2),
    "fsdp-4": Kind(f"{_FSDP}, on 4 ranks of gloo", dict, ranks=4),
    "thousand": Kind("1,024 simulated ranks with a part of each of 1,000 tensors", dict),
    "toy": Kind("a GPT-2 of toy size: 48 tensors, 0.3 MB", lambda: _gpt(**TOY)),
    "toy-many": Kind("300 tensors of 1 KB in one flat dict", lambda: _many(300, 256), each="tensor"),
    "toy-mix": Kind("a GPT-2 of toy size in mixed precision", lambda: _mixed(**TOY), tasks=BASIC),
    "toy-fsdp": Kind("a GPT-2 of toy size with AdamW, sharded by FSDP2 on 2 ranks of gloo", dict, ranks=2),
    "toy-run": Kind("a run of 20 checkpoints", lambda: _many(20, 1), each="checkpoint", tasks=LISTS),
}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors below, with dotted names."""
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield prefix + key, value
        else:
            yield from leaves(value, f"{prefix}{key}.")


def like(tree: Mapping[str, Any], make: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    """The same structure, each tensor replaced by what `make` makes of it."""
    return {key: make(value) if isinstance(value, torch.Tensor) else like(value, make) for key, value in tree.items()}


def zero(tree: Mapping[str, Any]) -> None:
    """Set every number to zero, so that a load that does nothing is found out."""
    for _, tensor in leaves(tree):
        tensor.zero_()


def difference(want: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """Where two states differ in names, types, shapes or bits; None where they are the same."""
    wanted, given = dict(leaves(want)), dict(leaves(got))
    if wanted.keys() != given.keys():
        return f"{len(given)} tensors instead of {len(wanted)}, or other names"
    for name, tensor in wanted.items():
        other = given[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return f"{name} is {other.dtype} {tuple(other.shape)}"
        if not torch.equal(_bits(tensor), _bits(other)):
            return f"{name} has other bytes"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.element_size() == 4 else tensor.reshape(-1).view(torch.uint8)


@dataclass
class Case:
    """A state that is being measured, with touched memory of the same shapes to load into."""

    name: str
    threads: int
    state: Tree = field(repr=False)
    target: Tree = field(repr=False)
    tensors: int
    nbytes: int
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # what systems prepare outside the timed part

    @classmethod
    def of(cls, name: str, threads: int) -> Case:
        """Build the state and a target of zeros."""
        state = STATES[name].build()
        target = like(state, torch.zeros_like)
        zero(target)  # touches it: zeros come untouched
        sizes = [tensor.nbytes for _, tensor in leaves(state)]
        return cls(name, threads, state, target, len(sizes), sum(sizes))

    def clear(self) -> None:
        """Give the memory back; what remains are the name and the sizes."""
        for tree in (self.state, self.target, self.cache):
            tree.clear()
