"""Patterns on tensor paths: `*` crosses dots but not `/`, `**` crosses everything, `?` is one character but `/`.

Nothing else is special, so `[` and `#` are themselves. A pattern without `/` and wildcards that equals a section's name
means the whole section.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable


@functools.lru_cache(maxsize=512)
def compiled(pattern: str) -> Callable[[str], object]:
    """A predicate on paths for one pattern."""
    if not any(c in pattern for c in "/*?"):
        section = f"{pattern}/"
        return lambda path: path == pattern or path.startswith(section)
    tokens = re.split(r"(\*\*|\*|\?)", pattern)
    wild = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(wild.get(t) or re.escape(t) for t in tokens), re.DOTALL).fullmatch


def matches(pattern: str, path: str) -> bool:
    """Whether `path` (`section/name`) matches `pattern`."""
    return bool(compiled(pattern)(path))
