"""Random number generators: their states as plain data and CPU tensors, and back."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from shardstore.errors import InvalidArgument, Mismatch, UnsupportedState, brief

Generators: TypeAlias = Mapping[Any, Any]
Rng: TypeAlias = dict[str, Any]

_NUMPY = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}


def check_generators(generators: Generators | None) -> dict[str, Any]:
    """The generators, by name. Raises InvalidArgument for what is none, UnsupportedState for an unknown kind."""
    found = dict(generators or {})
    for name, generator in found.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"a generator is registered by a name, not by {brief(name)}")
        capture_one(name, generator)
    return found


def capture(generators: Generators) -> Rng:
    """The states of Python's, NumPy's and torch's global generators, and of those that were registered."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # else nothing was drawn there
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the global generator is what is meant
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "generators": {name: capture_one(name, generator) for name, generator in generators.items()},
    }


def restore(rng: Rng, generators: Generators, notice: Callable[[str], None]) -> None:
    """Put all generators into the states that were captured; `notice` is told of those that can't be.

    Raises Mismatch where a registered generator is of another kind than the one that was saved.
    """
    for name, generator in generators.items():
        saved = rng["generators"].get(name)
        if saved is None:
            notice(f"the checkpoint has no state for the generator {name!r}: it stays as it is")
        else:
            restore_one(name, generator, saved)
    for name in rng["generators"].keys() - generators.keys():
        notice(f"the checkpoint has the state of a generator {name!r}, which is not registered here")
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])  # noqa: NPY002
    torch.set_rng_state(
        rng["torch"].clone()
    )  # a clone is aligned: torch reads the bytes as a struct, and crashes if not
    _restore_cuda(rng["cuda"], notice)


def _restore_cuda(states: list[torch.Tensor], notice: Callable[[str], None]) -> None:
    present = torch.cuda.device_count() if states else 0
    if present < len(states):
        notice(f"{len(states)} CUDA devices had random states, {present} are here: the others are left out")
    for device, state in enumerate(states[:present]):
        torch.cuda.set_rng_state(state.clone(), device)


def capture_one(name: str, generator: Any) -> dict[str, Any]:
    """The state of one generator of NumPy, torch or Python."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return {"kind": "python", "state": generator.getstate()}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy legacy", "state": generator.get_state(legacy=False)}
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator).__name__
        if kind not in _NUMPY:
            raise UnsupportedState(
                f"the generator {name!r} has the bit generator {kind}, of which nothing is known here: use one of "
                f"{', '.join(sorted(_NUMPY))}",
                path=name,
            )
        return {"kind": f"numpy {kind}", "state": generator.bit_generator.state}
    raise InvalidArgument(
        f"{name!r} is no generator of NumPy, torch or Python, but {brief(generator)}: leave it out of generators="
    )


def restore_one(name: str, generator: Any, saved: Mapping[str, Any]) -> None:
    """Put one generator into a state that was captured. Raises Mismatch for one of another kind."""
    kind = capture_one(name, generator)["kind"]
    if saved["kind"] != kind:
        raise Mismatch(f"the generator {name!r} is of the kind {kind}, {saved['kind']} was saved", different=(name,))
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = saved["state"]
    elif isinstance(generator, torch.Generator):
        generator.set_state(saved["state"].clone())
    elif isinstance(generator, random.Random):
        generator.setstate(saved["state"])
    else:
        generator.set_state(saved["state"])
