"""Files of `torch.save`, read with `weights_only=True`, always.

Storages are found in the archive and read when they are asked for. NumPy's arrays and numbers are allowed by a list,
for types without code in them; whatever else a file wants to have made is refused by name, and nothing of it is run.
"""

from __future__ import annotations

import os
import pickle  # for the name of an error: torch's restricted reader raises it
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from shardstore.errors import Damaged, ShardstoreError, UnsupportedState
from shardstore.formats.files import ForeignFile
from shardstore.formats.naming import with_names
from shardstore.formats.plain import Tensor, plain
from shardstore.formats.port import Foreign, Options
from shardstore.formats.torch_write import write_file
from shardstore.formats.torch_zip import MAGIC, Archive, Record, RecordTensor, is_archive
from shardstore.memory import load, single, slices
from shardstore.memory.fresh import TORCH_DTYPES
from shardstore.specs import Lazy, TensorSpec
from shardstore.tree.tensors import NAMES, class_name

ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".tar")
_MOST = 2_000_000
"""Containers and tensors that a file may stand for."""
_ATOMS = {int, float, bool, str, bytes, complex, type(None)}
_MULTIARRAY = ("numpy._core.multiarray", "numpy.core.multiarray")  # NumPy 2, and what NumPy 1 calls it
_KINDS = [
    "Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float16", "Float32", "Float64",
    "Complex64", "Complex128",
]  # fmt: skip


def _numpy() -> list[Any]:
    """What arrays and numbers of NumPy are made of. Arrays of objects are not among them."""
    array, number = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    named: list[Any] = [(array, f"{module}._reconstruct") for module in _MULTIARRAY]
    named += [(number, f"{module}.scalar") for module in _MULTIARRAY]
    named.append((_no_bytes, "builtins.bytes"))
    return [np.ndarray, np.dtype, *(getattr(np.dtypes, f"{kind}DType") for kind in _KINDS), *named]


def _no_bytes() -> bytes:
    """The bytes of an empty array, in the form of older Pythons."""
    return b""


class TorchFormat:
    """`.pt` and whatever else `torch.save` has written."""

    name = "torch"

    def recognises(self, path: str) -> bool:
        """Whether it is an archive of torch's, or has an ending and a beginning like older files."""
        if not os.path.isfile(path):
            return False
        try:
            if is_archive(path):
                return True
            with ForeignFile(path) as file:
                return path.endswith(ENDINGS) and file.nbytes > 1 and file.read(0, 1) == b"\x80"
        except ShardstoreError:
            return path.endswith((".pt", ".pth"))

    def claims(self, path: str) -> bool:
        """By its ending."""
        return path.endswith((".pt", ".pth"))

    def read(self, path: str, options: Options) -> Foreign:
        """Open a file. An optimizer's state comes by the names of its parameters, where those are certain."""
        with ExitStack() as files:
            file = files.enter_context(ForeignFile(path))
            found = Foreign(self.name, path, {})
            found.state = load_file(file, found.notes)
            found.state = with_names(found.state, options.layout, found.notes)
            found.files = files.pop_all()
            return found

    def write(self, state: Any, path: str, options: Options) -> None:
        """Write a state as one file, which `torch.load` reads with `weights_only=True`."""
        write_file(plain(state), path, options)


def load_file(file: ForeignFile, notes: list[str]) -> Any:
    """What a file holds, with lazy tensors; `notes` gets what a person should know.

    Raises UnsupportedState, Damaged, StoreError.
    """
    try:
        value, flagged = _load(file)
    except RecursionError:
        raise UnsupportedState(f"{file.path} is nested too deeply, or contains itself", path="") from None
    if flagged:
        notes.append(f"{flagged} tensors were parameters or required gradients; their values are taken, and not that")
    return value


def _load(file: ForeignFile) -> tuple[Any, int]:
    """The value, and the number of tensors that were parameters or required gradients."""
    if file.nbytes < len(MAGIC) or file.read(0, len(MAGIC)) != MAGIC:
        return _opened(file, None)  # a file of old: no archive, read whole
    archive = Archive(file)
    try:
        return _opened(file, archive)
    except _Elsewhere:
        return _opened(file, None)


def _opened(file: ForeignFile, archive: Archive | None) -> tuple[Any, int]:
    value = _restricted(file, "cpu" if archive is None else "meta")
    walk = _Opened(file, archive)
    return walk.value(value, ""), walk.flagged


