"""What the demo prints, and how it runs other programs."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from torch import nn


def say(*lines: str) -> None:
    """Print at once, also into a pipe."""
    print(*lines or [""], sep="\n", flush=True)


def title(text: str) -> None:
    """Begin a chapter."""
    say("", text, "-" * len(text))


def run(*command: str, folder: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program and take what it prints."""
    return subprocess.run(command, cwd=folder, check=check, stdout=subprocess.PIPE, text=True)


def fingerprint(model: nn.Module) -> str:
    """A digest of all weights: one different bit gives another."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy())
    return digest.hexdigest()
