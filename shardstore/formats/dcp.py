"""Folders of torch.distributed.checkpoint (DCP), as `dcp.save` writes them: `.metadata`, and items in `*.distcp` files.

Reading runs nothing of the pickle in `.metadata`; items are what `torch.load` with `weights_only=True` takes. Tensors
that many ranks wrote in parts are put together when they are asked for.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, Any, cast

import torch

from shardstore.errors import (
    CheckpointExists,
    Damaged,
    ShardstoreError,
    StoreError,
    Unfinished,
    UnsupportedState,
    from_os_error,
)
from shardstore.formats import dcp_metadata
from shardstore.formats.dcp_metadata import Metadata, Place, TensorEntry
from shardstore.formats.files import ForeignFile
from shardstore.formats.plain import plain, refuse
from shardstore.formats.port import Foreign, Options
from shardstore.memory import load, single, slices
from shardstore.specs import Lazy, TensorSpec
from shardstore.tree.tensors import NAMES

NAME = "dcp"


class DcpFormat:
    """A folder of `torch.distributed.checkpoint`, with torch's own serialization."""

    name = NAME

    def recognises(self, path: str) -> bool:
        """By the names in it."""
        with contextlib.suppress(OSError):
            return any(name == dcp_metadata.NAME or name.endswith(".distcp") for name in os.listdir(path))
        return False

    def claims(self, path: str) -> bool:  # noqa: ARG002 - the port
        """No name of a folder says so: it is asked for with `--to`."""
        return False

    def read(self, path: str, options: Options) -> Foreign:  # noqa: ARG002 - the port
        """Open a folder. Plain values are read at once."""
        where = os.path.join(path, dcp_metadata.NAME)
        if not os.path.lexists(where):
            raise Unfinished(f"{path!r} has no {dcp_metadata.NAME}, which DCP writes last: the save did not finish")
        found = Foreign(self.name, path, {})
        with found.files:
            with ForeignFile(where) as file:
                if file.nbytes > dcp_metadata.MAX_BYTES:
                    raise Damaged(f"{where} has {file.nbytes} bytes, more than is allowed", file=where)
                metadata = dcp_metadata.parse(file.read(0, file.nbytes), where)
            found.state = _state(metadata, _Items(path, found))
            found.files = found.files.pop_all()
        return found

    def write(self, state: Any, path: str, options: Options) -> None:  # noqa: ARG002 - the port
        """Write through `dcp.save`, as one process, into a folder that is renamed when it is whole.

        DCP holds dicts with text as keys, lists, tensors, and values that `torch.load(weights_only=True)` takes.
        """
        lazy: dict[int, Lazy] = {}
        prepared = _prepared(plain(state), "", lazy)
        if os.path.lexists(path):
            raise CheckpointExists(f"{path!r} is there already: choose another place")
        made = f"{path.rstrip('/')}.{secrets.token_hex(4)}.tmp"
        try:
            os.mkdir(made)
            _save(prepared, lazy, made)
            _sync(made)
            os.rename(made, path)
            _sync(os.path.dirname(os.path.abspath(path)), files=False)
        except OSError as error:
            raise from_os_error(error, "writing", path) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ reading


class _Items:
    """The files of a folder, opened when they are needed first."""

    def __init__(self, path: str, owner: Foreign) -> None:
        self._path, self._owner = path, owner
        self._files: dict[str, ForeignFile] = {}

    def load(self, place: Place, name: str) -> Any:
        """One item, as torch reads it with `weights_only=True`. `name` is what it is called in errors."""
        where = os.path.join(self._path, place.file)
        window = _Window(self.file(place), place)
        try:
            _check_zip(window)
            return torch.load(cast("IO[bytes]", window), map_location="cpu", weights_only=True)
        except StoreError:
            raise
        except Exception as error:
            if type(error).__name__ == "UnpicklingError":
                raise UnsupportedState(
                    f"{where}: {name!r} holds more than tensors and plain values, which torch.load(weights_only=True) "
                    f"refuses: {str(error).partition('WeightsUnpickler error: ')[2][:200] or error}; nothing was run",
                    path=name,
                ) from None
            raise Damaged(f"{where}: {name!r} can't be read: {error}", file=where, tensors=(name,)) from error

    def file(self, place: Place) -> ForeignFile:
        """The file of an item, which must be long enough for it."""
        if place.file not in self._files:
            path = os.path.join(self._path, place.file)
            self._files[place.file] = self._owner.files.enter_context(ForeignFile(path))
        found = self._files[place.file]
        if place.offset + place.nbytes > found.nbytes:
            end = place.offset + place.nbytes
            raise Damaged(f"{found.path} ends at byte {found.nbytes}, an item of it at {end}", file=found.path)
        return found


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: ForeignFile, place: Place) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, place.offset, place.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        if count:
            self._file.read_into(self._start + self._at, view[:count])
        self._at += count
        return count


def _check_zip(window: _Window) -> None:
    """That an item is a zip file of stored, not packed, members: then it can't grow beyond its bytes."""
    with zipfile.ZipFile(window) as archive:
        members = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size for one in members):
        raise ValueError("its members are packed, which torch does not do")
    window.seek(0)


