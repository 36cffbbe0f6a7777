"""The three kinds of stores on which trainings are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shardstore.events import to_log
from shardstore.storage.s3 import S3Store
from tests.kit.s3 import BUCKET, options_for
from tests.kit.weed import mounted, require_fuse, server
from tests.torture.killing import Place


@contextmanager
def disk(folder: Path) -> Iterator[Place]:
    """A folder on a local disk."""
    folder.mkdir()
    yield Place("disk", str(folder))


@contextmanager
def fuse(folder: Path) -> Iterator[Place]:
    """A network file system, mounted by FUSE. Skips where nothing can be mounted."""
    require_fuse()
    with server(folder) as weed, mounted(weed, "mount") as point:
        yield Place("fuse", str(point))


@contextmanager
def s3(folder: Path) -> Iterator[Place]:
    """A bucket."""
    with server(folder, s3=True) as weed:
        options = options_for(weed.s3)
        store = S3Store(f"s3://{BUCKET}", options, to_log)
        store._client.call("create_bucket")
        store.close()
        yield Place("s3", f"s3://{BUCKET}", options)


PLACES: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {"disk": disk, "fuse": fuse, "s3": s3}
