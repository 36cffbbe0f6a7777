"""Files of safetensors, from anywhere: their headers are read strictly, their tensors when they are asked for.

Source of the format: the README of huggingface/safetensors. Tied tensors as its `save_model` writes them: stored once,
the other names in the metadata, each with the name that is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstore import header
from shardstore.errors import Damaged, UnsupportedState
from shardstore.formats.files import FileTensor, ForeignFile, Stream, put_file
from shardstore.formats.plain import Tensor, bytes_of, plain, refuse, spec_of
from shardstore.formats.port import Foreign, Options
from shardstore.header import Stored
from shardstore.specs import DTYPES, TensorSpec

NAME = "safetensors"
_LENGTH = 8


def _tags() -> dict[str, str]:
    """The dtype that a tag means to other tools. Dtypes that safetensors lacks are not among them."""
    tags: dict[str, str] = {}
    for name, dtype in DTYPES.items():
        if not dtype.tail:
            tags.setdefault(dtype.tag, name)
    return tags


_DTYPES = _tags()


class SafetensorsFormat:
    """One `.safetensors` file of weights."""

    name = NAME

    def recognises(self, path: str) -> bool:
        """By its ending; what lies in it must then be right."""
        return path.endswith(".safetensors") and os.path.isfile(path)

    def claims(self, path: str) -> bool:
        """By its ending."""
        return path.endswith(".safetensors")

    def read(self, path: str, options: Options) -> Foreign:  # noqa: ARG002 - the port
        """Open a file."""
        found = Foreign(self.name, path, {})
        with found.files:
            file = open_file(path, found)
            found.state = with_ties(file.tensors, file.metadata)
            found.notes = file.notes
            found.files = found.files.pop_all()
        return found

    def write(self, state: Any, path: str, options: Options) -> None:
        """Write the weights of a state, with every tie as a name in the metadata."""
        weights, ties = weights_of(self.name, state)
        put_file(path, body(weights, ties), overwrite=options.overwrite)


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that was opened: its tensors by name, and its metadata. `notes`: what a person should know of it."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]

    @property
    def notes(self) -> list[str]:
        """What of the metadata is no tie and would be lost."""
        lost = [key for key, to in self.metadata.items() if to not in self.tensors and (key, to) != ("format", "pt")]
        return [f"metadata that is left out: {', '.join(lost)}"] if lost else []


def open_file(path: str, owner: Foreign) -> Opened:
    """Read a header. The file is closed with `owner`. Raises Damaged, UnsupportedState, StoreError."""
    file = owner.files.enter_context(ForeignFile(path))
    size = header.length(file.read(0, min(_LENGTH, file.nbytes)), path, file.nbytes)
    stored, metadata = header.parse(file.read(_LENGTH, size), path, file.nbytes)
    start = _LENGTH + size
    tensors = {name: FileTensor(_spec(one, name, path), file, start + one.begin) for name, one in stored.items()}
    return Opened(tensors, metadata)


def _spec(stored: Stored, name: str, path: str) -> TensorSpec:
    dtype = _DTYPES.get(stored.tag)
    if dtype is None:
        raise UnsupportedState(f"{path}: {name!r} is of the type {stored.tag}, which torch does not have", path=name)
    if not DTYPES[dtype].packed:
        return TensorSpec(dtype, stored.shape)
    if not stored.shape or stored.shape[-1] % 2:
        raise Damaged(
            f"{path}: {name!r} of {stored.tag} has an odd number of values in a row", file=path, tensors=(name,)
        )
    return TensorSpec(dtype, (*stored.shape[:-1], stored.shape[-1] // 2))


def with_ties(tensors: Mapping[str, FileTensor], metadata: Mapping[str, str]) -> dict[str, FileTensor]:
    """The tensors, and under further names those that are tied to them."""
    ties = {n: tensors[to] for n, to in metadata.items() if to in tensors and n not in tensors and n != "format"}
    return {**tensors, **ties}


def weights_of(format: str, state: Any) -> tuple[dict[str, Tensor], dict[str, str]]:  # noqa: A002 - its name
    """The weights of a state by name, each once, and the names that are tied to them.

    Raises UnsupportedState, with the path, for a state that is more than weights, or weights of another kind.
    """
    found, section = plain(state), ""
    if isinstance(found.get("model"), dict):
        for other in found:
            if other != "model":
                raise refuse(format, other, "it holds weights alone; convert the section `model` by itself")
        found, section = found["model"], "model/"
    weights: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in found.items():
        _check(format, name, f"{section}{name}", value)
        kept = first.setdefault(id(value), name)
        if kept == name:
            weights[name] = value
        else:
            ties[name] = kept
    if "format" in ties:
        raise refuse(format, f"{section}format", "it is tied, and the metadata has another use for its name")
    return weights, ties


def _check(format: str, name: Any, path: str, value: Any) -> None:  # noqa: A002 - its name
    if not isinstance(name, str) or name == header.RESERVED:
        raise refuse(format, path, "the name of a tensor must be text, and not `__metadata__`")
    if not isinstance(value, Tensor):
        raise refuse(format, path, f"it is no tensor but a {type(value).__name__}")
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise refuse(format, path, "it is sparse; make it dense first")
    spec = spec_of(value)
    if _DTYPES.get(DTYPES[spec.dtype].tag) != spec.dtype or (DTYPES[spec.dtype].packed and not spec.shape):
        raise refuse(format, path, f"safetensors has no type for {spec.dtype}")


def body(weights: Mapping[str, Tensor], ties: Mapping[str, str]) -> Stream:
    """The content of a file with these weights, the widest elements first, so that each lies aligned."""
    ordered = dict(sorted(weights.items(), key=lambda item: -DTYPES[spec_of(item[1]).dtype].itemsize))
    specs = {name: spec_of(tensor) for name, tensor in ordered.items()}
    head = header.build(specs.items(), {"format": "pt", **{name: to for name, to in ties.items() if to in weights}})

    def chunks() -> Iterator[memoryview]:
        yield memoryview(head)
        for tensor in ordered.values():
            yield from bytes_of(tensor)

    return Stream(len(head) + sum(spec.nbytes for spec in specs.values()), chunks)


def split(weights: Mapping[str, Tensor], most: int) -> Sequence[dict[str, Tensor]]:
    """The weights in files of at most `most` bytes, in their order; a larger tensor has one of its own."""
    files: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in weights.items():
        if files[-1] and used + tensor.nbytes > most:
            files.append({})
            used = 0
        files[-1][name] = tensor
        used += tensor.nbytes
    return files