def _restricted(file: ForeignFile, where: str) -> Any:
    """Torch's restricted reader; on `meta` it leaves the storages where they are."""
    with torch.serialization.safe_globals(_numpy()), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a dtype is experimental
        try:
            with file.opened() as raw:
                value = torch.load(raw, map_location=where, weights_only=True)
            file.check_unchanged()
            return value
        except pickle.UnpicklingError as error:
            wants = _unsafe(file)
            if not wants:
                raise _damaged(file, error) from None
        except Exception as error:  # noqa: BLE001 - a damaged file can make it raise anything
            raise _damaged(file, error) from None
    raise UnsupportedState(
        f"{file.path} wants {', '.join(wants)} to be made, which is no plain data: nothing of it was run. Where you "
        "trust the file, load it by torch.load(..., weights_only=False) and save tensors, numbers and texts only",
        path="",
    )


def _unsafe(file: ForeignFile) -> list[str]:
    """Names of what a file wants to have made and may not; found by reading, not by running."""
    try:
        with file.opened() as raw:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(raw))
    except Exception:  # noqa: BLE001 - as above
        return []


def _damaged(file: ForeignFile, error: Exception) -> Damaged:
    why = str(error).strip().splitlines() or [""]
    return Damaged(f"{file.path} is damaged, or no file of torch.save: {why[-1][:200]}", file=file.path)


class _Elsewhere(Exception):
    """A storage's place is not among the archive's records: older torch does not tell it, a new archive may differ."""


class _Opened:
    """Goes through what was read, and puts lazy tensors where tensors without memory stand."""

    def __init__(self, file: ForeignFile, archive: Archive | None) -> None:
        self._file, self._archive = file, archive
        self._made: dict[Any, Tensor] = {}
        self._count = self.flagged = 0

    def value(self, value: Any, path: str) -> Any:
        """A value with lazy tensors. Containers stay of their class; what a dict holds is renewed in place."""
        if type(value) in _ATOMS:
            return value
        self._count += 1
        if self._count > _MOST:  # a few shared lists in each other can stand for more than any memory holds
            raise UnsupportedState(f"{self._file.path} stands for more than {_MOST:,} lists and tensors", path=path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            for key in value:
                value[key] = self.value(value[key], f"{path}.{key}" if path else f"{key}")
        elif type(value) in (list, tuple) and not set(map(type, value)) <= _ATOMS:
            return type(value)(self.value(item, f"{path}.{at}") for at, item in enumerate(value))
        elif isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            raise UnsupportedState(f"{path}: a bare storage can't be taken over; save a tensor", path=path)
        return value

    def _tensor(self, tensor: torch.Tensor, path: str) -> Tensor:
        self.flagged += tensor.requires_grad
        if self._archive is None:
            return tensor.detach()
        spec = self._spec(tensor, path)
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        record = self._archive.storages.get(offset) if offset is not None else None
        if record is None or record.nbytes != tensor.untyped_storage().nbytes():
            raise _Elsewhere
        key = (record.name, spec, tensor.storage_offset(), tensor.stride())
        if key not in self._made:
            self._made[key] = self._lazy(tensor, spec, self._archive, record)
        return self._made[key]

    def _spec(self, tensor: torch.Tensor, path: str) -> TensorSpec:
        """What a tensor is. Raises UnsupportedState for what can't be streamed, or Damaged for what can't be."""
        odd = tensor.is_sparse or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
        if odd or tensor.is_conj() or tensor.is_neg() or tensor.dtype not in NAMES:
            why = f"a {class_name(tensor)} of {tensor.dtype} and {tensor.layout} can't be taken over as it is"
            raise UnsupportedState(f"{path}: {why}; save plain, resolved tensors", path=path)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedState(f"{path}: a {class_name(tensor)} is no plain tensor; save a torch.Tensor", path=path)
        return TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape))

    def _lazy(self, tensor: torch.Tensor, spec: TensorSpec, archive: Archive, record: Record) -> Tensor:
        if not spec.nbytes:
            return single(spec)
        begin = int(tensor.storage_offset()) * tensor.itemsize
        span = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize
        if begin + span > record.nbytes:
            raise Damaged(f"{self._file.path}: a tensor goes beyond its {record.name}", file=self._file.path)
        if tensor.is_contiguous():
            return RecordTensor(spec, archive, record, begin)
        if spec.nbytes > 8 * max(span, 1024):
            why = "an expanded tensor stands for many more bytes than there are; save its values"
            raise UnsupportedState(f"{self._file.path}: {why}", path="")
        part = RecordTensor(TensorSpec("uint8", (span,)), archive, record, begin)
        return Strided(spec, part, tensor.stride())


class Strided(Lazy):
    """A tensor whose elements lie apart in a file. Its span is read when it is asked for."""

    def __init__(self, spec: TensorSpec, part: RecordTensor, stride: tuple[int, ...]) -> None:
        super().__init__(spec)
        self._part, self._stride = part, stride

    def buffers(self) -> Iterator[memoryview]:
        memory = load(self._part).view(TORCH_DTYPES[self.spec.dtype])
        yield from slices(memory.as_strided(self.spec.shape, self._stride))
