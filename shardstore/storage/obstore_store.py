"""A store in a bucket or container through obstore: S3, Google Cloud Storage, Azure Blob Storage.

Requests are made outside of the interpreter's lock. What is sent is copied first, part by part: obstore may still read
a buffer when the call that gave it has ended, and then it is its own, never a tensor's.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, StoreError, StoreUnavailable
from shardstore.events import Listener
from shardstore.storage import conditions, obstore_options
from shardstore.storage.content import version_of
from shardstore.storage.multipart import Settings, in_parts
from shardstore.storage.obstore_client import request, stores_for
from shardstore.storage.port import Blob, Body, Capabilities, Entry, check_key
from shardstore.storage.posix import exact, too_large
from shardstore.storage.retrying import Retries
from shardstore.storage.s3 import ATTEMPTS, IN_FLIGHT, PART, READ, TIMEOUT_S
from shardstore.storage.s3_client import NotImplementedThere

T = TypeVar("T")

_LARGE = 64 * 1024  # from here on it pays to copy outside of the interpreter's lock
_MOST = 1 << 30  # bytes of an object that is compared before it is replaced


class ObstoreStore:
    """Objects below `s3://`, `gs://` or `az://`. `options` are those of s3fs, gcsfs or adlfs, and ours as for S3Store.

    Raises Unfit, an InvalidArgument, where obstore is not installed, or an option has no counterpart in it.
    """

    def __init__(self, url: str, options: Mapping[str, Any], listener: Listener) -> None:
        ours = {"part_bytes": PART, "in_flight": IN_FLIGHT, "attempts": ATTEMPTS, "timeout_s": TIMEOUT_S}
        theirs = {name: value for name, value in options.items() if name not in ours}
        ours.update((name, options[name]) for name in ours if name in options)
        self.url = url
        self._settings = Settings(ours["part_bytes"], ours["in_flight"])
        self._retries = Retries(ours["attempts"], ours["timeout_s"], 0.2, listener)
        self._target = obstore_options.translate(url, theirs)
        self._stores = stores_for(
            self._target, part_bytes=ours["part_bytes"], attempts=ours["attempts"], timeout_s=ours["timeout_s"]
        )
        self._prefix = self._target.prefix
        self._room = threading.BoundedSemaphore(self._settings.in_flight)

    @property
    def capabilities(self) -> Capabilities:
        """`exclusive` until a probe, made before the first conditional put, has found that it is not."""
        return Capabilities(
            exclusive=conditions.known.get(self._question(conditions.IF_ABSENT), True), durable=True, mappable=False,
            why="it lies in an object store",
            read_bytes=min(self._settings.part_bytes, READ), longest_read=READ,  # each comes in memory of its own
            connections=self._settings.in_flight,
        )  # fmt: skip

    # -- writing

    def prepare(self) -> None:
        """Probe, once for each bucket and process, whether the server honours the conditions of a commit."""
        self._honours(conditions.IF_ABSENT)

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        """Publish an object. A conditional put is one request, sent once: what its lost answer means, reading tells."""
        if if_absent and if_match is not None:
            raise InvalidArgument("if_absent and if_match can't both hold")
        name = self._name(key)
        if if_absent or if_match is not None:
            self._put_if(name, body, if_match)
        elif body.nbytes > self._settings.part_for(body.nbytes):
            self._put_parts(name, body)
        else:
            with self._room:
                data = _whole(body, name)
                self._again("put", name, lambda: self._send(name, data))

    def _put_if(self, name: str, body: Body, if_match: str | None) -> None:
        data = _whole(body, name)
        if not self._honours(conditions.IF_ABSENT if if_match is None else conditions.IF_MATCH):
            raise InvalidArgument(conditions.refusal(self.url))
        if if_match is None:
            self._send(name, data, "create")
            return
        present, tags = self._again("get", name, lambda: self._fetch(name, _MOST))
        if version_of(present) != if_match:
            raise CheckpointExists(
                f"{self._where(name)!r} is not what was expected there: somebody else has written it"
            )
        try:
            self._send(name, data, tags)
        except CheckpointExists:
            self._again("stat", name, lambda: self._head(name))  # KeyMissing where there is nothing to match
            raise

    def _send(self, name: str, data: bytes | bytearray, mode: Any = "overwrite") -> Mapping[str, str]:
        """Send one request, once; returns what tells the object from what else may have that name."""
        import obstore

        return self._once(
            "writing", name, lambda: _tags(obstore.put(self._stores.writes, name, data, mode=mode, use_multipart=False))
        )

    def _put_parts(self, name: str, body: Body) -> None:
        import obstore

        part = self._settings.part_for(body.nbytes)
        feed = _Feed(in_parts(body, part, name), self._room)
        try:
            self._once(
                "writing", name,
                lambda: obstore.put(
                    self._stores.parts, name, feed, use_multipart=True,
                    chunk_size=part, max_concurrency=self._settings.in_flight,
                ),
            )  # fmt: skip
        except BaseException as error:
            if feed.error is not None and feed.error is not error:
                raise feed.error from None
            if not (feed.ended and isinstance(error, StoreError) and self._has(name, body.nbytes)):
                raise

    def _has(self, name: str, nbytes: int) -> bool:
        """Whether the object is there. What is large is never written twice under one name, so that its size tells."""
        try:
            return bool(self._again("stat", name, lambda: self._head(name))["size"] == nbytes)
        except StoreError:
            return False

    def _honours(self, condition: str) -> bool:
        ask = lambda: self._again("probe", self._prefix, lambda: self._probe(condition))  # noqa: E731
        return conditions.honoured(self._question(condition), ask)

    def _question(self, condition: str) -> conditions.Question:
        return self._target.endpoint, self._target.bucket, condition

    def _probe(self, condition: str) -> bool:
        name = conditions.probe_name(self._prefix)
        try:
            mode: Any = self._send(name, b"probe", "create")
            if condition == conditions.IF_ABSENT:
                mode = "create"
            else:
                self._send(name, b"changed", mode)  # from here on, the first tag is an old one
            self._send(name, b"probe", mode)
        except CheckpointExists:
            return True
        except NotImplementedThere:
            return False
        finally:
            self._discard_probe(name)
        return False

    def _discard_probe(self, name: str) -> None:
        with contextlib.suppress(StoreError):  # a listing does not show it
            self._again("delete", name, lambda: self._delete(name))

    def delete(self, key: str) -> None:
        """Remove an object; none of that name is fine."""
        name = self._name(key)
        self._again("delete", name, lambda: self._delete(name))

    def _delete(self, name: str) -> None:
        import obstore

        with contextlib.suppress(KeyMissing):
            self._once("removing", name, lambda: obstore.delete(self._stores.reads, name))

    # -- reading

    def get(self, key: str, *, limit: int) -> Blob:
        """Read a small object by one request; its version is the first half of its sha256.

        The tags of objects change with each writing on some services, and need not with the content on others.
        """
        name = self._name(key)
        data, _ = self._again("get", name, lambda: self._fetch(name, limit))
        return Blob(data, version_of(data))

    def _fetch(self, name: str, limit: int) -> tuple[bytes, Mapping[str, str]]:
        import obstore

        def fetch() -> tuple[bytes, Mapping[str, str]]:
            found = obstore.get(self._stores.reads, name)
            size = found.meta["size"]
            if size > limit:
                raise too_large(self._where(name), size, limit)
            data = bytes(found.bytes())
            self._check(name, len(data), size)
            return data, _tags(found.meta)

        return self._once("reading", name, fetch)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers by one ranged request, whose bytes are copied into them."""
        name = self._name(key)
        if offset < 0 or any(buffer.readonly for buffer in buffers):
            raise InvalidArgument(f"{key!r} can't be read into these buffers from {offset} on")
        wanted = offset, offset + sum(buffer.nbytes for buffer in buffers)
        if wanted[0] != wanted[1]:
            _scatter(self._again("read", name, lambda: self._range(name, wanted)), buffers)

    def _range(self, name: str, wanted: tuple[int, int]) -> memoryview:
        import obstore

        def fetch() -> memoryview:
            found = obstore.get(self._stores.reads, name, options={"range": wanted})
            if tuple(found.range) != wanted:
                where = self._where(name)
                raise StoreError(
                    f"{where!r}: {wanted} was asked for, {found.range} came: it is cut short", filename=where
                )
            data = memoryview(found.bytes())
            self._check(name, len(data), wanted[1] - wanted[0])
            return data

        return self._once("reading", name, fetch)

    def _check(self, name: str, came: int, wanted: int) -> None:
        if came != wanted:
            where = self._where(name)
            raise StoreUnavailable(f"reading {where!r} ended too early: {came} bytes of {wanted} came", filename=where)

    def map(self, key: str) -> memoryview:
        """Objects can't be mapped."""
        raise StoreError(f"{self._where(self._name(key))!r} can't be mapped: it lies in an object store")

    def stat(self, key: str) -> Entry:
        """Size and time of one object."""
        name = self._name(key)
        return _entry(key, self._again("stat", name, lambda: self._head(name)))

    def _head(self, name: str) -> Mapping[str, Any]:
        import obstore

        return self._once("looking at", name, lambda: obstore.head(self._stores.reads, name))

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """All objects whose key starts with `prefix`, all pages of them, or an error."""
        import obstore

        start = self._prefix + prefix
        folder = start.rpartition("/")[0]  # obstore lists by whole parts
        found: Sequence[Mapping[str, Any]] = self._again(
            "list", start, lambda: self._once(
                "listing", start, lambda: obstore.list(self._stores.reads, folder or None, chunk_size=1000).collect()
            ),
        )  # fmt: skip
        # An object whose name ends at a slash comes without it: that of the folder itself is none of ours.
        entries = (_entry(each["path"][len(self._prefix) :], each) for each in found if each["path"].startswith(start))
        return sorted(entry for entry in entries if entry.key and not conditions.is_probe(entry.key))

    def folders(self) -> Sequence[str]:
        """The first parts of keys with more than one; the objects themselves are not listed."""
        import obstore

        folder = self._prefix.rstrip("/")
        found = self._again(
            "list", folder, lambda: self._once(
                "listing", folder, lambda: obstore.list_with_delimiter(self._stores.reads, folder or None)
            ),
        )  # fmt: skip
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"])

    def unfinished(self) -> Sequence[Entry]:
        """Obstore does not list uploads that were begun: a rule of the bucket sees to them."""
        return ()

    def discard(self, key: str) -> None:
        """Nothing is shown as unfinished."""

    # -- the rest

    def now(self) -> float:
        """The server's clock, by the time of an object that is put and removed: obstore shows no heads of answers."""
        name = conditions.probe_name(self._prefix)
        try:
            self._again("put", name, lambda: self._send(name, b"now"))
            return float(self._again("stat", name, lambda: self._head(name))["last_modified"].timestamp())
        finally:
            self._discard_probe(name)

    def close(self) -> None:
        """The connections stay, for those that come after."""

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _where(self, name: str) -> str:
        """An object, for messages."""
        return f"{self._target.kind}://{self._target.bucket}/{name}"

    def _once(self, doing: str, name: str, make: Callable[[], T]) -> T:
        made: T = request(doing, self._where(name), make)
        return made

    def _again(self, call: str, name: str, make: Callable[[], T]) -> T:
        return self._retries.again(call, name, make)


