"""The lines of the loss history in a store, a log for each owner: never changed, never moved, only continued.

On local file systems a log is one file, to which each line is appended at once: it survives the death of the process.
Elsewhere it is a row of segments, one for each flush.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardstore.errors import InvalidArgument
from shardstore.run import losses
from shardstore.run.losses import Losses, LossEvent, Recorded
from shardstore.storage import Bytes, LocalStore, Store, unwrap
from shardstore.storage.appending import Appender
from shardstore.transfer import in_parallel

FOLDER = "losses/"
DIGITS = 8
_LIMIT = 4 * 1024**3
_THREADS = 16
_NAME = re.compile(r"losses/([0-9]{8,18})(?:-([0-9]{8,18}))?\.jsonl")


def log_name(epoch: int) -> str:
    """The log of an owner, where it is one file."""
    return f"{FOLDER}{epoch:0{DIGITS}}.jsonl"


def segment_name(epoch: int, number: int) -> str:
    """A segment of the log of an owner."""
    return f"{FOLDER}{epoch:0{DIGITS}}-{number:0{DIGITS}}.jsonl"


class LossWriter:
    """Continues the log of one owner. Safe for threads."""

    def __init__(self, store: Store, epoch: int) -> None:
        self.epoch = epoch
        self._store = store
        self._local = unwrap(store) if isinstance(unwrap(store), LocalStore) else None
        self._file: Appender | None = None
        self._waiting: list[bytes] = []
        self._segment = 0
        self._torn = False
        self._digest, self._lines = hashlib.sha256(), 0
        self._lock = threading.Lock()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the values of a step. Raises InvalidArgument for what is no number; StoreError."""
        self._add(losses.line_of(step, values))

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """Add an event. `start` and `resume` cut off what earlier owners have recorded after that step."""
        self._add(losses.event_line(kind, step, facts))

    def _add(self, line: bytes) -> None:
        with self._lock:
            if isinstance(self._local, LocalStore):
                self._append(self._local, line)
            else:
                self._waiting.append(line)
            self._digest.update(line)
            self._lines += 1

    def _append(self, store: LocalStore, line: bytes) -> None:
        if self._file is None:
            self._file = store.appender(log_name(self.epoch))
        torn, self._torn = self._torn, True
        self._file.write(b"\n" + line if torn else line)  # what an error left behind ends there
        self._torn = False

    def flush(self) -> None:
        """Make durable what was recorded. What a failing store does not take stays for the next flush."""
        with self._lock:
            if self._file is not None:
                self._file.flush()
            if self._waiting:
                self._store.put(segment_name(self.epoch, self._segment), Bytes(*self._waiting))
                self._segment += 1
                self._waiting = []

    def reference(self) -> dict[str, Any]:
        """What a checkpoint says of the log instead of holding it: the epoch, its lines so far, and their sha256."""
        with self._lock:
            return {"epoch": self.epoch, "lines": self._lines, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Flush, and give back the file. Raises StoreError."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None


def read(store: Store, notice: Callable[[str], None] = lambda _: None) -> Losses:
    """The merged history of a run; empty where nothing was recorded. Raises StoreError."""
    found: list[tuple[int, Recorded | LossEvent]] = []
    unread = 0
    for epoch, key, data in _logs(store):
        lines, bad = _parse(epoch, data)
        found += lines
        unread += bad
        if bad:
            notice(f"{key}: {bad} lines can't be understood and are left out")
    return losses.merge(found, unread)


def matches(store: Store, reference: Mapping[str, Any]) -> bool:
    """Whether the log still begins with the lines to which a checkpoint refers."""
    try:
        epoch, lines, digest = int(reference["epoch"]), int(reference["lines"]), str(reference["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"this is no reference to a loss log: {reference!r}") from error
    data = b"".join(data for at, _, data in _logs(store, epoch) if at == epoch)
    whole = [line + b"\n" for line in data.split(b"\n")[:-1] if losses.parse_line(line)]
    return len(whole) >= lines and hashlib.sha256(b"".join(whole[:lines])).hexdigest() == digest


def _logs(store: Store, epoch: int | None = None) -> Iterator[tuple[int, str, bytes]]:
    """Epoch, name and content of each log or segment, in order."""
    prefix = FOLDER if epoch is None else f"{FOLDER}{epoch:0{DIGITS}}"
    names = [(match, entry.key) for entry in store.list(prefix) if (match := _NAME.fullmatch(entry.key))]
    order = sorted((int(match[1]), int(match[2] or -1), key) for match, key in names)
    data: dict[str, bytes] = {}

    def get(key: str) -> None:
        data[key] = store.get(key, limit=_LIMIT).data

    in_parallel(get, [key for *_, key in order], _THREADS)
    return ((at, key, data[key]) for at, _, key in order)


def _parse(epoch: int, data: bytes) -> tuple[list[tuple[int, Recorded | LossEvent]], int]:
    """The lines of a log, and how many can't be understood; the torn end that a dead process leaves is no line."""
    found: list[tuple[int, Recorded | LossEvent]] = []
    bad = 0
    *lines, _torn = data.split(b"\n")
    for line in lines:
        parsed = losses.parse_line(line, epoch) if line else None
        if parsed is not None:
            found.append((epoch, parsed))
        elif line:
            bad += 1
    return found, bad
