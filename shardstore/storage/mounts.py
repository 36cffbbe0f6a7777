"""What kind of file system a folder lies on, and what can be promised there."""

from __future__ import annotations

import functools
import os
import re

from shardstore.storage.port import Capabilities

_TABLE = "/proc/self/mountinfo"  # proc(5); field 5 is the mount point, the type follows the lone "-"
_DISTRIBUTED = {"lustre", "ceph", "gpfs", "beegfs", "afs", "pvfs2", "orangefs", "gfs2", "ocfs2"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "9p", "virtiofs"} | _DISTRIBUTED
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


def _unescape(text: str) -> str:
    """Mount points have blanks and backslashes written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def parse(table: str) -> list[tuple[str, str]]:
    """Mount points and types, in the order of mounting."""
    found = []
    for line in table.splitlines():
        fields = line.split(" ")
        if "-" in fields[6:]:
            found.append((_unescape(fields[4]), fields[fields.index("-", 6) + 1]))
    return found


def file_system(path: str) -> str:
    """The type of the file system on which a path lies, or would lie; "" where the system does not say."""
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape") as file:
            mounts = parse(file.read())
    except OSError:
        return ""
    real = os.path.realpath(path).rstrip("/") + "/"
    above = [mount for mount in mounts if real.startswith(mount[0].rstrip("/") + "/")]
    nearest = max((len(point) for point, _ in above), default=0)
    return next((kind for point, kind in reversed(above) if len(point) == nearest), "")


def coherent(kind: str) -> bool:
    """Whether all who use a file system of this type see its present state, and not what some cache still holds."""
    return bool(kind) and kind not in _NETWORK and not is_fuse(kind)


def is_fuse(kind: str) -> bool:
    """Whether a program, not the kernel, answers for a file system of this type."""
    return kind.partition(".")[0] in {"fuse", "fuseblk"}


@functools.cache  # asked for each block that is read
def capabilities(kind: str) -> Capabilities:
    """What a local store can promise on a file system of this type. Folders are made exclusively on all of them."""
    if is_fuse(kind):
        why = f"on {kind} another program decides what fsync does; when that fails, a map ends the process with SIGBUS"
        return Capabilities(exclusive=True, durable=False, mappable=False, why=why, sequential=True)
    if kind in _NETWORK:
        why = f"on {kind} a map is slow, and a failure of the network ends the process with SIGBUS"
        return Capabilities(exclusive=True, durable=True, mappable=False, why=why)
    if kind in _MEMORY:
        why = f"{kind} lies in memory, and does not survive a power loss"
        return Capabilities(exclusive=True, durable=False, mappable=True, why=why)
    if not kind:
        why = "the system does not say on what kind of file system it lies, so that a map may fail with SIGBUS"
        return Capabilities(exclusive=True, durable=True, mappable=False, why=why)
    return Capabilities(exclusive=True, durable=True, mappable=True)
