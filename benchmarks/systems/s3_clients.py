"""Plain S3 clients, with safetensors shards as large as shardstore's: what moving the bytes costs, and nothing else.

The shards are made before a save begins. What a load fetched becomes tensors without a copy.
The checksums and the signing of bodies that clients add on their own are turned off where they can be.
"""

from __future__ import annotations

import functools
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from safetensors.torch import save

from benchmarks.bucket import KEY, REGION, SECRET, Remote
from benchmarks.states import Case, leaves
from benchmarks.systems.base import System

T = TypeVar("T")

SHARDS = 16
MIB = 1 << 20
_NO_EXTRAS = {
    "max_pool_connections": 64,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
}


_making = threading.Lock()


def _once(make: Callable[..., T]) -> Callable[..., T]:
    """Like functools.cache; many threads that ask at once get the same."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def locked(*words: str) -> T:
        with _making:
            return cached(*words)

    return locked


class Client(System):
    """A client that puts and gets whole objects, `at_once` of them together."""

    kind = "plain"
    files = "s3-shards"
    lacks = "hash, serialising, atomic commit"
    needs: ClassVar[str] = ""  # the library
    at_once: ClassVar[int] = SHARDS

    def missing(self) -> str | None:
        if self.needs and find_spec(self.needs) is None:
            return f"needs the package {self.needs}: pip install 'shardstore[bench]'"
        return None

    def put(self, at: Remote, key: str, data: bytes) -> None:
        """Put one object."""
        raise NotImplementedError

    def get(self, at: Remote, key: str) -> Any:
        """Get one object, as a buffer."""
        raise NotImplementedError

    def save(self, case: Case, folder: Remote, *, durable: bool) -> None:  # noqa: ARG002 - a server's answer is all
        shards = prepared(case)
        self._each(lambda name: self.put(folder, name, shards[name]), shards)

    def load_into(self, case: Case, folder: Remote) -> None:
        targets = dict(leaves(case.target))

        def fill(name: str) -> None:
            for tensor, loaded in tensors(self.get(folder, name)):
                targets[tensor].copy_(loaded)

        self._each(fill, names(case))

    def load_fresh(self, case: Case, folder: Remote) -> Any:
        found = self._each(lambda name: dict(tensors(self.get(folder, name))), names(case))
        return {name: tensor for shard in found for name, tensor in shard.items()}

    def _each(self, work: Callable[[str], Any], keys: Any) -> list[Any]:
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(work, keys))


def names(case: Case) -> list[str]:
    """The keys of the shards."""
    return [f"{at:02d}.safetensors" for at in range(min(SHARDS, case.tensors))]


def prepared(case: Case) -> dict[str, bytes]:
    """The state as safetensors files of about equal size, made once."""
    if "s3-shards" not in case.cache:
        parts: list[dict[str, torch.Tensor]] = [{} for _ in names(case)]
        sizes = [0] * len(parts)
        for name, tensor in sorted(leaves(case.state), key=lambda leaf: -leaf[1].nbytes):
            least = sizes.index(min(sizes))
            parts[least][name] = tensor
            sizes[least] += tensor.nbytes
        case.cache["s3-shards"] = dict(zip(names(case), map(save, parts), strict=True))
    return case.cache["s3-shards"]


def tensors(data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, as views of its bytes. All of the states are float32."""
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "little")
    for name, about in json.loads(bytes(view[8:start])).items():
        if name != "__metadata__":
            shape = about["shape"]
            at = start + about["data_offsets"][0]
            flat = torch.frombuffer(view, dtype=torch.float32, count=math.prod(shape), offset=at)
            yield name, flat.reshape(shape)


class S3fs(Client):
    """pipe_file and cat_file of many files at once. More connections than the ten of botocore."""

    name = "s3fs"
    calls: ClassVar = {"s3-save": "pipe_file", "s3-load-into": "cat_file, copy_", "s3-load-fresh": "cat_file"}

    def put(self, at: Remote, key: str, data: bytes) -> None:
        _s3fs(at.endpoint).pipe_file(f"{at.bucket}/{at.prefix}/{key}", data)

    def get(self, at: Remote, key: str) -> Any:
        return _s3fs(at.endpoint).cat_file(f"{at.bucket}/{at.prefix}/{key}")


