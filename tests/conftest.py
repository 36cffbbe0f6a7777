"""What all tests share: how Hypothesis runs, and a folder in memory."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# No test may fail because the machine was slow: an fsync takes as long as it takes.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples at every run, so that CI turns red because of a change and never by luck.
# New examples are found at every run on a developer's machine, and kept there in .hypothesis/.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` leaves it: some tests are about Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shm_path(tmp_path: Path) -> Iterator[Path]:
    """A new, empty folder in memory, on disk where there is no /dev/shm; removed afterwards."""
    shm = "/dev/shm"
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir=shm) as folder:
        yield Path(folder)