class DcpTensor(Lazy):
    """A tensor of a DCP folder, put together from its parts."""

    def __init__(self, name: str, entry: TensorEntry, items: _Items) -> None:
        super().__init__(entry.spec)
        self._name, self._entry, self._items = name, entry, items

    def buffers(self) -> Iterator[memoryview]:
        parts = self._entry.parts
        if len(parts) == 1:
            yield from slices(self._part(0))
        elif parts:
            whole = single(self.spec)
            for number, (box, _) in enumerate(parts):
                at = tuple(slice(begin, begin + size) for begin, size in zip(box.origin, box.shape, strict=True))
                whole[at].copy_(self._part(number))
            yield from slices(whole)

    def _part(self, number: int) -> torch.Tensor:
        box, place = self._entry.parts[number]
        part = self._items.load(place, self._name)
        wanted = TensorSpec(self.spec.dtype, box.shape)
        if not isinstance(part, torch.Tensor) or part.layout is not torch.strided or _spec(part) != wanted:
            raise Damaged(f"{place.file}: {self._name!r} is not the tensor that {dcp_metadata.NAME} says",
                          file=place.file, tensors=(self._name,))  # fmt: skip
        return part.detach()


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(NAMES.get(tensor.dtype, ""), tuple(tensor.shape))


def _state(metadata: Metadata, items: _Items) -> dict[str, Any]:
    """The nested state."""
    tensors = {name: DcpTensor(name, entry, items) for name, entry in metadata.tensors.items()}
    for entry in metadata.tensors.values():
        for _, place in entry.parts:
            items.file(place)
    root: dict[str | int, Any] = {}
    for name, path in metadata.paths.items():
        value = tensors[name] if name in tensors else items.load(metadata.values[name], name)
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, _Branch())
            if type(node) is not _Branch:
                raise _torn(name)
        if path[-1] in node:
            raise _torn(name)
        node[path[-1]] = value
    return {str(key): _nested(value, str(key)) for key, value in root.items()}


class _Branch(dict[str | int, Any]):
    """A dict or list of the state under construction."""


def _nested(node: Any, name: str) -> Any:
    if type(node) is not _Branch:
        return node
    made = {key: _nested(value, name) for key, value in node.items()}
    if all(type(key) is str for key in made):
        return made
    if list(made) != list(range(len(made))):
        raise _torn(name)
    return list(made.values())


def _torn(name: str) -> Damaged:
    return Damaged(
        f"{dcp_metadata.NAME}: the place of {name[:80]!r} in the state makes no sense", file=dcp_metadata.NAME
    )


# ------------------------------------------------------------------------------------------------ writing


def _prepared(value: Any, path: str, lazy: dict[int, Lazy]) -> Any:
    """What `dcp.save` is given. Where it takes a state apart, a lazy tensor is one without memory, noted in `lazy`."""
    if isinstance(value, Lazy):
        stand_in = torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype), device="meta")
        lazy[id(stand_in)] = value
        return stand_in
    if isinstance(value, torch.Tensor):
        return _dense(value, path)
    if type(value) in (dict, OrderedDict):
        if not value:
            raise refuse(NAME, path, "DCP drops empty dicts; leave it out")
        return {_key(key, path): _prepared(item, f"{path}.{key}".lstrip("."), lazy) for key, item in value.items()}
    if type(value) is list:
        return [_prepared(item, f"{path}.{at}", lazy) for at, item in enumerate(value)]
    return _value(value, path)


def _dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise refuse(NAME, path, "it is sparse; make it dense first")
    return tensor.detach()


def _key(key: Any, path: str) -> str:
    if type(key) is not str:
        raise refuse(NAME, path, f"DCP makes text of keys, and this is {key!r:.40}")
    return key


def _value(value: Any, path: str) -> Any:
    """A value that is pickled whole, and must come back by `weights_only=True`: lazy tensors in it are loaded."""
    if isinstance(value, Lazy):
        return load(value)
    if isinstance(value, torch.Tensor):
        return _dense(value, path)
    if type(value) is tuple:
        return tuple(_value(item, path) for item in value)
    if type(value) is list:
        return [_value(item, path) for item in value]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _value(item, path)) for key, item in value.items())
    if value is None or type(value) in (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device):
        return value
    raise refuse(NAME, path, f"a {type(value).__name__} would not load again without running code; convert it first")


def _save(prepared: dict[str, Any], lazy: dict[int, Lazy], folder: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        """Loads each tensor when it is its turn."""

        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return load(lazy[id(found)]) if id(found) in lazy else found

    writer = FileSystemWriter(folder, sync_files=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(prepared, storage_writer=writer, planner=Planner(), no_dist=True)
    except CheckpointException as error:  # no Exception: nobody above would catch it
        first = next(iter(error.failures.values()), (error,))[0]
        if isinstance(first, ShardstoreError | OSError):
            raise first from None
        raise refuse(NAME, "the state", str(first)) from None


def _sync(folder: str, *, files: bool = True) -> None:
    """Flush a folder and what lies in it: DCP itself does so before all is written."""
    for name in [*(os.listdir(folder) if files else ()), ""]:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
