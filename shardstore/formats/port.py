"""The port of foreign formats: how one is recognised, read as a state of lazy tensors, and written.

A format reads and writes local files. Nothing in it is taken on trust, and no code in it ever runs. Reading gives a
state as `shardstore.save` takes it: plain data, in which a `Lazy` stands for each tensor, so that converting holds one
tensor and some buffers at most. Writing takes such a state, and refuses what the format can't hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from shardstore.errors import InvalidArgument, UnsupportedState
from shardstore.events import Listener
from shardstore.formats.layout import Layout
from shardstore.tree import Flat


@dataclass(frozen=True, slots=True)
class Options:
    """What formats may be told. Each takes what concerns it.

    `layout`: for flat files. `step`: of what is written, where it doesn't say so itself. `max_shard_bytes`: for folders
    of shards. `overwrite`: replace a single file, atomically.
    """

    layout: Layout | None = None
    step: int | None = None
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    listener: Listener | None = None
    storage_options: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Foreign:
    """A checkpoint of some format, opened for reading. A context manager, which gives back the files.

    `state`: plain data with tensors and lazy tensors; the same object twice is a tie. `step`: where the format knows
    one. `notes`: what a person should know of what was read. `losses`: step to loss, where the format has a history.
    `sidecars`: JSON that lies beside it, by name.
    `flat`: the state as it lies in a store, where it comes from one, so that it can be stored again just so.
    """

    format: str
    url: str
    state: Any
    step: int | None = None
    notes: list[str] = field(default_factory=list)
    losses: Mapping[int, float] = field(default_factory=dict)
    sidecars: Mapping[str, Any] = field(default_factory=dict)
    flat: Flat | None = None
    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def close(self) -> None:
        """Give back the files; lazy tensors can't be read afterwards."""
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Format(Protocol):
    """One format. `name` is what `--from` and `--to` take."""

    name: str

    def recognises(self, path: str) -> bool:
        """Whether what lies at a path looks like this format, by names and a few bytes; raises nothing."""

    def claims(self, path: str) -> bool:
        """Whether a path where nothing lies yet is meant for this format, by its name."""

    def read(self, path: str, options: Options) -> Foreign:
        """Open it. Raises Damaged, UnsupportedVersion, UnsupportedState, StoreError, each naming the file."""

    def write(self, state: Any, path: str, options: Options) -> None:
        """Write it, durably, whole or not at all, over nothing that is there (CheckpointExists).

        Raises UnsupportedState, before a byte is written, with path and reason for what the format can't hold.
        """


def only_reads(name: str, remedy: str) -> UnsupportedState:
    """The error of a format that has no writer."""
    return UnsupportedState(f"{name} is only read here: {remedy}", path="")


def local(url: Any) -> str:
    """The local path that is meant by a path or a `file://` URL. Raises InvalidArgument for other URLs."""
    text = str(url)
    if text.startswith("file://"):
        return text[len("file://") :]
    if "://" in text:
        raise InvalidArgument(f"{text!r}: foreign formats are read and written as local files; copy it here first")
    return text
