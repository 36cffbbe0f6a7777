"""Training payloads of the schema `ckpt.v1`, in one file or sharded.

One file of `torch.save`: `{"schema": "ckpt.v1", model, optimizer, scheduler, state: {step, epoch, batch_in_epoch,
losses}, rng: {python, numpy, torch_cpu}, wall_saved_at}`. Sharded: a folder with `index.json` (`ckpt.v1-index`), which
names shards (`ckpt-shard.v1`: `tensors`, `keys`) with their sha256, and with `meta.pt` (`ckpt.v1-sharded`), which has
all but the model. Random states are plain lists, or NumPy arrays. They become states from which `Checkpointer` resumes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from shardstore import strictjson
from shardstore.errors import Damaged, ShardstoreError, UnsupportedVersion, brief
from shardstore.formats.files import ForeignFile
from shardstore.formats.flat_run import is_loss
from shardstore.formats.naming import with_names, with_numbers
from shardstore.formats.plain import Tensor, plain, refuse
from shardstore.formats.port import Foreign, Options
from shardstore.formats.position import SECTION, rng_of, same_as_new, section
from shardstore.formats.torch_file import load_file
from shardstore.formats.torch_write import write_file
from shardstore.formats.torch_zip import Archive, is_archive
from shardstore.memory import load

SCHEMA, SHARDED, SHARD, INDEX = "ckpt.v1", "ckpt.v1-sharded", "ckpt-shard.v1", "ckpt.v1-index"
INDEX_FILE, META_FILE = "index.json", "meta.pt"
REST = "payload"
"""The section with what a payload has beyond the sections of a training: its losses, the time of its save."""
_TRAINING = ("model", "optimizer", "scheduler")
_KNOWN = {"schema", *_TRAINING, "state", "rng", "shards", SECTION}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMIT = 64 * 1024 * 1024


class PayloadFormat:
    """`ckpt.v1`, in one file or sharded."""

    name = "ckpt.v1"

    def recognises(self, path: str) -> bool:
        """Whether it is a folder with such an index, or a file of torch's that names the schema."""
        try:
            if os.path.isdir(path):
                return os.path.isfile(os.path.join(path, INDEX_FILE)) and _index_schema(path) == INDEX
            if not os.path.isfile(path) or not is_archive(path):
                return False
            with ForeignFile(path) as file:
                return SCHEMA.encode() in Archive(file).read("data.pkl", 4096)
        except (ShardstoreError, OSError):
            return False

    def claims(self, path: str) -> bool:  # noqa: ARG002 - the port
        """Never by a name: `--to ckpt.v1` asks for it."""
        return False

    def read(self, path: str, options: Options) -> Foreign:
        """Open a payload. Every file of a sharded one is checked against its sha256 before it is opened."""
        with ExitStack() as files:
            payload = _sharded(path, files) if os.path.isdir(path) else _single(path, files)
            found = _taken(payload, path, options)
            found.files = files.pop_all()
            return found

    def write(self, state: Any, path: str, options: Options) -> None:
        """Write a payload as one file. Raises UnsupportedState unless the state is that of a training."""
        write_file(_payload(plain(state)), path, options)


# -- reading


def _single(path: str, files: ExitStack) -> dict[Any, Any]:
    payload = load_file(files.enter_context(ForeignFile(path)), [])
    return _of_schema(payload, SCHEMA, path)


def _of_schema(value: Any, schema: str, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict) or "schema" not in value:
        raise Damaged(f"{path} has no schema; {schema} was expected", file=path)
    if value["schema"] != schema:
        raise UnsupportedVersion(f"{path} has the schema {brief(value['schema'])}; {schema} is known here")
    return value


def _index_schema(folder: str) -> Any:
    index = _read_json(os.path.join(folder, INDEX_FILE))
    return index.get("schema") if isinstance(index, dict) else None


def _read_json(path: str) -> Any:
    with ForeignFile(path) as file:
        try:
            return strictjson.loads(file.read(0, min(file.nbytes, _LIMIT + 1)), limit=_LIMIT)
        except strictjson.BadJson as error:
            raise Damaged(f"{path} is no JSON: {error}", file=path) from None


def _sharded(folder: str, files: ExitStack) -> dict[Any, Any]:
    path = os.path.join(folder, INDEX_FILE)
    index = _of_schema(_read_json(path), INDEX, path)
    rows = _rows(index, path)
    opened = {name: files.enter_context(_verified(folder, name, digest)) for name, digest, _ in rows}
    meta_file = files.enter_context(_verified(folder, META_FILE, index.get("meta_sha256")))
    model: dict[str, Any] = {}
    for name, _, count in rows:
        tensors = _shard(opened[name], count)
        twice = next((key for key in tensors if key in model), None)
        if twice is not None:
            raise Damaged(f"{folder}: {twice!r} lies in two shards", file=name)
        model |= tensors
    meta = _of_schema(load_file(meta_file, []), SHARDED, meta_file.path)
    return {**meta, "schema": SHARDED, "model": model}


