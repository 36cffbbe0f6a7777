"""Real English text that every Python installation has: nothing is downloaded."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch


def python_text(nbytes: int) -> torch.Tensor:
    """About Python, by its authors: its licence, its language reference, the docstrings of its library; `uint8`.

    The same bytes at each call on one installation. At most `nbytes`.
    """
    found = bytearray()
    for text in _sources(Path(sysconfig.get_path("stdlib"))):
        found += text.encode() + b"\n\n"
        if len(found) >= nbytes:
            break
    return torch.frombuffer(found[:nbytes], dtype=torch.uint8)


def _sources(library: Path) -> Iterator[str]:
    if (library / "LICENSE.txt").is_file():  # some distributions keep it elsewhere
        yield (library / "LICENSE.txt").read_text(encoding="utf-8")
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    for path in sorted(library.glob("*.py")):
        yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a module, of its classes and of its functions; the module is read, not run."""
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