@_once
def _s3fs(endpoint: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(**Remote(endpoint, "").options, config_kwargs=_NO_EXTRAS, skip_instance_cache=True)


class Boto3Managed(Client):
    """Its managed transfers: parts of one object in parallel on threads; two objects at once keep them busy."""

    name = "boto3"
    needs = "boto3"
    at_once = 2
    calls: ClassVar = {
        "s3-save": "upload_fileobj, TransferConfig",
        "s3-load-into": "download_fileobj, TransferConfig, copy_",
        "s3-load-fresh": "download_fileobj, TransferConfig",
    }

    def put(self, at: Remote, key: str, data: bytes) -> None:
        _boto3(at.endpoint).upload_fileobj(io.BytesIO(data), at.bucket, f"{at.prefix}/{key}", Config=_transfer())

    def get(self, at: Remote, key: str) -> Any:
        file = io.BytesIO()
        _boto3(at.endpoint).download_fileobj(at.bucket, f"{at.prefix}/{key}", file, Config=_transfer())
        return file.getbuffer()


class Boto3(Client):
    """Single requests on threads, bodies read straight into memory."""

    name = "boto3-requests"
    needs = "boto3"
    calls: ClassVar = {
        "s3-save": "put_object",
        "s3-load-into": "get_object, readinto, copy_",
        "s3-load-fresh": "get_object, readinto",
    }

    def put(self, at: Remote, key: str, data: bytes) -> None:
        _boto3(at.endpoint).put_object(Bucket=at.bucket, Key=f"{at.prefix}/{key}", Body=data)

    def get(self, at: Remote, key: str) -> Any:
        answer = _boto3(at.endpoint).get_object(Bucket=at.bucket, Key=f"{at.prefix}/{key}")
        buffer = memoryview(np.empty(answer["ContentLength"], np.uint8))
        with answer["Body"] as body:
            done = 0
            while done < len(buffer):
                got = body.readinto(buffer[done:])
                if not got:
                    raise EOFError(key)
                done += got
        return buffer


@_once
def _boto3(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    session = boto3.Session(aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION)
    return session.client("s3", endpoint_url=endpoint, config=Config(**_NO_EXTRAS))


@_once
def _transfer() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(multipart_threshold=16 * MIB, multipart_chunksize=16 * MIB, max_concurrency=8)


class Obstore(Client):
    """The Rust library object_store: each object in parallel parts, several objects at once."""

    name = "obstore"
    needs = "obstore"
    calls: ClassVar = {"s3-save": "put", "s3-load-into": "get, bytes, copy_", "s3-load-fresh": "get, bytes"}

    def put(self, at: Remote, key: str, data: bytes) -> None:
        import obstore

        obstore.put(_obstore(at.endpoint, at.bucket), f"{at.prefix}/{key}", data, chunk_size=16 * MIB)

    def get(self, at: Remote, key: str) -> Any:
        import obstore

        return obstore.get(_obstore(at.endpoint, at.bucket), f"{at.prefix}/{key}").bytes()


@_once
def _obstore(endpoint: str, bucket: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        bucket, endpoint=endpoint, region=REGION, access_key_id=KEY, secret_access_key=SECRET,
        virtual_hosted_style_request=False, unsigned_payload=True, client_options={"allow_http": True},
    )  # fmt: skip


class Connector(Client):
    """The client of AWS in C below s3torchconnector: parts in parallel on threads of its own."""

    name = "s3torchconnector"
    needs = "s3torchconnector"
    calls: ClassVar = {
        "s3-save": "S3Client.put_object",
        "s3-load-into": "S3Client.get_object, read, copy_",
        "s3-load-fresh": "S3Client.get_object, read",
    }

    def put(self, at: Remote, key: str, data: bytes) -> None:
        with crt(at.endpoint).put_object(at.bucket, f"{at.prefix}/{key}") as writer:
            writer.write(data)

    def get(self, at: Remote, key: str) -> Any:
        return crt(at.endpoint).get_object(at.bucket, f"{at.prefix}/{key}").read()


@_once
def crt(endpoint: str) -> Any:
    """A client of s3torchconnector; it finds its credentials in the environment."""
    from s3torchconnector._s3client import S3Client, S3ClientConfig

    settings = S3ClientConfig(force_path_style=True, part_size=16 * MIB)
    return S3Client(REGION, endpoint=endpoint, s3client_config=settings)


class ConnectorDcp(System):
    """torch.distributed.checkpoint through s3torchconnector. It loads only into tensors that are there."""

    name = "dcp-s3"
    files = "dcp-s3"
    lacks = "hash"
    calls: ClassVar = {
        "s3-save": "dcp.save, S3StorageWriter(thread_count=4)",
        "s3-load-into": "dcp.load, S3StorageReader",
    }

    def missing(self) -> str | None:
        return Connector().missing()

    def save(self, case: Case, folder: Remote, *, durable: bool) -> None:  # noqa: ARG002 - as above
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(REGION, str(folder), thread_count=4)
        _lead(writer, folder)
        dcp.save(case.state, storage_writer=writer, no_dist=True)

    def load_into(self, case: Case, folder: Remote) -> None:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(REGION, str(folder))
        _lead(reader, folder)
        dcp.load(case.target, storage_reader=reader, no_dist=True)


def _lead(end: Any, folder: Remote) -> None:
    """To the server: neither end takes an endpoint."""
    end.fs._client = crt(folder.endpoint)
