"""JSON that may come from anywhere, read strictly: no repeated keys, no NaN, no endless depth, no huge input.

`loads` and `dumps` are the only ways by which shardstore reads and writes JSON.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn


class BadJson(ValueError):
    """The text is no strict JSON; the message says why. Callers turn it into an error that names the file."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJson(f"the key {twice[:80]!r} stands twice in one object")
    return made


def _constant(text: str) -> NoReturn:
    raise BadJson(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def loads(data: bytes | memoryview, *, limit: int) -> Any:
    """Parse UTF-8 JSON of at most `limit` bytes. Raises BadJson for whatever is wrong, deep nesting included."""
    if len(data) > limit:
        raise BadJson(f"{len(data)} bytes are more than the {limit} that are allowed")
    try:
        return _DECODER.decode(str(data, "utf-8"))
    except BadJson:
        raise
    except RecursionError:
        raise BadJson("it is nested too deeply") from None
    except ValueError as error:  # malformed, not UTF-8, or a number of thousands of digits
        raise BadJson(str(error)[:200]) from None


def dumps(value: Any) -> bytes:
    """Write compact ASCII JSON; refuses NaN and infinities with ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True).encode("ascii")
