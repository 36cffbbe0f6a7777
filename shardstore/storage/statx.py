"""`statx` as Python's `os` does not offer it yet: what a file is by now on its server, not in this machine's memory.

On FUSE mounts the size of a file that another machine has replaced is remembered for up to a second, while its content
is new already: the end of it is then not seen. Source: statx(2), AT_STATX_FORCE_SYNC.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_EMPTY_PATH = 0x1000
_FORCE_SYNC = 0x2000
_BASIC = 0x7FF
_BYTES = 256  # sizeof(struct statx)


@cache
def _function() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None


def refresh(fd: int) -> None:
    """Have the size and the times of an open file asked for anew; where the system can't, nothing happens."""
    function = _function()
    if function is not None:
        function(fd, b"", _EMPTY_PATH | _FORCE_SYNC, _BASIC, ctypes.create_string_buffer(_BYTES))
