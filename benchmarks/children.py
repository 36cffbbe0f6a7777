"""Measurements in processes of their own, `python -m MODULE WORDS`: their last line says in JSON what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def ask(module: str, *words: str) -> Any:
    """What one process found. Raises RuntimeError with its last words if it failed."""
    return ask_all(module, [words])[0]


def ask_all(module: str, each: Sequence[Sequence[str]]) -> list[Any]:
    """What several processes found that run at the same time. Raises RuntimeError if any failed; none is left."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT, env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(len(each))},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, words in enumerate(each)
    ]  # fmt: skip
    try:
        said = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            print(errors, file=sys.stderr)
            raise RuntimeError((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
