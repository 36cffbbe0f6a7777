"""What the fault cases share: the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from click.testing import CliRunner, Result

from shardstore.cli import main


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Call the command line; the result has `exit_code` and `output`."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words], prog_name="shardstore")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Let torch compute on one thread: the tests themselves run side by side on all cores."""
    torch.set_num_threads(1)
