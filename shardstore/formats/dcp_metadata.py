"""The file `.metadata` of torch.distributed.checkpoint: what lies in which file, and how tensors are cut.

Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of torch 2.13. It is a pickle of the dataclasses
there; it is read as data, and none of them is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from shardstore.errors import Damaged, InvalidArgument, UnsupportedState
from shardstore.formats import pickled
from shardstore.formats.pickled import Made, Name
from shardstore.specs import DTYPES, Box, Shape, TensorSpec, covers
from shardstore.storage import check_key

NAME = ".metadata"
MAX_BYTES = 1 << 28
MAX_DEPTH = 200
MAX_DIMS = 64

_CLASSES = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    Name(_CLASSES, name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    Name("torch", "Size"),
    Name("torch.serialization", "_get_layout"),
    *(Name(module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
    *(Name("torch", dtype) for dtype in DTYPES),
}  # fmt: skip
"""Paths among them are where a checkpoint was written; they are not used."""


class Place(NamedTuple):
    """Where an item lies: a file in the folder, and its bytes there."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, and the parts that it was saved in."""

    spec: TensorSpec
    parts: Sequence[tuple[Box, Place]]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Everything by its name in the checkpoint. `values`: what is no tensor.

    `paths`: where each name stands in the nested state; text for keys of dicts, whole numbers for places in lists.
    """

    tensors: dict[str, TensorEntry]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]


def parse(data: bytes, where: str) -> Metadata:
    """Read the file's content; nothing in it is run or trusted.

    Raises UnsupportedState, by name, for what DCP does not write there; Damaged for what makes no sense.
    """
    return _Parser(where).top(pickled.read(data, where, _ALLOWED.__contains__))


class _Parser:
    def __init__(self, where: str) -> None:
        self._where = where
        self._places: dict[tuple[str, Shape | None], Place] = {}

    def _bad(self, why: str) -> NoReturn:
        raise Damaged(f"{self._where} makes no sense: {why}", file=self._where)

    def top(self, value: Any) -> Metadata:
        members = self._state(value, "Metadata")
        entries = self._dict(members.get("state_dict_metadata"), "state_dict_metadata")
        for index, info in self._dict(members.get("storage_data"), "storage_data").items():
            self._places[self._index(index)] = self._place(info)
        found = Metadata({}, {}, {})
        for name, entry in entries.items():
            if type(name) is not str:
                self._bad("a name is no text")
            if self._is(entry, "TensorStorageMetadata"):
                found.tensors[name] = self._tensor(name, entry)
            else:
                self._state(entry, "BytesStorageMetadata", empty=True)
                found.values[name] = self._lying(name, None)
        found.paths.update(self._paths(members.get("planner_data"), entries))
        return found

    def _paths(self, planner_data: Any, entries: dict[Any, Any]) -> dict[str, tuple[str | int, ...]]:
        said = self._dict(planner_data, "planner_data") if planner_data is not None else {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for name in entries:
            path = said.get(name, (name,))
            if (
                type(path) is not tuple
                or not 0 < len(path) <= MAX_DEPTH
                or any(type(part) not in (str, int) for part in path)
            ):
                self._bad(f"the path of {name[:80]!r} is none")
            paths[name] = path
        return paths

    def _tensor(self, name: str, entry: Any) -> TensorEntry:
        members = self._state(entry, "TensorStorageMetadata")
        shape = self._size(members.get("size"))
        spec = TensorSpec(self._dtype(name, members.get("properties")), shape)
        chunks = members.get("chunks")
        if type(chunks) is not list:
            self._bad(f"{name[:80]!r} has no chunks")
        boxes = [self._box(self._state(chunk, "ChunkStorageMetadata")) for chunk in chunks]
        if not covers(shape, boxes):
            self._bad(f"the parts of {name[:80]!r} overlap, leave a hole, or leave its shape {list(shape)[:8]}")
        whole = [box for box in boxes if box.volume]
        parts = [(box, self._lying(name, box.origin)) for box in whole]
        for box, place in parts:
            if box.volume * DTYPES[spec.dtype].itemsize > place.nbytes:
                self._bad(f"{place.nbytes} bytes can't hold the part {list(box.shape)[:8]} of {name[:80]!r}")
        return TensorEntry(spec, parts)

    def _lying(self, name: str, origin: Shape | None) -> Place:
        place = self._places.get((name, origin))
        if place is None:
            part = "" if origin is None else f", its part at {list(origin)[:8]}"
            self._bad(f"it does not say where {name[:80]!r} lies{part}")
        return place

    def _dtype(self, name: str, properties: Any) -> str:
        state = properties.state if self._is(properties, "TensorProperties") else None
        if isinstance(state, dict):
            state = (state.get("dtype"), state.get("layout"))
        if type(state) is not tuple or len(state) < 2:  # noqa: PLR2004 - dtype and layout
            self._bad(f"{name[:80]!r} has no properties")
        dtype, layout = state[:2]
        if not isinstance(layout, Made) or layout.args != ("torch.strided",):
            raise UnsupportedState(f"{self._where}: {name!r} is no dense tensor", path=name)
        if not isinstance(dtype, Name) or dtype.name not in DTYPES:
            self._bad(f"{name[:80]!r} has no dtype")
        return dtype.name

    def _box(self, members: dict[str, Any]) -> Box:
        return Box(self._size(members.get("offsets")), self._size(members.get("sizes")))

    def _size(self, value: Any) -> Shape:
        sizes = value.args[0] if self._is(value, "Size", "torch") and len(value.args) == 1 else None
        if type(sizes) is not tuple or len(sizes) > MAX_DIMS or any(type(n) is not int or n < 0 for n in sizes):
            self._bad("a shape is none")
        total = 1
        for size in sizes:
            total *= max(size, 1)
        if total >= 2**60:
            self._bad("a shape is too large")
        return sizes

    def _index(self, value: Any) -> tuple[str, Shape | None]:
        members = self._state(value, "MetadataIndex")
        name, offset = members.get("fqn"), members.get("offset")
        if type(name) is not str:
            self._bad("a name is no text")
        return name, None if offset is None else self._size(offset)

    def _place(self, value: Any) -> Place:
        members = self._state(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        file, offset, nbytes = (members.get(name) for name in ("relative_path", "offset", "length"))
        if members.get("transform_descriptors"):
            raise UnsupportedState(
                f"{self._where}: items are stored by {members['transform_descriptors']!r:.60}; save without extensions",
                path="",
            )
        if type(file) is not str or any(type(n) is not int or not 0 <= n < 2**63 for n in (offset, nbytes)):
            self._bad("the place of an item is none")
        try:
            return Place(check_key(file), int(offset or 0), int(nbytes or 0))
        except InvalidArgument as error:
            self._bad(str(error))

    def _is(self, value: Any, name: str, module: str = _CLASSES) -> bool:
        return isinstance(value, Made) and value.name == Name(module, name)

    def _state(self, value: Any, name: str, module: str = _CLASSES, *, empty: bool = False) -> dict[str, Any]:
        if not self._is(value, name, module):
            self._bad(f"a {name} is missing")
        return {} if empty else self._dict(value.state, name)

    def _dict(self, value: Any, what: str) -> dict[Any, Any]:
        if type(value) is not dict:
            self._bad(f"{what} is missing")
        return value
