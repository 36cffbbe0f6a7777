"""Versions of contents."""

from __future__ import annotations

import hashlib

VERSION_DIGITS = 32


def version_of(data: bytes | bytearray | memoryview) -> str:
    """The version of a content: the first half of its sha256, in hexadecimal. Equal versions mean equal content."""
    return hashlib.sha256(data).hexdigest()[:VERSION_DIGITS]
