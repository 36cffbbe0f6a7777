"""The flat single file of C and CUDA trainers: `step_NNNNNN.bin`.

Little-endian throughout: int32 step, int32 n, then n float32 weights, n float32 first and n float32 second moments of
Adam: 8 + 12 n bytes. The numbers of all parameters follow each other in the order of the model's parameter iterator;
tied ones stand there once. n may be 0. The file knows neither names and shapes nor hyperparameters: names come from a
layout, hyperparameters stay those of the optimizer into which an import is loaded.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from shardstore.errors import Damaged, ShardstoreError, UnsupportedState, brief
from shardstore.formats.files import FileTensor, ForeignFile, Stream, put_file
from shardstore.formats.layout import Layout, check_fits
from shardstore.formats.plain import Tensor, plain, refuse, spec_of
from shardstore.formats.port import Foreign, Options
from shardstore.memory import load, stream
from shardstore.specs import TensorSpec

HEAD = struct.Struct("<ii")
LARGEST = 2**31 - 1
WHAT = "a flat file"
MOMENTS = ("exp_avg", "exp_avg_sq")
SECTION = "flat"
"""The section of an import without a layout: `weights` and the two moments, one-dimensional."""
_NAME = re.compile(r"step_([0-9]{1,10})\.bin")


class Head(NamedTuple):
    """The first eight bytes."""

    step: int
    numbers: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return HEAD.size + 12 * self.numbers


def read_head(file: ForeignFile) -> Head:
    """Head of a flat file. Raises Damaged unless it makes sense for a file of this size."""
    if file.nbytes < HEAD.size:
        raise Damaged(f"{file.path} has {file.nbytes} bytes: no flat file is that short", file=file.path)
    head = Head(*HEAD.unpack(file.read(0, HEAD.size)))
    if head.step < 0 or head.numbers < 0:
        raise Damaged(f"{file.path} says step {head.step} and {head.numbers} parameters", file=file.path)
    if head.nbytes != file.nbytes:
        raise Damaged(
            f"{file.path} has {file.nbytes:,} bytes; with the {head.numbers:,} parameters that it names it would have "
            f"{head.nbytes:,}",
            file=file.path,
        )
    return head


class FlatFormat:
    """`step_NNNNNN.bin`."""

    name = "flat"

    def recognises(self, path: str) -> bool:
        """Whether name and size are those of a flat file."""
        if not path.endswith(".bin") or not os.path.isfile(path):
            return False
        if _NAME.fullmatch(os.path.basename(path)):
            return True
        try:
            with ForeignFile(path) as file:
                read_head(file)
        except ShardstoreError:
            return False
        return True

    def claims(self, path: str) -> bool:
        """Whether a path ends in `.bin`."""
        return path.endswith(".bin")

    def read(self, path: str, options: Options) -> Foreign:
        """Open a file: by `options.layout` as model and optimizer, without one as three tensors."""
        with ExitStack() as files:
            file = files.enter_context(ForeignFile(path))
            head = read_head(file)
            layout = options.layout
            if layout is not None:
                check_fits(layout, head.numbers, path)
            state = _bare(file, head) if layout is None else _named(file, head, layout)
            return Foreign(self.name, path, state, step=head.step, notes=_notes(path, head), files=files.pop_all())

    def write(self, state: Any, path: str, options: Options) -> None:
        """Write weights and moments of a model with Adam's state, or the three tensors of an import."""
        head, parts = planned(plain(state), options)
        first = memoryview(HEAD.pack(*head))

        def chunks() -> Iterator[memoryview]:
            yield first
            yield from stream(parts)

        put_file(path, Stream(head.nbytes, chunks), overwrite=options.overwrite, listener=options.listener)


def _notes(path: str, head: Head) -> list[str]:
    named = _NAME.fullmatch(os.path.basename(path))
    if named and int(named[1]) != head.step:
        return [f"the file is named after step {int(named[1])}, and says that it is of step {head.step}"]
    return []


# -- reading


def _bare(file: ForeignFile, head: Head) -> dict[str, Any]:
    spec = TensorSpec("float32", (head.numbers,))
    names = ("weights", *MOMENTS)
    parts = {name: FileTensor(spec, file, HEAD.size + k * spec.nbytes) for k, name in enumerate(names)}
    return {SECTION: parts, "step": head.step}


