"""latest.json: a hint, written after a commit. It can add to what a listing shows, and take nothing away."""

from __future__ import annotations

from shardstore.errors import Damaged, UnsupportedVersion
from shardstore.run import documents
from shardstore.run.documents import fetch
from shardstore.run.names import parse_folder
from shardstore.storage import Bytes, Store

NAME = "latest.json"
SCHEMA = "shardstore-latest/1"
_MEMBERS: documents.Members = {"name": (str,)}


def write(store: Store, name: str) -> None:
    """Name the folder of the checkpoint that was committed last."""
    store.put(NAME, Bytes(documents.dump(SCHEMA, name=name)))


def read(store: Store) -> tuple[str | None, str]:
    """The folder that it names; None where it names none, with what is wrong with it, if anything."""
    blob = fetch(store, NAME)
    if blob is None:
        return None, ""
    try:
        name = str(documents.parse(blob.data, NAME, SCHEMA, _MEMBERS)["name"])
    except (Damaged, UnsupportedVersion) as error:
        return None, str(error)
    if parse_folder(name) is None:
        return None, f"{NAME} names {name[:80]!r}, which is no folder of a checkpoint"
    return name, ""
