"""All formats, by name and by what they look like."""

from __future__ import annotations

import os
from typing import Any

from shardstore.errors import CheckpointNotFound, InvalidArgument, UnsupportedState
from shardstore.formats.dcp import DcpFormat
from shardstore.formats.flat import FlatFormat
from shardstore.formats.flat_run import FlatRunFormat
from shardstore.formats.huggingface import HuggingFaceFormat
from shardstore.formats.payload import PayloadFormat
from shardstore.formats.port import Foreign, Format, Options, local
from shardstore.formats.safetensors import SafetensorsFormat
from shardstore.formats.store import StoreFormat
from shardstore.formats.torch_file import TorchFormat

_ALL: list[Format] = [
    StoreFormat(),
    FlatFormat(),
    FlatRunFormat(),
    PayloadFormat(),
    TorchFormat(),
    HuggingFaceFormat(),
    DcpFormat(),
    SafetensorsFormat(),
]
FORMATS = {one.name: one for one in _ALL}
"""In the order in which they are asked whether something is theirs; ours comes first."""


def by_name(name: str) -> Format:
    """A format by its name. Raises InvalidArgument for one that there isn't."""
    found = FORMATS.get(name)
    if found is None:
        raise InvalidArgument(f"there is no format {name!r}; the formats are {', '.join(FORMATS)}")
    return found


def detect(url: str) -> Format:
    """The format of what lies at a place. Raises CheckpointNotFound, UnsupportedState."""
    store = FORMATS[StoreFormat.name]
    if store.recognises(url) or ("://" in url and not url.startswith("file://")):
        return store
    path = local(url)
    for one in FORMATS.values():
        if one is not store and one.recognises(path):
            return one
    if os.path.isdir(path):
        return store  # which tells what lies there instead: a save that did not finish, checkpoints further down
    if not os.path.exists(path):
        raise CheckpointNotFound(f"there is nothing at {path!r}")
    raise UnsupportedState(
        f"{path!r} is none of {', '.join(FORMATS)}, as far as can be seen; say which with --from", path=""
    )


def meant_by(url: str) -> Format:
    """The format of a destination, by its name; a store where nothing else is meant."""
    store = FORMATS[StoreFormat.name]
    if "://" in url and not url.startswith("file://"):
        return store
    path = local(url)
    return next((one for one in FORMATS.values() if one is not store and one.claims(path)), store)


def read(url: Any, format: str | None = None, options: Options | None = None) -> Foreign:  # noqa: A002 - as --from
    """Open a checkpoint of any format; use it as a context manager.

    `url`: of a store, or `RUN@STEP`, or a local path of another format. `format`: its name, where looking is not
    enough.
    Raises what the format raises: CheckpointNotFound, Damaged, UnsupportedVersion, UnsupportedState, StoreError.
    """
    text = os.fspath(url)
    found = by_name(format) if format else detect(text)
    path = text if found.name == StoreFormat.name else local(text)
    return found.read(path, options or Options())
