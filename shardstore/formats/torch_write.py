"""Files as `torch.save` writes them, streamed: the structure first, then each storage as it comes.

Sources: torch's `torch/serialization.py` for the records, `torch/_utils.py` for the names that stand for tensors.
"""

from __future__ import annotations

import functools
import io
import pickle  # written, never read; of plain data only, so that weights_only=True reads it
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from shardstore.formats.files import Stream, put_file
from shardstore.formats.naming import with_numbers
from shardstore.formats.plain import Tensor, bytes_of, refuse, spec_of
from shardstore.formats.port import Options
from shardstore.formats.zipping import Entry, archive, archive_size
from shardstore.memory import torch_dtype
from shardstore.specs import Lazy
from shardstore.tree.tensors import class_name

WHAT = "a torch file"
_PROTOCOL = 2
_INT_BITS = 2000  # the restricted reader knows integers of up to 255 bytes
_PLAIN = {str, bytes, bytearray, bool, type(None), float, complex, torch.dtype, torch.device, torch.Size}
_CONTAINERS: dict[type, bool] = {dict: True, OrderedDict: True, Counter: True, list: False, tuple: False, set: False}
_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage, torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}  # fmt: skip


def write_file(state: Any, path: str, options: Options) -> None:
    """Write plain data. Raises UnsupportedState for what torch's restricted reader would not take."""
    state = with_numbers(state)
    _check(state, "")
    entries = _entries(state)
    body = Stream(archive_size(entries), functools.partial(archive, entries))
    put_file(path, body, overwrite=options.overwrite, listener=options.listener)


def _check(value: Any, path: str) -> None:
    cls = type(value)
    if cls not in _CONTAINERS:
        why = _why_not(value, cls)
        if why:
            raise refuse(WHAT, path, why)
        return
    pairs: Iterable[tuple[Any, Any]] = value.items() if _CONTAINERS[cls] else enumerate(value)
    for key, item in pairs:
        inner = f"{path}.{key}" if path else f"{key}"
        _check(key, inner)
        _check(item, inner)


def _why_not(value: Any, cls: type) -> str:
    """Why a value can't be written; empty if it can."""
    if isinstance(value, Tensor):
        odd = isinstance(value, torch.Tensor) and value.layout is not torch.strided
        return "a tensor that is not strided is not streamed; save its parts" if odd else ""
    if isinstance(value, np.ndarray | np.generic):
        fine = value.dtype.kind in "biufc"
        return "" if fine else f"NumPy's {value.dtype} is not read without running code; store numbers"
    if cls is int:
        fine = value.bit_length() <= _INT_BITS
        return "" if fine else "an int that large is not read with weights_only=True; store it as text"
    if cls is bytes and not value:
        return "no bytes at all are not read with weights_only=True; store None"
    return "" if cls in _PLAIN else f"a {class_name(value)} is not read with weights_only=True; store plain values"


def _entries(state: Any) -> list[Entry]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(state)
    small = {"data.pkl": buffer.getvalue(), "byteorder": b"little", "version": b"3\n"}
    entries = [Entry(f"archive/{name}", len(data), functools.partial(_whole, data)) for name, data in small.items()]
    for key, tensor in enumerate(pickler.tensors):
        entries.append(Entry(f"archive/data/{key}", spec_of(tensor).nbytes, functools.partial(bytes_of, tensor)))
    return entries


def _whole(data: bytes) -> list[memoryview]:
    return [memoryview(data)]


class _Storage:
    """What stands for the bytes of a tensor while the structure is written."""

    def __init__(self, *described: Any) -> None:
        self.described = described


class _Pickler(pickle.Pickler):
    """Writes tensors as torch does, each with a storage of its own; `tensors`: in the order of the storages' keys."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        """How the archive names a storage."""
        return value.described if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        """Tensors, as calls of torch's functions."""
        if not isinstance(value, torch.Tensor | Lazy):
            return NotImplemented
        key, spec = str(len(self.tensors)), spec_of(value)
        self.tensors.append(value)
        dtype, stride = torch_dtype(spec.dtype), _row_major(spec.shape)
        if dtype in _STORAGES:
            storage = _Storage("storage", _STORAGES[dtype], key, "cpu", spec.nbytes // dtype.itemsize)
            return torch._utils._rebuild_tensor_v2, (storage, 0, spec.shape, stride, False, OrderedDict())  # noqa: SLF001
        storage = _Storage("storage", torch.UntypedStorage, key, "cpu", spec.nbytes)
        return torch._utils._rebuild_tensor_v3, (storage, 0, spec.shape, stride, False, OrderedDict(), dtype)  # noqa: SLF001


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))
