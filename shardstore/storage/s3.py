"""A store in a bucket: S3, and services that speak it, through s3fs.

Objects are published whole: a small one by one PUT, a large one by a multipart upload whose parts are sent in parallel
from the memory they lie in. Nothing is ever copied or renamed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, StoreError, StoreUnavailable
from shardstore.events import Listener
from shardstore.storage import conditions, multipart
from shardstore.storage.carrying import Carrier, Landing, is_range
from shardstore.storage.port import Blob, Body, Capabilities, Entry, check_key
from shardstore.storage.s3_client import Client, NotImplementedThere

PART = 16 * 1024 * 1024
IN_FLIGHT = 16
READ, LONGEST_READ = 8 * 1024 * 1024, 32 * 1024 * 1024
ATTEMPTS, TIMEOUT_S = 8, 300
_OPTIONS = ("part_bytes", "in_flight", "attempts", "timeout_s")

_NO_TAG = '"none"'


class S3Store:
    """Objects below `s3://bucket/prefix`. `storage_options` are those of s3fs and ours.

    `part_bytes` (default 16 MiB, 5 MiB to 5 GiB): bytes of a part of an upload. `in_flight` (default 16): parts sent at
    once. `attempts` (default 8), `timeout_s` (default 300): how often, and for how long, a request is tried.
    """

    def __init__(self, url: str, options: Mapping[str, Any], listener: Listener) -> None:
        bucket, _, prefix = url.partition("://")[2].partition("/")
        if len(bucket) < 3:  # noqa: PLR2004 - the rule of S3
            raise InvalidArgument(f"{url!r} names no bucket: s3://bucket/prefix")
        self.url = url
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        ours = {name: options[name] for name in _OPTIONS if name in options}
        theirs = {name: value for name, value in options.items() if name not in _OPTIONS}
        self._settings = multipart.Settings(ours.get("part_bytes", PART), ours.get("in_flight", IN_FLIGHT))
        self._client = Client(
            theirs, bucket, attempts=ours.get("attempts", ATTEMPTS), timeout_s=ours.get("timeout_s", TIMEOUT_S),
            listener=listener,
        )  # fmt: skip
        self._uploads = multipart.Uploads(self._client, self._settings)

    @property
    def capabilities(self) -> Capabilities:
        """`exclusive` until a probe, made before the first conditional put, has found that it is not."""
        return Capabilities(
            exclusive=conditions.known.get(self._question(conditions.IF_ABSENT), True), durable=True, mappable=False,
            why="it lies in an object store",
            read_bytes=min(self._settings.part_bytes, READ), longest_read=LONGEST_READ,
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
        else:
            self._uploads.put(name, body)

    def _put_if(self, name: str, body: Body, if_match: str | None) -> None:
        if not self._honours(conditions.IF_ABSENT if if_match is None else conditions.IF_MATCH):
            raise InvalidArgument(conditions.refusal(self.url))
        if if_match is None:
            self._uploads.put_once(name, body, {"IfNoneMatch": "*"})
            return
        try:
            # S3 takes an empty tag for no condition at all
            self._uploads.put_once(name, body, {"IfMatch": if_match or _NO_TAG})
        except CheckpointExists:
            self._client.call("head_object", Key=name)  # KeyMissing where there is nothing to match
            raise

    def _honours(self, condition: str) -> bool:
        """Whether a PUT under a condition that does not hold is refused; asked once for each bucket and process."""
        return conditions.honoured(self._question(condition), lambda: self._probe(condition))

    def _question(self, condition: str) -> conditions.Question:
        fs = self._client.fs
        return str(fs.endpoint_url or fs.client_kwargs.get("endpoint_url")), self._client.bucket, condition

    def _probe(self, condition: str) -> bool:
        probing = self._client.again("probe", self._prefix, lambda: self._probe_once(condition))
        return self._client.carry(probing, Carrier(self._client.patience(0)))

    async def _probe_once(self, condition: str) -> bool:
        name = conditions.probe_name(self._prefix)
        put = self._uploads.prepared(name, [[memoryview(b"probe")]])
        try:
            await self._uploads.send_once(put, {"IfNoneMatch": "*"})
            await self._uploads.send_once(put, {condition: "*" if condition == conditions.IF_ABSENT else _NO_TAG})
        except CheckpointExists:
            return True
        except NotImplementedThere:
            return False
        finally:
            with contextlib.suppress(StoreError):
                await self._client.request("delete_object", Key=name)
        return False

    def delete(self, key: str) -> None:
        """Remove an object; none of that name is fine."""
        self._client.call("delete_object", Key=self._name(key))

    # -- reading

    def get(self, key: str, *, limit: int) -> Blob:
        """Read a small object by one request; its version is its ETag."""
        return self._client.wait(self._get(self._name(key), limit))

    async def _get(self, name: str, limit: int) -> Blob:
        async def once() -> Blob:
            answer = await self._client.once("get_object", Key=name)
            async with answer["Body"] as body:
                if answer["ContentLength"] > limit:
                    where = self._client.where(name)
                    raise StoreError(
                        f"{where!r} holds {answer['ContentLength']} bytes, {limit} are allowed", filename=where
                    )
                data = await self._read_all(body, name, answer["ContentLength"])
            return Blob(data, answer["ETag"])

        return await self._client.again("get", name, once)

    async def _read_all(self, body: Any, name: str, nbytes: int) -> bytes:
        data = memoryview(bytearray(nbytes))
        if nbytes:
            await self._receive(body, Landing(0, [data]), name)
        return bytes(data)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers by one ranged request."""
        total = sum(buffer.nbytes for buffer in buffers)
        if offset < 0:
            raise InvalidArgument(f"{key!r} has no byte {offset}")
        name = self._name(key)
        if any(buffer.readonly for buffer in buffers):
            raise InvalidArgument(f"{key!r} can't be read into memory that is read-only")
        if total:
            views = [buffer.cast("B") if buffer.format != "B" else buffer for buffer in buffers if buffer.nbytes]
            into = Landing(offset, views)
            self._client.carry(self._read(name, into), Carrier(self._client.patience(total), into))

    async def _read(self, name: str, into: Landing) -> None:
        async def once() -> None:
            if not into.left:  # a try that broke off at its very end
                return
            wanted = into.wanted
            answer = await self._client.once("get_object", nbytes=into.left, Key=name, Range=f"bytes={wanted}")
            async with answer["Body"] as body:
                shown = answer.get("ContentRange", "")
                if not is_range(shown, wanted):
                    where = self._client.where(name)
                    raise StoreError(
                        f"{where!r}: {wanted} were asked for, {shown or 'all'} came: it is cut short", filename=where
                    )
                if into.left:  # it went through a proxy, or a session that is not ours
                    await self._receive(body, into, name)

        await self._client.again("read", name, once)

    async def _receive(self, body: Any, into: Landing, name: str) -> None:
        """Move a body into buffers as it comes in; one that ends early may be asked for again."""
        from aiohttp import ClientError

        where = self._client.where(name)
        stream = body.raw_stream.content
        try:
            async with asyncio.timeout(self._client.patience(into.left)):
                while into.left:
                    chunk = await stream.read(len(into.room(into.left)))
                    if not chunk:
                        raise StoreUnavailable(f"reading {where!r} ended too early", filename=where)
                    into.room(len(chunk))[:] = chunk
                    into.took(len(chunk))
        except (ClientError, TimeoutError, ConnectionError) as error:
            why = str(error) or type(error).__name__
            raise StoreUnavailable(f"reading {where!r} broke off: {why}", filename=where) from error

    def map(self, key: str) -> memoryview:
        """Objects can't be mapped."""
        raise StoreError(f"{self._client.where(self._name(key))!r} can't be mapped: it lies in an object store")

    def stat(self, key: str) -> Entry:
        """Size and time of one object."""
        answer = self._client.call("head_object", Key=self._name(key))
        return Entry(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """All objects whose key starts with `prefix`, all pages of them, or an error."""
        return sorted(entry for page in self._pages(Prefix=self._prefix + prefix) for entry in self._entries(page))

    def folders(self) -> Sequence[str]:
        """The first parts of keys with more than one; the objects themselves are not listed."""
        pages = self._pages(Prefix=self._prefix, Delimiter="/")
        found = (each["Prefix"] for page in pages for each in page.get("CommonPrefixes", ()))
        return sorted(name for prefix in found if (name := prefix[len(self._prefix) : -1]))

    def _entries(self, page: Mapping[str, Any]) -> Iterator[Entry]:
        for found in page.get("Contents", ()):
            key = found["Key"][len(self._prefix) :]
            if key and not key.endswith("/") and not conditions.is_probe(key):
                yield Entry(key, found["Size"], found["LastModified"].timestamp())

    def _pages(self, **what: Any) -> Iterator[Mapping[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self._client.call("list_objects_v2", **what, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or more.get("ContinuationToken") == token:
                raise StoreError(
                    f"the listing of {self.url!r} says that there is more, but not where", filename=self.url
                )
            more = {"ContinuationToken": token}

    def unfinished(self) -> Sequence[Entry]:
        """Uploads in parts that are neither complete nor aborted. Services that don't list them show none."""
        found: dict[str, float] = {}
        for each in self._begun(self._prefix):
            key, begun = each["Key"][len(self._prefix) :], each["Initiated"].timestamp()
            found[key] = max(begun, found.get(key, begun))
        return sorted(Entry(key, 0, begun) for key, begun in found.items())

    def discard(self, key: str) -> None:
        """Abort all uploads of an object."""
        name = self._name(key)
        for each in self._begun(name):
            if each["Key"] == name:
                with contextlib.suppress(KeyMissing):  # ended meanwhile
                    self._client.call("abort_multipart_upload", Key=name, UploadId=each["UploadId"])

    def _begun(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            try:
                page = self._client.call("list_multipart_uploads", Prefix=prefix, **more)
            except StoreUnavailable:
                raise
            except StoreError:
                return  # not allowed, or not known there: the bucket's lifecycle rule sees to them
            yield from page.get("Uploads", ())
            markers = page.get("NextKeyMarker"), page.get("NextUploadIdMarker")
            if not page.get("IsTruncated") or not markers[0] or markers[0] == more.get("KeyMarker"):
                return
            more = {"KeyMarker": markers[0], "UploadIdMarker": markers[1] or ""}

    # -- the rest

    def now(self) -> float:
        """The server's clock, from the head of an answer."""
        from email.utils import parsedate_to_datetime

        answer = self._client.call("list_objects_v2", Prefix=self._prefix, MaxKeys=1)
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def close(self) -> None:
        """The connections stay, for those that come after."""

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)
