"""The small JSON files of a run: read strictly, and put under a condition with lost answers cleared up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from shardstore import strictjson
from shardstore.errors import CheckpointExists, Damaged, KeyMissing, StoreUnavailable, UnsupportedVersion
from shardstore.storage import Blob, Bytes, Store

LIMIT = 16 * 1024 * 1024
_TRIES = 8  # at 2 s for each, longer than the claim of a writer counts that has died with it

Members = Mapping[str, tuple[type, ...]]
NONE = type(None)


def dump(schema: str, **members: Any) -> bytes:
    """The bytes of a document: its schema first, a newline at the end."""
    return strictjson.dumps({"schema": schema, **members}) + b"\n"


def parse(data: bytes, key: str, schema: str, members: Members) -> dict[str, Any]:
    """The members of a document, which must be exactly these, of these types.

    Raises UnsupportedVersion for a newer schema of that name, Damaged for anything else.
    """
    try:
        found = strictjson.loads(data, limit=LIMIT)
    except strictjson.BadJson as error:
        bad(key, str(error))
    if not isinstance(found, dict):
        bad(key, "it is no JSON object")
    said = found.pop("schema", None)
    if said != schema:
        family = schema.partition("/")[0] + "/"
        if isinstance(said, str) and said.startswith(family):
            raise UnsupportedVersion(f"{key} has the schema {said[:40]!r}: use a newer version of shardstore")
        bad(key, f"its schema is not {schema!r}")
    check(found, key, members)
    return found


def check(found: Mapping[str, Any], key: str, members: Members) -> None:
    """That an object has exactly these members, of these types. Raises Damaged."""
    if found.keys() != members.keys():
        bad(key, f"its members are not {', '.join(members)}")
    for name, types in members.items():
        if type(found[name]) not in types:
            bad(key, f"{name!r} has the wrong type")


def bad(key: str, why: str) -> NoReturn:
    """Raise Damaged for a document."""
    raise Damaged(f"{key} can't be understood: {why}", file=key)


def fetch(store: Store, key: str, limit: int = LIMIT) -> Blob | None:
    """A small file, None where there is none."""
    try:
        return store.get(key, limit=limit)
    except KeyMissing:
        return None


def put_if(
    store: Store, key: str, data: bytes, version: str | None, *, single_writer: bool = False, limit: int = LIMIT
) -> bool:
    """Put a document where nothing is (`version` None), or in the place of the one with that version.

    False where somebody else was first. An answer that was lost is found out by reading. `single_writer`: the store
    knows no conditions, and the caller says that nobody else writes there. `limit`: bytes of the present one at most.
    """
    for _ in range(_TRIES):
        try:
            if not single_writer:
                store.put(key, Bytes(data), if_absent=version is None, if_match=version)
                return True
            present = fetch(store, key, limit)
            if (present.version if present else None) == version:
                store.put(key, Bytes(data))
                return True
            return False
        except (CheckpointExists, KeyMissing, StoreUnavailable) as error:
            present = fetch(store, key, limit)
            if present is not None and present.data == data:
                return True
            unclear = isinstance(error, StoreUnavailable)
            if not unclear or (present.version if present else None) != version:
                return False
    raise StoreUnavailable(f"{key} could not be written: the store does not say whether it was", filename=key)
