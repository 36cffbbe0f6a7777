"""Folders as Hugging Face tools write them: `model.safetensors`, or shards and an index of them.

Source of the format: `save_pretrained` of transformers: `model-00001-of-00002.safetensors`, ..., and
`model.safetensors.index.json` with `weight_map` (tensor to file) and `metadata.total_size`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from shardstore import strictjson
from shardstore.errors import CheckpointExists, Damaged, InvalidArgument
from shardstore.formats.files import FileTensor, ForeignFile, Stream, read_back
from shardstore.formats.port import Foreign, Options
from shardstore.formats.safetensors import Opened, body, open_file, split, weights_of, with_ties
from shardstore.index import HF_NAME
from shardstore.storage import LocalStore, check_key

NAME = "huggingface"
SINGLE = "model.safetensors"
MAX_INDEX = 64 * 1024 * 1024


class HuggingFaceFormat:
    """A folder of weights that `from_pretrained` opens. Other files in it are left alone."""

    name = NAME

    def recognises(self, path: str) -> bool:
        """By the names in it."""
        return any(os.path.isfile(os.path.join(path, name)) for name in (SINGLE, HF_NAME))

    def claims(self, path: str) -> bool:  # noqa: ARG002 - the port
        """No name of a folder says so: it is asked for with `--to`."""
        return False

    def read(self, path: str, options: Options) -> Foreign:  # noqa: ARG002 - the port
        """Open a folder; as transformers does, `model.safetensors` where there is one."""
        found = Foreign(self.name, path, {})
        with found.files:
            single = os.path.join(path, SINGLE)
            if os.path.isfile(single):
                file = open_file(single, found)
                found.state, found.notes = with_ties(file.tensors, file.metadata), file.notes
            else:
                found.state = _sharded(path, found)
            found.files = found.files.pop_all()
        return found

    def write(self, state: Any, path: str, options: Options) -> None:
        """Write weights: one file, or shards of at most `max_shard_bytes` and then their index.

        `path`: a new folder (its parent must exist), or one without weights. Raises CheckpointExists, UnsupportedState.
        """
        weights, ties = weights_of(self.name, state)
        files = split(weights, options.max_shard_bytes)
        names = (
            [SINGLE] if len(files) == 1 else [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in _from_1(files)]
        )
        bodies = [body(file, ties) for file in files]
        if len(files) > 1:
            placed = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
            total = sum(tensor.nbytes for tensor in weights.values())
            names.append(HF_NAME)
            index = strictjson.dumps({"metadata": {"total_size": total}, "weight_map": placed}) + b"\n"
            bodies.append(Stream(len(index), lambda: [memoryview(index)]))
        _put(path, dict(zip(names, bodies, strict=True)))


def _from_1(files: Any) -> range:
    return range(1, len(files) + 1)


def _put(path: str, files: dict[str, Stream]) -> None:
    """Write files that nothing is in the place of, and read each back; where one fails, none stays."""
    there = [name for name in _listed(path) if name == HF_NAME or name.endswith(".safetensors")]
    if there:
        raise CheckpointExists(f"{path!r} holds {there[0]} already: choose another place")
    store, written = LocalStore(path), []
    try:
        for name, content in files.items():
            written.append(name)
            store.put(name, content)
            read_back(os.path.join(path, name), content)
    except BaseException:
        with contextlib.suppress(Exception):
            for name in written:
                store.delete(name)
            store.give_up()
        raise
    finally:
        store.close()


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointExists(f"{path!r} is a file: choose another place") from None


def _sharded(path: str, owner: Foreign) -> dict[str, FileTensor]:
    """The tensors that the index names, each from the file that it names."""
    placed = _weight_map(os.path.join(path, HF_NAME))
    opened = {name: open_file(os.path.join(path, name), owner) for name in dict.fromkeys(placed.values())}
    tensors: dict[str, FileTensor] = {}
    for tensor, name in placed.items():
        found = opened[name].tensors.get(tensor)
        if found is None:
            raise Damaged(f"{path}: {HF_NAME} says that {tensor!r} lies in {name!r}, which does not hold it", file=name)
        tensors[tensor] = found
    owner.notes += _surplus(opened, placed)
    metadata = {key: to for file in opened.values() for key, to in file.metadata.items()}
    return with_ties(tensors, metadata)


def _surplus(opened: dict[str, Opened], placed: dict[str, str]) -> Iterator[str]:
    for name, file in opened.items():
        more = [tensor for tensor in file.tensors if placed.get(tensor) != name]
        if more:
            yield f"{name} holds tensors that the index does not name there, such as {more[0]!r}: left out"
        yield from (f"{name}: {note}" for note in file.notes)


def _weight_map(path: str) -> dict[str, str]:
    """Tensor to file, every file being one in the folder. Raises Damaged."""
    with ForeignFile(path) as file:
        if file.nbytes > MAX_INDEX:
            _bad(path, f"{file.nbytes} bytes are more than the {MAX_INDEX} that are allowed")
        data = file.read(0, file.nbytes)
    try:
        document = strictjson.loads(data, limit=MAX_INDEX)
    except strictjson.BadJson as error:
        _bad(path, str(error))
    placed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(placed, dict):
        _bad(path, "it has no weight_map")
    for tensor, name in placed.items():
        try:
            check_key(name if isinstance(name, str) else "")
        except InvalidArgument as error:
            _bad(path, f"the file of {tensor[:80]!r} leaves the folder: {error}")
    return placed


def _bad(path: str, why: str) -> NoReturn:
    raise Damaged(f"{path} can't be read: {why}", file=path)
