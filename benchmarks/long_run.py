"""A run of many checkpoints, made by hand: indexes and the folders that they lie in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardstore import Run
from shardstore.index import NAME, dump
from shardstore.run import folder_name


@contextmanager
def written(count: int, folder: Path) -> Iterator[None]:
    """So many checkpoints of a tiny model, one after the other; of the newest the files are there, too."""
    from tests.kit.runs import contents

    with Run(folder) as run:
        run_id = run.create().run
    parent = None
    for step in range(count):
        attempt = f"{step + 1:016x}"
        index, files = contents(attempt, run=run_id, step=step, owner=1, seq=step, parent=parent)
        place = folder / folder_name(step, attempt)
        (place / "state").mkdir(parents=True)
        (place / NAME).write_bytes(dump(index))
        for path, data in files.items() if step == count - 1 else ():
            (place / path).write_bytes(data)
        parent = attempt
    yield
