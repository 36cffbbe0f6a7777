"""Looking at a place in a bucket after something has happened to it."""

from __future__ import annotations

import shardstore
from shardstore.errors import CheckpointNotFound, Unfinished
from shardstore.index import NAME
from tests.crash.states import number_of
from tests.kit.s3 import Place


def look(place: Place) -> int | None:
    """The number of the state that is loaded from there, None where there is no checkpoint."""
    try:
        return number_of(shardstore.load(place.url, storage_options=place.options))
    except CheckpointNotFound:
        return None


def settled(place: Place, *allowed: int | None) -> int | None:
    """The same, which must be one of `allowed`; with all its files, and `verify` agrees: whole or unfinished."""
    seen = look(place)
    assert seen in allowed
    try:
        report = shardstore.verify(place.url, storage_options=place.options)
    except CheckpointNotFound:
        assert place.names() == set()
        return None
    assert named(place) <= place.names()
    if seen is None:
        assert place.index() is None
        assert [type(found.error) for found in report.checkpoints] == [Unfinished]
        assert report.exit_code == Unfinished.exit_code
    else:
        assert report.ok, [problem.message for found in report.checkpoints for problem in found.problems]
        assert [found.step for found in report.checkpoints] == [seen]
    return seen


def named(place: Place) -> set[str]:
    """The index, and the files that it names; nothing where there is no index."""
    document = place.index()
    return {NAME, *(entry["path"] for entry in document["files"])} if document else set()
