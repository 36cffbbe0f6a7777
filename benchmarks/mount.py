"""A network file system, mounted by FUSE: a SeaweedFS that is started for the run, its data on the memory file system.

Each save has a folder below the server's `buckets`: the files of such a folder go at once with it, as in `bucket`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks import bucket

if TYPE_CHECKING:
    from tests.kit.weed import Weed

NAME = "mount"


def missing() -> str | None:
    """Why nothing can be mounted, None if it can."""
    import pytest

    from tests.kit.weed import require_fuse

    try:
        require_fuse()
    except pytest.skip.Exception as why:
        return str(why)
    return bucket.missing()


class Mount:
    """A running server, mounted."""

    def __init__(self, weed: Weed) -> None:
        self._weed, self._mounted = weed, ExitStack()
        self._names = (f"bench-{at}" for at in itertools.count())
        self._mount()
        (self._root / "buckets").mkdir()

    def _mount(self) -> None:
        from tests.kit.weed import mounted

        self._root = self._mounted.enter_context(mounted(self._weed, NAME))

    def new(self) -> Path:
        """An empty folder that is ready: a server makes room for a bucket at its first file."""
        bucket_folder = self._root / "buckets" / next(self._names)
        (bucket_folder / "run").mkdir(parents=True)
        (bucket_folder / "ready").write_bytes(b"ready")
        return bucket_folder / "run"

    def remove(self, folder: Path) -> None:
        """Remove what `new` has made, with all that lies in it."""
        shutil.rmtree(folder.parent)

    def renew(self) -> None:
        """Mount anew, at the same place: neither the kernel nor the mount has anything of the files afterwards."""
        self.close()
        self._root.rmdir()
        shutil.rmtree(self._root.with_name(f"{NAME}.cache"))
        self._mount()

    def close(self) -> None:
        self._mounted.close()


@contextmanager
def started(place: Path) -> Iterator[Mount]:
    """A server and its mount; both are stopped afterwards. RuntimeError where one does not start."""
    from tests.kit.weed import server

    with (
        mock.patch.dict(os.environ, bucket.MODEST),
        tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=place) as folder,
        server(Path(folder) / "server", options=bucket.ROOMY) as weed,
    ):
        made = Mount(weed)
        try:
            yield made
        finally:
            made.close()
