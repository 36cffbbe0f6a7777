"""model.safetensors.index.json: what Hugging Face tools read, derived from the index after the commit.

Source: the sharded checkpoints of transformers (`weight_map`, `metadata.total_size`). `metadata.attempt` is our own: it
tells what another save has left from what is damaged, and both from the index of another tool.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

from shardstore import strictjson
from shardstore.index.codec import MAX_BYTES
from shardstore.index.model import Index

WEIGHTS = "model/"
Origin: TypeAlias = Literal["ours", "stale", "foreign", "broken"]
_SHARD = re.compile(r"model-\d{5}-of-\d{5}-([0-9a-f]{16})\.safetensors")


def header_name(index: Index, file: int, tensor: int) -> str:
    """The name of a tensor in the header of a shard: plain in the weights' shards, the full path elsewhere."""
    path = index.paths[tensor]
    return path[len(WEIGHTS) :] if is_weights(index, file) else path


def is_weights(index: Index, file: int) -> bool:
    """Whether a file is a shard of weights, which lie at the top."""
    entry = index.files[file]
    return entry.start is not None and "/" not in entry.path


def weight_map(index: Index) -> bytes | None:
    """The derived file's content, None where the checkpoint has no weights."""
    files = [file for file in range(len(index.files)) if is_weights(index, file)]
    if not files:
        return None
    names = {
        header_name(index, file, tensor): index.files[file].path
        for file in files
        for tensor in index.files[file].pieces
    }
    total = sum(index.sizes[tensor] for file in files for tensor in index.files[file].pieces)
    return strictjson.dumps({"metadata": {"total_size": total, "attempt": index.attempt}, "weight_map": names})


def origin_of(data: bytes, attempt: str) -> Origin:
    """Whose a derived file is: of this attempt, of another one, of another tool, or nothing that can be understood."""
    try:
        document = strictjson.loads(data, limit=MAX_BYTES)
    except strictjson.BadJson:
        return "broken"
    members = document if isinstance(document, dict) else {}
    metadata, files = members.get("metadata"), members.get("weight_map")
    if not isinstance(files, dict):
        return "broken"
    said = metadata.get("attempt") if isinstance(metadata, dict) else None
    found = set(map(_attempt, files.values()))
    if said is None and found <= {None}:
        return "foreign"
    if found != {said}:
        return "broken"
    return "ours" if said == attempt else "stale"


def _attempt(file: Any) -> str | None:
    match = _SHARD.fullmatch(file) if isinstance(file, str) else None
    return match[1] if match else None