def _rows(index: Mapping[str, Any], path: str) -> list[tuple[str, Any, Any]]:
    """Name, sha256 and number of tensors of each shard. Nothing that leaves the folder is a name."""
    shards = index.get("shards")
    if not isinstance(shards, list) or index.get("num_shards") != len(shards) or not all(map(_is_dict, shards)):
        raise Damaged(f"{path}: num_shards and shards don't fit", file=path)
    if [row.get("shard") for row in shards] != list(range(len(shards))):
        raise Damaged(f"{path}: the shards are not numbered from 0 on", file=path)
    names = [row.get("path") for row in shards]
    for name in names:
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise Damaged(f"{path}: {brief(name)} is no name of a file in this folder", file=path)
    if len(set(names)) != len(names):
        raise Damaged(f"{path} names a shard twice", file=path)
    return [(str(row["path"]), row.get("sha256"), row.get("num_params")) for row in shards]


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _verified(folder: str, name: str, digest: Any) -> ForeignFile:
    """A file whose bytes are those that the index names. Raises Damaged, StoreError."""
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise Damaged(f"{folder}: the index has no sha256 of {name!r}", file=name)
    file = ForeignFile(os.path.join(folder, name))
    try:
        found = hashlib.sha256()
        for part in file.slices(0, file.nbytes):
            found.update(part)
        if found.hexdigest() != digest:
            raise Damaged(f"{file.path} is not what the index names: its sha256 is {found.hexdigest()}", file=name)
    except BaseException:
        file.close()
        raise
    return file


def _shard(file: ForeignFile, count: Any) -> dict[str, Any]:
    shard = _of_schema(load_file(file, []), SHARD, file.path)
    tensors, keys = shard.get("tensors"), shard.get("keys")
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()
    ):
        raise Damaged(f"{file.path}: its tensors are no dict of names and tensors", file=file.path)
    if list(tensors) != keys or len(tensors) != count:
        raise Damaged(f"{file.path}: its keys or their number are not those of its tensors", file=file.path)
    return dict(tensors)


def _taken(payload: dict[Any, Any], path: str, options: Options) -> Foreign:
    """A payload as the state of a training."""
    found = Foreign(PayloadFormat.name, path, {})
    place = payload.get("state")
    if not isinstance(place, dict) or not isinstance(payload.get("model"), dict):
        raise Damaged(f"{path}: it has no model, or no state", file=path)
    step, epoch, batch = (_count(place, name, path) for name in ("step", "epoch", "batch_in_epoch"))
    losses = place.get("losses", [])
    if not isinstance(losses, list) or not all(map(is_loss, losses)):
        raise Damaged(f"{path}: the losses are no list of numbers", file=path)
    parts = {name: payload[name] for name in _TRAINING if payload.get(name) is not None}
    state = with_names(parts, options.layout, found.notes)
    rest = {name: value for name, value in payload.items() if name not in _KNOWN}
    more = {name: value for name, value in place.items() if name not in {"step", "epoch", "batch_in_epoch"}}
    state[SECTION] = payload.get(SECTION) or section(step, epoch, batch, _rng(payload.get("rng"), path))
    state[REST] = {"state": more, **rest}
    found.state, found.step = state, step
    found.losses = {number: float(loss) for number, loss in enumerate(losses, 1)}
    return found


def _count(place: Mapping[Any, Any], name: str, path: str) -> int:
    value = place.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise Damaged(f"{path}: {name} is {brief(value)}, no count", file=path)
    return value


def _rng(rng: Any, path: str) -> dict[str, Any]:
    try:
        cuda = [_bytes(state) for state in rng.get("torch_cuda") or []]
        return rng_of(_tuples(rng["python"]), tuple(map(_array, rng["numpy"])), _bytes(rng["torch_cpu"]), cuda)
    except Exception as error:  # noqa: BLE001 - the generators raise many kinds for states that are none
        raise Damaged(f"{path}: the random states can't be used: {error!r:.200}", file=path) from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _array(value: Any) -> Any:
    return np.array(value, dtype=np.uint32) if isinstance(value, list | np.ndarray) else value


def _bytes(value: Any) -> torch.Tensor:
    if isinstance(value, Tensor):
        return load(value)
    return torch.tensor(value, dtype=torch.uint8, device="cpu")


# -- writing


def _payload(state: Any) -> dict[str, Any]:
    place = state.get(SECTION) if isinstance(state, dict) else None
    rest = state.get(REST, {}) if isinstance(state, dict) else {}
    if not isinstance(place, dict) or not isinstance(state.get("model"), dict) or not isinstance(rest, dict):
        raise refuse("a ckpt.v1", SECTION, "it takes the state of a training, as Checkpointer saves it, with a model")
    others = state.keys() - {SECTION, REST, *_TRAINING}
    if others:
        raise refuse("a ckpt.v1", min(others), "it has a model, an optimizer and a scheduler; choose with --only")
    parts, extra = with_numbers(state), {name: value for name, value in rest.items() if name != "state"}
    if not same_as_new(place):
        extra[SECTION] = place  # a place in a shuffled epoch, further generators: for those who know it
    return {
        "schema": SCHEMA, **{name: parts.get(name) for name in _TRAINING},
        "state": {
            "step": place["step"], "epoch": place["epoch"], "batch_in_epoch": place["batch"],
            **rest.get("state", {"losses": []}),
        },
        "rng": _plain_rng(place["rng"]), "wall_saved_at": math.nan, **extra,
    }  # fmt: skip


def _plain_rng(rng: Mapping[str, Any]) -> dict[str, Any]:
    legacy = np.random.RandomState()
    legacy.set_state(rng["numpy"])
    name, key, *others = legacy.get_state(legacy=True)
    numpy = (name, np.asarray(key).tolist(), *others)
    cuda = {"torch_cuda": [load(state).tolist() for state in rng["cuda"]]} if rng["cuda"] else {}
    return {"python": rng["python"], "numpy": numpy, "torch_cpu": load(rng["torch"]).tolist(), **cuda}