def _named(file: ForeignFile, head: Head, layout: Layout) -> dict[str, Any]:
    weights = dict(_cut(file, layout, HEAD.size))
    model: dict[str, Tensor] = {**weights, **layout.buffers}
    model |= {name: weights[target] for name, target in layout.ties.items()}
    firsts, seconds = (dict(_cut(file, layout, HEAD.size + 4 * k * head.numbers)) for k in (1, 2))
    state = {name: {"step": _step(head.step), MOMENTS[0]: firsts[name], MOMENTS[1]: seconds[name]} for name in weights}
    groups = [{"params": list(group)} for group in layout.groups or [list(weights)]]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": head.step}


def _cut(file: ForeignFile, layout: Layout, offset: int) -> Iterator[tuple[str, FileTensor]]:
    for name, shape in layout.parameters.items():
        spec = TensorSpec("float32", shape)
        yield name, FileTensor(spec, file, offset)
        offset += spec.nbytes


def _step(step: int) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")  # as torch's own optimizers have it


# -- writing


def planned(state: Any, options: Options) -> tuple[Head, list[Tensor]]:
    """What a file of a state would begin with, and the tensors that follow. Raises UnsupportedState."""
    if not isinstance(state, dict):
        raise refuse(WHAT, "state", "it is no dict of sections")
    state = dict(state)
    given = {"step": state.pop("step", None), "--step": options.step}
    if SECTION in state:
        parts, own = _bare_parts(state), dict[str, int]()
    else:
        parts, own = _named_parts(state, options.layout)
    steps = {where: step_of(value, where) for where, value in given.items() if value is not None} | own
    count = sum(math.prod(spec_of(part).shape) for part in parts) // 3
    if count > LARGEST:
        raise refuse(WHAT, "model", f"{count:,} parameters are more than an int32 says ({LARGEST:,})")
    return Head(_one_step(steps), count), parts


def _bare_parts(state: Mapping[str, Any]) -> list[Tensor]:
    inner = state[SECTION]
    names = ("weights", *MOMENTS)
    if len(state) > 1 or not isinstance(inner, dict) or set(inner) != set(names):
        raise refuse(WHAT, SECTION, f"only a section {SECTION!r} with {', '.join(names)}, and a step, is written back")
    parts = [_tensor(inner[name], f"{SECTION}/{name}") for name in names]
    shapes = {spec_of(part).shape for part in parts}
    if len(shapes) > 1 or len(shapes.pop()) != 1:
        raise refuse(WHAT, SECTION, "weights and moments must be one-dimensional and equally long")
    return parts


def _named_parts(state: Mapping[str, Any], layout: Layout | None) -> tuple[list[Tensor], dict[str, int]]:
    others = sorted(str(name) for name in state.keys() - {"model", "optimizer"})
    if others or not {"model", "optimizer"} <= state.keys():
        odd = others[0] if others else "state"
        raise refuse(WHAT, odd, "it holds the sections model and optimizer, and a step; choose them with --only")
    model, adam = state["model"], _adam(state["optimizer"])
    names = _order(model, adam, layout)
    weights = [_tensor(model[name], f"model/{name}") for name in names]
    moments: dict[str, list[Tensor]] = {key: [] for key in MOMENTS}
    steps: dict[str, int] = {}
    for name, weight in zip(names, weights, strict=True):
        path = f"optimizer/state.{name}"
        own = adam[name]
        if not isinstance(own, dict) or set(own) != {"step", *MOMENTS}:
            has = ", ".join(map(str, own)) if isinstance(own, dict) else brief(own)
            raise refuse(WHAT, path, f"only Adam's step, exp_avg and exp_avg_sq are; this has {has or 'nothing'}")
        steps[path] = step_of(own["step"], f"{path}.step")
        for key in MOMENTS:
            moments[key].append(_tensor(own[key], f"{path}.{key}"))
            if spec_of(own[key]).shape != spec_of(weight).shape:
                raise refuse(WHAT, f"{path}.{key}", "its shape is not that of the parameter")
    return [*weights, *moments[MOMENTS[0]], *moments[MOMENTS[1]]], steps


