"""Uploads: one PUT for what is small, parallel parts for what is large; sent from the memory the bytes lie in."""

from __future__ import annotations

import base64
import contextlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from shardstore.errors import InvalidArgument, StoreError, StoreUnavailable
from shardstore.storage.carrying import Carrier, Payload
from shardstore.storage.port import Body
from shardstore.storage.s3_client import ChecksumRefused, Client

MIN_PART = 5 * 1024 * 1024
MAX_PART = 5 * 1024**3
MAX_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Settings:
    """`part_bytes`: bytes of a part; grown for objects that would need more than 10,000. `in_flight`: parts at once."""

    part_bytes: int
    in_flight: int

    def __post_init__(self) -> None:
        if type(self.part_bytes) is not int or not MIN_PART <= self.part_bytes <= MAX_PART:
            raise InvalidArgument(f"part_bytes must be from 5 MiB to 5 GiB, not {self.part_bytes!r}")
        if type(self.in_flight) is not int or not 1 <= self.in_flight <= 1024:  # noqa: PLR2004
            raise InvalidArgument(f"in_flight must be a whole number from 1 to 1024, not {self.in_flight!r}")

    def part_for(self, nbytes: int) -> int:
        """Bytes of a part for an object of so many bytes: equal parts, of whole MiB but for the last."""
        count = min(-(-nbytes // self.part_bytes), MAX_PARTS)
        part = max(MIN_PART, -(-nbytes // max(count, 1) // 2**20) * 2**20)
        if part > MAX_PART:
            raise InvalidArgument(f"an object of {nbytes} bytes is over the limit of S3: use more shards")
        return part


def _crc32(payload: Payload) -> str:
    """The CRC-32 of the bytes, in base64, as S3 wants it."""
    value = 0
    for buffer in payload.buffers:
        value = zlib.crc32(buffer, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


@dataclass(frozen=True, slots=True)
class Put:
    """A request that publishes an object: its arguments, and the same with a checksum, if there is to be one."""

    plain: dict[str, Any]
    summed: dict[str, Any]


class Uploads:
    """Uploads to one bucket; from many threads at once at most `in_flight` parts are on their way."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._room = threading.BoundedSemaphore(settings.in_flight)
        self._checksums = True

    def put(self, name: str, body: Body) -> None:
        """Publish an object, in one request or in parts. If it fails, nothing is published."""
        try:
            self._put(name, body)
        except ChecksumRefused as error:
            self._without_checksums(error)
            self._put(name, body)

    def put_once(self, name: str, body: Body, condition: Mapping[str, Any]) -> None:
        """Publish an object by one conditional request, sent once."""
        put = self.prepared(name, in_parts(body, MAX_PART, name))
        self._client.carry(self.send_once(put, condition), Carrier(self._client.patience(body.nbytes)))

    async def send_once(self, put: Put, condition: Mapping[str, Any]) -> None:
        """Send a conditional request once."""
        try:
            await self._client.once("put_object", **put.summed, **condition)
        except ChecksumRefused as error:
            self._without_checksums(error)
            await self._client.once("put_object", **put.plain, **condition)

    def prepared(self, name: str, parts: Iterable[list[memoryview]]) -> Put:
        """The request for these bytes; all of them are read now."""
        payload = Payload([buffer for part in parts for buffer in part])
        plain = {"Key": name, "Body": payload, "ContentLength": len(payload), "nbytes": len(payload)}
        return Put(plain, _summed(plain) if self._checksums else plain)

    def _without_checksums(self, error: ChecksumRefused) -> None:
        if self._checksums:
            self._client.notice(f"the server takes no checksums ({error}): only those of shardstore guard the bytes")
        self._checksums = False

    def _put(self, name: str, body: Body) -> None:
        part = self._settings.part_for(body.nbytes)
        parts = in_parts(body, part, name)
        if body.nbytes > part:
            self._in_parts(name, body.nbytes, parts)
            return
        put = self.prepared(name, parts)
        with self._room:
            self._client.carry(
                self._client.request("put_object", **put.summed), Carrier(self._client.patience(body.nbytes))
            )

    def _in_parts(self, name: str, nbytes: int, parts: Iterator[list[memoryview]]) -> None:
        checksums = self._checksums
        algorithm = {"ChecksumAlgorithm": "CRC32"} if checksums else {}
        upload = self._client.call("create_multipart_upload", Key=name, **algorithm)["UploadId"]
        sending = _Sending(self._client, self._room, {"Key": name, "UploadId": upload}, checksums=checksums)
        try:
            for number, buffers in enumerate(parts, 1):
                sending.send(number, Payload(buffers))
            self._complete(name, upload, sending.finish(), nbytes)
        except BaseException:
            sending.end()
            with contextlib.suppress(StoreError):
                self._client.call("abort_multipart_upload", Key=name, UploadId=upload)
            raise

    def _complete(self, name: str, upload: str, parts: list[dict[str, Any]], nbytes: int) -> None:
        try:
            self._client.call("complete_multipart_upload", Key=name, UploadId=upload, MultipartUpload={"Parts": parts})
        except StoreError as error:
            unclear = isinstance(error, StoreUnavailable) or getattr(error, "code", "") == "NoSuchUpload"
            if not (unclear and self._has(name, nbytes)):
                raise

    def _has(self, name: str, nbytes: int) -> bool:
        """Whether the object is there. What is large is never written twice under one name, so that its size tells."""
        try:
            return bool(self._client.call("head_object", Key=name)["ContentLength"] == nbytes)
        except StoreError:
            return False


class _Sending:
    """The parts of one upload, on their way, each on a thread of its own."""

    def __init__(
        self, client: Client, room: threading.BoundedSemaphore, upload: Mapping[str, str], *, checksums: bool
    ) -> None:
        self._client, self._room, self._upload, self._checksums = client, room, upload, checksums
        self._parts: list[_Part] = []

    def send(self, number: int, payload: Payload) -> None:
        """Begin to send a part, as soon as there is room for it. Raises what went wrong with earlier ones."""
        self._room.acquire()
        try:
            part = _Part(self._client, {**self._upload, "PartNumber": number}, payload, checksums=self._checksums)
            part.begin(self._room.release)
        except BaseException:
            self._room.release()
            raise
        self._parts.append(part)
        for earlier in self._parts:
            if earlier.sent.done():
                earlier.sent.result()

    def finish(self) -> list[dict[str, Any]]:
        """Wait for all parts; returns what tells them to the server."""
        return [part.sent.result() for part in self._parts]

    def end(self) -> None:
        """Break off what is on its way, and wait until nobody reads the memory of the parts any more."""
        for part in self._parts:
            part.carrier.stop()
        wait(part.sent for part in self._parts)


class _Part:
    """One part. `sent` holds what tells it to the server."""

    def __init__(self, client: Client, name: dict[str, Any], payload: Payload, *, checksums: bool) -> None:
        self._client, self._name, self._payload, self._checksums = client, name, payload, checksums
        self.carrier = Carrier(client.patience(len(payload)))
        self.sent: Future[dict[str, Any]] = Future()

    def begin(self, ended: Callable[[], None]) -> None:
        """Send it on a thread. A plain one: a pool takes no work after the main thread's end, when saves may go on."""
        threading.Thread(target=self._run, args=(ended,), name="shardstore-part").start()

    def _run(self, ended: Callable[[], None]) -> None:
        try:
            answer = self._send()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            ended()
            self.sent.set_exception(error)
        else:
            ended()
            self.sent.set_result(answer)
        finally:
            self._payload = Payload([])  # its buffers are not needed any more, and may be many

    def _send(self) -> dict[str, Any]:
        size = len(self._payload)
        arguments = {**self._name, "Body": self._payload, "ContentLength": size}
        if self._checksums:
            arguments = _summed(arguments)
        answer = self._client.carry(self._client.request("upload_part", nbytes=size, **arguments), self.carrier)
        shown = {"PartNumber": arguments["PartNumber"], "ETag": answer["ETag"]}
        if answer.get("ChecksumCRC32"):
            shown["ChecksumCRC32"] = arguments["ChecksumCRC32"]
        return shown


def _summed(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "ChecksumCRC32": _crc32(arguments["Body"])}


def in_parts(body: Body, part: int, name: str) -> Iterator[list[memoryview]]:
    """The buffers of a body, in parts of exactly `part` bytes but for the last."""
    held: list[memoryview] = []
    size = total = 0
    for buffer in body:
        total += len(buffer)
        while len(buffer):
            taken = buffer[: part - size]
            held.append(taken)
            size += len(taken)
            buffer = buffer[len(taken) :]  # noqa: PLW2901 - what is left of it
            if size == part:
                yield held
                held, size = [], 0
    if total != body.nbytes:
        raise InvalidArgument(f"the body for {name!r} says {body.nbytes} bytes, but gives {total}")
    if held or not total:
        yield held
