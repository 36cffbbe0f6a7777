"""A loader in memory: what the real one does with files, done with clones."""

from __future__ import annotations

import struct

import numpy as np
import torch

from shardstore.tree import bind, dump_meta, flatten, parse_meta, restore, select


def copied(tensor):
    """A contiguous copy; torch itself can't copy some of its dtypes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    try:
        return plain.clone(memory_format=torch.contiguous_format)
    except NotImplementedError:
        return plain.view(torch.uint8).clone().view(plain.dtype)


class Saved:
    """A state that was taken apart and whose bytes are kept: one clone for every first leaf."""

    def __init__(self, state):
        flat = flatten(state)
        self.data = dump_meta(flat, "0123456789abcdef")
        self.meta = parse_meta(self.data, count=len(flat.leaves))
        self.paths = [leaf.path for leaf in flat.leaves]
        self.specs = [leaf.spec for leaf in flat.leaves]
        self.aliases = flat.aliases
        self.left = flat.left
        self.bytes = {
            number: copied(leaf.tensor) for number, leaf in enumerate(flat.leaves) if number not in flat.aliases
        }

    def fresh(self, only=None):
        chosen = select(self.meta, self.paths, only)
        firsts = {self.aliases.get(number, number) for number in chosen.numbers}
        made = {number: copied(self.bytes[number]) for number in firsts}
        tensors = {number: made[self.aliases.get(number, number)] for number in chosen.numbers}
        return restore(chosen, self.paths, tensors)

    def bind(self, into, **options):
        return bind(self.meta, self.paths, self.specs, self.aliases, into, **options)

    def into(self, into, **options):
        binding = self.bind(into, **options)
        with torch.no_grad():
            for number, target, _ in binding.fills:
                target.copy_(self.bytes[number])
        return binding.finish({number: copied(self.bytes[number]).to(d) for number, d in binding.fresh.items()})


def roundtrip(state, only=None):
    """A state saved and loaded fresh."""
    return Saved(state).fresh(only)


def bits(tensor):
    """The bytes of a tensor, whatever its dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(first, second):  # noqa: PLR0911 - one for each kind
    """Equal in type, structure and every bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.requires_grad == second.requires_grad
            and bits(first) == bits(second)
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, complex):
        return same(first.real, second.real) and same(first.imag, second.imag)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, np.generic):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    return bool(first == second)
