"""Folders of torch.distributed.checkpoint (DCP), as `dcp.save` writes them: `.metadata`, and items in `*.distcp` files.

Reading runs nothing of the pickle in `.metadata`; items are what `torch.load` with `weights_only=True` takes. Tensors
that many ranks wrote in parts are put together when they are asked for.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from typing import IO, Any, cast

import torch

from shardstore.errors import Damaged, StoreError, Unfinished, UnsupportedState
from shardstore.formats import dcp_metadata
from shardstore.formats.dcp_metadata import Metadata, Place, TensorEntry
from shardstore.formats.files import ForeignFile
from shardstore.formats.port import Foreign, Options
from shardstore.memory import single, slices
from shardstore.specs import Lazy, TensorSpec
from shardstore.tree.tensors import NAMES

NAME = "dcp"
_READ = 1 << 20


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
            if os.path.lexists(os.path.join(path, f"__0{dcp_metadata.NAME}")):
                raise UnsupportedState(f"{path!r} was saved with use_collectives=False: each rank has its own", path="")
            raise Unfinished(f"{path!r} has no {dcp_metadata.NAME}, which DCP writes last: the save did not finish")
        with ForeignFile(where) as file:
            if file.nbytes > dcp_metadata.MAX_BYTES:
                raise Damaged(f"{where} has {file.nbytes} bytes, more than is allowed", file=where)
            metadata = dcp_metadata.parse(file.read(0, file.nbytes), where)
        return Foreign(self.name, path, _state(metadata, _Items(path)))

    def write(self, state: Any, path: str, options: Options) -> None:  # noqa: ARG002 - the port
        """Write through `dcp.save`, as one process.

        DCP holds dicts with text as keys, lists, tensors, and values that `torch.load(weights_only=True)` takes.
        """
        from shardstore.formats.dcp_write import write  # which takes half a second to import

        write(state, path)


class _Items:
    """The files of a folder. Each is open only while it is read: there may be one for each of thousands of ranks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: dict[str, tuple[int, int]] = {}

    def load(self, place: Place, name: str) -> Any:
        """One item, as torch reads it with `weights_only=True`. `name` is what it is called in errors."""
        where = os.path.join(self._path, place.file)
        try:
            with ForeignFile(where) as file:
                if (file.nbytes, file.written) != self._seen[place.file]:
                    raise ValueError("the file was written to meanwhile, by another save; try again when that is done")
                if file.read(8, min(1, file.nbytes)) == b"{":
                    raise UnsupportedState(
                        f"{where} is of SerializationFormat.SAFETENSORS: save it anew without", path=""
                    )
                window = _Window(file, place)
                _check_zip(window)
                return torch.load(cast("IO[bytes]", window), map_location="cpu", weights_only=True)
        except (StoreError, UnsupportedState):
            raise
        except Exception as error:
            if type(error).__name__ == "UnpicklingError":
                raise UnsupportedState(
                    f"{where}: {name!r} holds more than tensors and plain values, which torch.load(weights_only=True) "
                    f"refuses: {str(error).partition('WeightsUnpickler error: ')[2][:200] or error}; nothing was run",
                    path=name,
                ) from None
            raise Damaged(f"{where}: {name!r} can't be read: {error}", file=where, tensors=(name,)) from error

    def check(self, place: Place) -> None:
        """That the file of an item is there, and long enough for it. Raises StoreError, Damaged."""
        path, end = os.path.join(self._path, place.file), place.offset + place.nbytes
        if place.file not in self._seen:
            with ForeignFile(path) as file:
                self._seen[place.file] = file.nbytes, file.written
        nbytes, _ = self._seen[place.file]
        if end > nbytes:
            raise Damaged(f"{path} ends at byte {nbytes}, an item of it at {end}", file=path)


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
    """That an item is a zip file of stored, not packed, members, which can't grow, and whose CRCs are right.

    Torch writes CRCs, unless it is told not to, and looks at none.
    """
    with zipfile.ZipFile(window) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise ValueError("its members are packed, which torch does not do")
            if member.CRC:
                with archive.open(member) as opened:
                    while opened.read(_READ):  # raises at the end where the CRC is another one
                        pass
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
    for place in [*metadata.values.values(), *(place for one in metadata.tensors.values() for _, place in one.parts)]:
        items.check(place)
    root = _Branch()
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
    made = _nested(root, "")
    if type(made) is not dict:
        raise _torn("")
    return made


class _Branch(dict[str | int, Any]):
    """A dict or list of the state under construction."""


def _nested(node: Any, name: str) -> Any:
    if type(node) is not _Branch:
        return node
    made = {key: _nested(value, name or str(key)) for key, value in node.items()}
    if all(type(key) is str for key in made):
        return made
    if set(made) != set(range(len(made))):  # in any order: ranks share the writing of what they all have
        raise _torn(name)
    return [made[place] for place in range(len(made))]


def _torn(name: str) -> Damaged:
    return Damaged(
        f"{dcp_metadata.NAME}: the place of {name[:80]!r} in the state makes no sense", file=dcp_metadata.NAME
    )
