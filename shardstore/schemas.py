"""The schemas of the index and of the meta, and the way of older documents to the present ones.

A change of the format appends a step: a pure function from the JSON document of one schema to that of the next. Readers
and `shardstore migrate` go through `Chain.upgrade`, so that nothing else knows what older documents looked like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardstore.errors import Damaged, UnsupportedVersion

Document: TypeAlias = dict[str, Any]
Step: TypeAlias = Callable[[Document], Document]

_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(slots=True)
class Chain:
    """Schemas that follow each other up to the `current` one, which is written. `steps`: by the schema they start from.

    A step returns the document with its new `schema`, a later one of this chain. It is given what stood in a file, of
    which only the JSON has been checked, and may fail on it by any of Python's usual errors.
    """

    current: str
    steps: dict[str, Step] = field(default_factory=dict)

    def reads(self, schema: object) -> bool:
        """Whether documents of a schema can be read."""
        return isinstance(schema, str) and (schema == self.current or schema in self.steps)

    def upgrade(self, document: Document, where: str) -> Document:
        """The document in the current schema. `where` names its file in errors.

        Raises UnsupportedVersion for an unknown schema, Damaged where the document is none of the schema that it names.
        """
        for _ in range(len(self.steps) + 1):
            schema = document.get("schema")
            if schema == self.current:
                return document
            if not isinstance(schema, str) or schema not in self.steps:
                break
            try:
                document = self.steps[schema](document)
            except _FAULTS as error:
                raise Damaged(f"{where} is not what its schema {schema!r} says: {error!r}", file=where) from None
        raise UnsupportedVersion(
            f"{where} has the schema {str(document.get('schema'))[:40]!r}, which this version of shardstore does not "
            f"know (it writes {self.current!r}): use a newer one"
        )


INDEX = Chain("shardstore/1")
META = Chain("shardstore-meta/1")
