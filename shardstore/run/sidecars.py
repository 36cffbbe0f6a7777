"""Sidecars: small JSON files beside the checkpoints of a run, in generations. A pivot starts the next generation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardstore import strictjson
from shardstore.errors import Damaged, InvalidArgument, brief
from shardstore.run.documents import LIMIT, fetch
from shardstore.storage import Bytes, Store

FOLDER = "sidecars/"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One sidecar of one generation. Reading gives what was written last, whole."""

    store: Store
    name: str
    generation: int

    @property
    def key(self) -> str:
        """Its file in the run folder."""
        return f"{FOLDER}{self.generation}/{self.name}.json"

    def read(self, default: Any = None) -> Any:
        """Its value; `default` where none was written in this generation. Raises Damaged, StoreError."""
        blob = fetch(self.store, self.key)
        if blob is None:
            return default
        try:
            return strictjson.loads(blob.data, limit=LIMIT)
        except strictjson.BadJson as error:
            raise Damaged(f"{self.key} is no JSON: {error}", file=self.key) from None

    def write(self, value: Any) -> None:
        """Replace its value, at once and durably. JSON of at most 16 MiB, without nan and infinities."""
        try:
            data = strictjson.dumps(value) + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"the sidecar {self.name!r} takes plain JSON only: {error}") from error
        if len(data) > LIMIT:
            raise InvalidArgument(f"the sidecar {self.name!r} would have {len(data)} bytes, {LIMIT} are allowed")
        self.store.put(self.key, Bytes(data))


def sidecar(store: Store, name: Any, generation: int) -> Sidecar:
    """A sidecar by name. Raises InvalidArgument for a name that is no plain file name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"a sidecar is named by letters, digits, '.', '_' and '-', not {brief(name)}")
    return Sidecar(store, name, generation)