class _Part(bytearray):
    """A part of an upload: a copy, which obstore lets go of when it is sent."""


class _Feed:
    """The parts of an upload, copied one by one as there is room for them, until obstore has let go of others."""

    def __init__(self, parts: Iterator[list[memoryview]], room: threading.BoundedSemaphore) -> None:
        self._parts, self._room = parts, room
        self.ended = False
        self.error: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Part:
        try:
            return self._copied(next(self._parts))  # the last part is kept until it is known that there are no more
        except BaseException as error:
            self.ended = isinstance(error, StopIteration)
            self.error = None if self.ended else error
            raise

    def _copied(self, buffers: Sequence[memoryview]) -> _Part:
        self._room.acquire()
        try:
            part = _Part(sum(map(len, buffers)))
            _gather(buffers, part)
        except BaseException:
            self._room.release()
            raise
        weakref.finalize(part, self._room.release).atexit = False
        return part


def _whole(body: Body, name: str) -> bytearray:
    """A copy of a body."""
    data = bytearray(body.nbytes)
    _gather(exact(body, name), data)
    return data


def _gather(buffers: Iterable[memoryview], into: bytearray) -> None:
    target, at = memoryview(into), 0
    for buffer in buffers:
        _copy(target[at : at + len(buffer)], buffer)
        at += len(buffer)


def _scatter(data: memoryview, buffers: Sequence[memoryview]) -> None:
    at = 0
    for buffer in buffers:
        if buffer.nbytes:
            _copy(buffer.cast("B"), data[at : at + buffer.nbytes])
            at += buffer.nbytes


def _copy(into: memoryview, data: memoryview) -> None:
    if len(data) < _LARGE:
        into[:] = data
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def _tags(found: Mapping[str, Any]) -> dict[str, str]:
    """What a service tells versions of an object by: a tag, a number of its generation, or both."""
    return {name: found[name] for name in ("e_tag", "version") if found.get(name)}


def _entry(key: str, found: Mapping[str, Any]) -> Entry:
    return Entry(key, found["size"], found["last_modified"].timestamp())
