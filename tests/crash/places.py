"""Looking at the place of a checkpoint after something has happened to it, and setting its clock back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import shardstore
from shardstore.check import plan_leftovers, remove
from shardstore.errors import CheckpointExists, CheckpointNotFound, Unfinished
from shardstore.index import HF_NAME, NAME, parse, weight_map
from shardstore.storage import LocalStore, Store
from tests.crash.states import number_of, state
from tests.kit.inject import injected

DAY = 86_400.0
_MARK = re.compile(r"attempt-[0-9a-f]{16}\.json")


def look(place: Path) -> int | None:
    """The number of the state that is loaded from there, None where there is no checkpoint."""
    try:
        return number_of(shardstore.load(place))
    except CheckpointNotFound:
        return None


def settled(place: Path, *allowed: int | None) -> int | None:
    """The same, which must be one of `allowed`, and `verify` must agree: whole, or unfinished, never damaged."""
    seen = look(place)
    assert seen in allowed
    if seen is None:
        try:
            report = shardstore.verify(str(place))
        except CheckpointNotFound as error:
            assert not isinstance(error, Unfinished)  # noqa: PT017  what it may be, too
            return None
        assert [type(found.error) for found in report.checkpoints] == [Unfinished]
        assert report.exit_code == Unfinished.exit_code
        assert not report.checkpoints[0].problems
        return None
    report = shardstore.verify(str(place))
    assert report.ok, [problem.message for found in report.checkpoints for problem in found.problems]
    assert [found.step for found in report.checkpoints] == [seen]
    return seen


def files(place: Path) -> set[str]:
    """Every file at a place, hidden and temporary ones included, but no claims."""
    found = (
        os.path.relpath(os.path.join(folder, name), place) for folder, _, names in os.walk(place) for name in names
    )
    return {name for name in found if not name.startswith(".claims/")}


def named(place: Path) -> set[str]:
    """The index, and the files that it names; nothing where there is no index."""
    try:
        document = json.loads((place / NAME).read_bytes())
    except FileNotFoundError:
        return set()
    return {NAME, *(entry["path"] for entry in document["files"])}


def in_line(place: Path) -> bool:
    """Whether the index that Hugging Face tools read is that of the checkpoint, or missing where it has no weights."""
    wanted = weight_map(parse((place / NAME).read_bytes()))
    derived = place / HF_NAME
    return derived.read_bytes() == wanted if wanted else not derived.exists()


def tidy(place: Path) -> bool:
    """Whether nothing lies there but one checkpoint."""
    return files(place) - {HF_NAME} == named(place) and temps(place) == [] and in_line(place)


def temps(place: Path) -> list[str]:
    """Temporary files, also those among the claims."""
    return [
        os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names if name.endswith(".tmp")
    ]


def patient(store: Store) -> Store:
    """A local store that does not wait for other ones' claims; how old a claim must be to be broken stays as it is."""
    return LocalStore(store.url, claim_wait=0.0)


def age(place: Path, seconds: float, only: Collection[str] | None = None) -> None:
    """Let time pass: marks, claims and temporary files get older by so many seconds. `only`: of these attempts."""
    for path in _ageing(place):
        if only is None or any(attempt in path for attempt in only):
            found = os.lstat(path)
            os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds), follow_symlinks=False)


def _ageing(place: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(place):
        inside = ".claims" in Path(folder).relative_to(place).parts
        for name in [*names, *(folders if inside else ())]:
            if inside or name.endswith(".tmp") or _MARK.fullmatch(name):
                yield os.path.join(folder, name)


def prune(place: Path) -> list[str]:
    """Remove what may be removed by now; returns the files that went."""
    store = LocalStore(place)
    gone: list[str] = []
    for leftover in plan_leftovers(store):
        if leftover.removable:
            assert remove(leftover, store) == []
            gone += leftover.keys
    store.close()
    return gone


def recovers(place: Path, seen: int | None, number: int) -> None:
    """The next save works, once the claim of a dead one counts as old, and after a day nothing useless is left."""
    if seen is not None:
        with pytest.raises(CheckpointExists):
            shardstore.save(state(number), place)
        assert settled(place, seen) == seen
    age(place, 11)
    with injected(patient):
        shardstore.save(state(number), place, step=number, overwrite=seen is not None)
    assert settled(place, number) == number
    assert in_line(place)
    age(place, 2 * DAY)
    prune(place)
    assert settled(place, number) == number
    assert tidy(place)