def _adam(section: Any) -> dict[Any, Any]:
    """The state by name. Raises for whatever is not that of one Adam or AdamW, without amsgrad."""
    state = section.get("state") if isinstance(section, dict) else None
    groups = section.get("param_groups") if isinstance(section, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise refuse(WHAT, "optimizer", "it is not the state of one torch optimizer")
    if any(isinstance(group, dict) and group.get("amsgrad") for group in groups):
        raise refuse(WHAT, "optimizer", "amsgrad keeps a third moment, for which there is no room")
    if not state:
        raise refuse(WHAT, "optimizer", "it has no moments yet; run a step first")
    return state


def _order(model: Any, adam: Mapping[Any, Any], layout: Layout | None) -> list[str]:
    """The parameters' names in the order of the file. Raises for tensors that would be lost."""
    if not isinstance(model, dict) or not model:
        raise refuse(WHAT, "model", "it is no dict of tensors")
    if layout is not None:
        return _by_layout(model, adam, layout)
    first: dict[int, str] = {}
    for name, tensor in model.items():
        first.setdefault(id(tensor), name)
    known = {id(model[name]): name for name in adam if name in model}
    names: list[str] = []
    for name, tensor in model.items():
        if first[id(tensor)] != name:
            continue  # a tied one stands where its first name does, whichever of them the optimizer knows
        if id(tensor) in known:
            names.append(known[id(tensor)])
        else:
            why = "it has no moments: a frozen parameter, or a buffer, which a layout may name under 'left_out'"
            raise refuse(WHAT, f"model/{name}", why)
    _all_used(adam, names)
    return names


def _by_layout(model: Mapping[str, Any], adam: Mapping[Any, Any], layout: Layout) -> list[str]:
    known = {*layout.parameters, *layout.ties, *layout.left_out}
    for name in model:
        if name not in known:
            raise refuse(WHAT, f"model/{name}", "the layout does not name it: add it, or name it under 'left_out'")
    for name, shape in layout.parameters.items():
        if name not in model or name not in adam:
            raise refuse(WHAT, f"model/{name}", "the layout names it, and the state lacks it or its moments")
        if isinstance(model[name], Tensor) and spec_of(model[name]).shape != shape:
            raise refuse(WHAT, f"model/{name}", f"it has not the shape {list(shape)} of the layout")
    for name, target in layout.ties.items():
        if name in model and model[name] is not model[target]:
            raise refuse(WHAT, f"model/{name}", f"the layout ties it to {target!r}, which it is not tied to here")
    _all_used(adam, list(layout.parameters))
    return list(layout.parameters)


def _all_used(adam: Mapping[Any, Any], names: list[str]) -> None:
    used = set(names)
    extra = next((name for name in adam if name not in used), None)
    if extra is not None:
        raise refuse(WHAT, f"optimizer/state.{extra}", "there is no parameter of that name in the model")


def _tensor(value: Any, path: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise refuse(WHAT, path, "it is no tensor")
    dtype = str(value.dtype)[6:] if isinstance(value, torch.Tensor) else value.spec.dtype
    if dtype != "float32":
        raise refuse(WHAT, path, f"it is {dtype}, and the file has float32 only; convert with --dtype float32")
    return value


def step_of(value: Any, path: str) -> int:
    """A step as a whole number. Raises UnsupportedState for what is none, or more than an int32."""
    if isinstance(value, Tensor):
        if math.prod(spec_of(value).shape) != 1:
            raise refuse(WHAT, path, "a step is one number")
        value = load(value).reshape(()).item()
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or not 0 <= value <= LARGEST:
        raise refuse(WHAT, path, f"a step is a whole number from 0 to {LARGEST:,}, not {brief(value)}")
    return int(value)


def _one_step(steps: Mapping[str, int]) -> int:
    if not steps:
        raise UnsupportedState(f"{WHAT} has a step, and none is known: give --step", path="step")
    (path, step), *others = steps.items()
    for other, value in others:
        if _step(value) != _step(step):  # as Adam counts: in float32
            raise refuse(WHAT, other, f"it is at step {value}, {path} at {step}, and the file has one step")
    return step
