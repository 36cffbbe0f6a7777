"""The archive around a torch file: where its records lie, and that they are what the archive says.

A file of `torch.save` is a zip archive without compression: `<name>/data.pkl` has the structure, `<name>/data/<k>` the
bytes of each storage, aligned to 64 bytes. Source: torch's `torch/serialization.py` and `caffe2/serialize`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from shardstore.errors import Damaged, UnsupportedState
from shardstore.formats.files import FileTensor, ForeignFile
from shardstore.specs import TensorSpec

MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = 30
_TORCHSCRIPT = {"constants.pkl"}


@dataclass(frozen=True, slots=True)
class Record:
    """A file in the archive: where its bytes begin, how many, and their CRC-32 (0: none was written)."""

    name: str
    offset: int
    nbytes: int
    crc: int


class Archive:
    """The records of a torch file, by name without the archive's own, and by the offset of their bytes."""

    def __init__(self, file: ForeignFile) -> None:
        self.file = file
        self.records: dict[str, Record] = {}
        self._whole: set[str] = set()
        for info in _infos(file):
            record = self._record(info)
            if record.name in self.records:
                raise Damaged(f"{file.path} has {record.name!r} twice", file=file.path)
            self.records[record.name] = record
        self._check()
        self.storages = {one.offset: one for one in self.records.values() if one.name.startswith("data/")}

    def _record(self, info: zipfile.ZipInfo) -> Record:
        path, name = self.file.path, info.filename.partition("/")[2]
        if name in _TORCHSCRIPT or name.startswith("code/"):
            raise UnsupportedState(
                f"{path} is a TorchScript program, which is code with weights in it, and no code is run here: where "
                "you trust it, save torch.jit.load(...).state_dict() by torch.save",
                path="",
            )
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise UnsupportedState(
                f"{path}: {info.filename!r} is compressed or encrypted, which torch.save never does: load it with "
                "torch.load(weights_only=True) and save it again",
                path=info.filename,
            )
        head = self.file.read(info.header_offset, _LOCAL_HEADER)
        if head[:4] != MAGIC:
            raise Damaged(f"{path}: {info.filename!r} is not where the archive says", file=path)
        names, extra = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
        offset = info.header_offset + _LOCAL_HEADER + names + extra
        if offset + info.file_size > self.file.nbytes:
            raise Damaged(f"{path}: {info.filename!r} goes beyond the end of the file", file=path)
        return Record(name, offset, info.file_size, info.CRC)

    def _check(self) -> None:
        path = self.file.path
        if "data.pkl" not in self.records:
            raise Damaged(f"{path} is a zip archive, but not one of torch.save: it has no data.pkl", file=path)
        if "byteorder" in self.records and self.read("byteorder", 6) != b"little":
            raise UnsupportedState(f"{path} was written on a big-endian machine: convert it there", path="")
        self.read("data.pkl", self.records["data.pkl"].nbytes)

    def checked(self, record: Record) -> Iterator[memoryview]:
        """The bytes of a record. Raises Damaged at its end if they are not those of its CRC."""
        crc = 0
        for buffer in self.file.slices(record.offset, record.nbytes):
            crc = zlib.crc32(buffer, crc)
            yield buffer
        if record.crc and crc != record.crc:
            raise self._wrong(record.name)
        self._whole.add(record.name)

    def check(self, record: Record) -> None:
        """Read a record for its CRC, unless that was done. Raises Damaged."""
        if record.crc and record.name not in self._whole:
            for _ in self.checked(record):
                pass

    def _wrong(self, name: str) -> Damaged:
        return Damaged(f"{self.file.path}: {name} is damaged: its CRC-32 is wrong", file=self.file.path)

    def read(self, name: str, limit: int) -> bytes:
        """A record of at most `limit` bytes, its CRC checked."""
        record = self.records[name]
        data = self.file.read(record.offset, min(record.nbytes, limit))
        if record.crc and record.nbytes == len(data) and zlib.crc32(data) != record.crc:
            raise self._wrong(name)
        return data


def is_archive(path: str) -> bool:
    """Whether a file is a zip archive with a `data.pkl`."""
    with ForeignFile(path) as file:
        if file.nbytes < len(MAGIC) or file.read(0, len(MAGIC)) != MAGIC:
            return False
        return any(info.filename.endswith("/data.pkl") for info in _infos(file))


def _infos(file: ForeignFile) -> list[zipfile.ZipInfo]:
    try:
        with file.opened() as raw, zipfile.ZipFile(raw) as archive:
            return archive.infolist()
    except Exception as error:  # noqa: BLE001 - zipfile raises many kinds on what is no archive
        raise Damaged(f"{file.path} is no whole zip archive: {error}", file=file.path) from None


class RecordTensor(FileTensor):
    """A part of a record as a tensor, `begin` bytes from its start; the CRC of the whole is checked before the end."""

    def __init__(self, spec: TensorSpec, archive: Archive, record: Record, begin: int) -> None:
        super().__init__(spec, archive.file, record.offset + begin)
        self._archive, self._record = archive, record

    def buffers(self) -> Iterator[memoryview]:
        if self.nbytes == self._record.nbytes:
            return self._archive.checked(self._record)
        self._archive.check(self._record)
        return super().buffers()
