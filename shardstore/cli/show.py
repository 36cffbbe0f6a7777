"""`shardstore show`: what a checkpoint holds, from its index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import click

from shardstore import hashing, strictjson
from shardstore.check import Found, need_index
from shardstore.cli import _errors, _program
from shardstore.cli._output import complain, count, put, put_json, put_table, remark, shown, size, when
from shardstore.errors import Damaged, InvalidArgument, KeyMissing, ShardstoreError, exit_code
from shardstore.index import MAX_BYTES, Index
from shardstore.patterns import matches
from shardstore.run import resolve
from shardstore.storage import Store, open_store


@_program.command("show")
@_program.url_argument
@click.option("--tensors", is_flag=True, help="Only the table of tensors.")
@click.option("--shards", is_flag=True, help="Only the table of shards.")
@click.option(
    "--only", metavar="PATTERN", multiple=True,
    help="Only tensors that match, such as 'model' or '*/h.*.weight': * crosses dots but not /, ** both. Repeatable.",
)  # fmt: skip
@_program.json_option
def command(url: str, *, tensors: bool, shards: bool, only: Sequence[str], as_json: bool) -> int:
    """Show what the checkpoint at URL holds, which may be RUN@STEP or RUN@latest.

    That is its head, its sections, and tables of tensors and shards. The index and the structure are read and verified;
    `shardstore verify` reads the rest.
    """
    url = resolve(url, listener=remark)
    selected = [name for name, on in (("tensors", tensors), ("shards", shards)) if on]
    store = open_store(url, listener=remark)
    try:
        found = need_index(store)
        chosen = _choose(found.index, only)
        left, error = (None, None) if selected else _left(store, found.index)
    finally:
        store.close()
    head = {"url": url} if selected else _head(url, found, left)
    tables = _tables(found.index, chosen)
    document = {**head, **{name: tables[name] for name in selected or tables}}
    if error:
        document["error"] = _errors.as_json(error)
        complain(str(error))
    if as_json:
        put_json(document)
    else:
        _put_text(document)
    return exit_code(error) if error else 0


def _choose(index: Index, only: Sequence[str]) -> list[int]:
    """Numbers of the tensors that match one of the patterns, all without patterns."""
    if not only:
        return list(range(len(index.paths)))
    for pattern in only:
        if not any(matches(pattern, path) for path in index.paths):
            sections = sorted({path.partition("/")[0] for path in index.paths})
            raise InvalidArgument(f"no tensor matches {pattern!r}; the sections are {', '.join(sections) or 'none'}")
    return [tensor for tensor, path in enumerate(index.paths) if any(matches(pattern, path) for pattern in only)]


def _left(store: Store, index: Index) -> tuple[list[str] | None, ShardstoreError | None]:
    """Paths of what the save left to the user, from the verified meta file; or the error that hides them."""
    entry = index.files[index.meta]
    try:
        data = store.get(entry.path, limit=MAX_BYTES).data
        if hashing.digest(index.hash, data) != entry.digest:
            raise Damaged(f"{entry.path} is damaged: its digest is not what was saved", file=entry.path)
        meta = strictjson.loads(data, limit=MAX_BYTES)
        left = meta.get("left") if isinstance(meta, dict) else None
        return [str(path) for path in left] if isinstance(left, list) else [], None
    except strictjson.BadJson as error:
        return None, Damaged(f"{entry.path} is no JSON: {error}", file=entry.path)
    except KeyMissing as error:
        return None, Damaged(f"{entry.path} is missing: {error}", file=entry.path)
    except ShardstoreError as error:
        return None, error


def _head(url: str, found: Found, left: list[str] | None) -> dict[str, Any]:
    index = found.index
    meta = index.files[index.meta]
    return {
        "url": url, "step": index.step, "time": index.time, "attempt": index.attempt, "run": index.run,
        "seq": index.seq, "parent": index.parent, "owner": index.owner, "hash": index.hash, "block": index.block,
        "digest": hashlib.sha256(found.data).hexdigest(), "versions": index.versions, "world": index.world,
        "roots": index.roots, "bytes": index.nbytes, "meta": {"file": meta.path, "bytes": meta.nbytes}, "left": left,
    }  # fmt: skip


def _tables(index: Index, chosen: Sequence[int]) -> dict[str, Any]:
    """Sections, tensors and shards, as far as they concern the chosen tensors."""
    files = {piece.file for tensor in chosen for piece in index.located[index.resolve(tensor)]}
    everything = len(chosen) == len(index.paths)
    sections: dict[str, dict[str, Any]] = {}
    for tensor in chosen:
        name = index.paths[tensor].partition("/")[0]
        section = sections.setdefault(name, {"name": name, "tensors": 0, "bytes": 0})
        section["tensors"] += 1
        section["bytes"] += 0 if tensor in index.aliases else index.sizes[tensor]
    return {
        "sections": list(sections.values()),
        "tensors": [_tensor(index, tensor) for tensor in chosen],
        "shards": [
            {
                "file": file.path,
                "root": file.root,
                "bytes": file.nbytes,
                "tensors": len(set(file.pieces)),
                "digest": file.digest.hex(),
            }
            for number, file in enumerate(index.files)
            if file.start is not None and (everything or number in files)
        ],
    }


def _tensor(index: Index, tensor: int) -> dict[str, Any]:
    spec = index.specs[tensor]
    pieces = [
        {
            "file": index.files[piece.file].path,
            "offset": piece.offset,
            "origin": piece.box.origin,
            "shape": piece.box.shape,
        }
        for piece in index.located[index.resolve(tensor)]
    ]
    tied = index.paths[index.aliases[tensor]] if tensor in index.aliases else None
    return {
        "path": index.paths[tensor], "dtype": spec.dtype, "shape": spec.shape, "bytes": index.sizes[tensor],
        "tied_to": tied, "pieces": pieces,
    }  # fmt: skip


def _put_text(document: dict[str, Any]) -> None:
    writers = {"attempt": _put_head, "sections": _put_sections, "tensors": _put_tensors, "shards": _put_shards}
    for number, name in enumerate(name for name in writers if name in document):
        put(*[""] * min(number, 1))
        writers[name](document)


def _put_head(head: dict[str, Any]) -> None:
    left = head["left"]
    rows = {
        "url": head["url"],
        "step": head["step"],
        "time": when(head["time"]),
        "size": f"{head['bytes']:,} bytes, {size(head['bytes'])}",
        "attempt": head["attempt"],
        "run": head["run"],
        "parent": head["parent"],
        "order": f"owner {head['owner']}, seq {head['seq']}",
        "world": count(head["world"], "rank") + (f", {count(head['roots'], 'root')}" if head["roots"] > 1 else ""),
        "written by": ", ".join(f"{name} {version}" for name, version in head["versions"].items()),
        "hash": f"{head['hash']}, in blocks of {head['block']:,} bytes",
        "digest": f"sha256 {head['digest']} of the index",
        "structure": f"{head['meta']['file']} ({size(head['meta']['bytes'])})",
        "left out": "unknown" if left is None else ", ".join(left),
    }
    known = {name: value for name, value in rows.items() if value not in {None, ""}}
    width = max(map(len, known))
    put(*(f"{name.ljust(width)}  {shown(value)}" for name, value in known.items()))


def _put_sections(document: dict[str, Any]) -> None:
    rows = [(section["name"], section["tensors"], section["bytes"]) for section in document["sections"]]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    put_table("SECTION >TENSORS >SIZE", ((name, tensors, size(nbytes)) for name, tensors, nbytes in rows))


def _put_tensors(document: dict[str, Any]) -> None:
    end = f"-{document['attempt']}.safetensors" if "attempt" in document else ""
    rows = []
    for tensor in document["tensors"]:
        files = dict.fromkeys(piece["file"].removesuffix(end) for piece in tensor["pieces"])
        where = f"= {tensor['tied_to']}" if tensor["tied_to"] else ", ".join(files)
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        rows.append((tensor["path"], tensor["dtype"], shape, size(tensor["bytes"]), where))
    put_table("TENSOR DTYPE SHAPE >SIZE SHARD", rows)


def _put_shards(document: dict[str, Any]) -> None:
    rows = [(shard["file"], size(shard["bytes"]), shard["tensors"]) for shard in document["shards"]]
    put_table("SHARD >SIZE >TENSORS", rows)
