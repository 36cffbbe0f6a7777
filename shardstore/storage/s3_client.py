"""Single requests to an S3 service through s3fs: time-outs, retries with jitter, and errors of ours.

s3fs brings credentials, endpoints and its event loop; its own caches, retries and file objects are not used, since they
serve stale listings, publish cut objects, and give up too early (`docs/object-stores.md`). Bodies go past its loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from http.client import HTTPException
from inspect import signature
from typing import Any, TypeVar

import stamina

from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, StoreError, StoreUnavailable
from shardstore.events import Listener, Noticed, Retried
from shardstore.storage.carrying import Carrier
from shardstore.storage.late import outlive_main

T = TypeVar("T")

CONNECT_SECONDS = 10
READ_SECONDS = 60
SLOWEST = 256 * 1024  # bytes a second: a request that is slower is given up
_MAX_ATTEMPTS = 64
_MAX_SECONDS = 86_400.0

PASSING = {
    "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "OperationAborted", "ConditionalRequestConflict", "BadDigest", "XAmzContentSHA256Mismatch",
    "IncompleteBody", "500", "502", "503", "504", "429",
}  # fmt: skip
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
REMEDIES = {
    "NoSuchBucket": "the bucket does not exist: make it, or correct its name; shardstore never makes one",
    "AccessDenied": "access is denied: check the policy of these credentials for this bucket and prefix",
    "403": "access is denied: check the policy of these credentials for this bucket and prefix",
    "InvalidAccessKeyId": "the access key is unknown: check the credentials and the endpoint",
    "SignatureDoesNotMatch": "the signature does not match: check the secret key and the clock of this machine",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
    "PermanentRedirect": "the bucket lies in another region: set client_kwargs={'region_name': ...}",
    "301": "the bucket lies in another region: set client_kwargs={'region_name': ...}",
    "AuthorizationHeaderMalformed": "the region is wrong: set client_kwargs={'region_name': ...}",
}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_CHECKSUM_REFUSED = {"NotImplemented", "InvalidRequest", "InvalidArgument", "MalformedTrailerError", "400", "501"}


class ChecksumRefused(Exception):
    """A signal within this package: the server does not take the checksum header."""


class NotImplementedThere(StoreError):
    """The server says that it does not know this kind of request."""


class Client:
    """Requests to one bucket. `call` is for any thread but the event loop's own; `request` is its coroutine.

    `attempts`, `timeout_s`: how often, and for how many seconds, a request that failed in a way that may pass is made.
    A single request may take `connect_timeout` and `read_timeout` of `config_kwargs`, and longer for many bytes.
    """

    def __init__(
        self, options: Mapping[str, Any], bucket: str, *, attempts: int, timeout_s: float, listener: Listener
    ) -> None:
        if type(attempts) is not int or not 1 <= attempts <= _MAX_ATTEMPTS:
            raise InvalidArgument(f"attempts must be a whole number from 1 to {_MAX_ATTEMPTS}, not {attempts!r}")
        _check_seconds("timeout_s", timeout_s)
        self.bucket = bucket
        self.listener = listener
        self._attempts, self._timeout_s = attempts, timeout_s
        config = _config(options)
        for name in ("connect_timeout", "read_timeout"):
            _check_seconds(name, config[name])
        self._patience = config["connect_timeout"] + config["read_timeout"]
        self.fs = _file_system(options, config)

    def patience(self, nbytes: int) -> float:
        """How many seconds one request that moves so many bytes may take."""
        return float(self._patience + nbytes / SLOWEST)

    def start(self, work: Awaitable[T]) -> Future[T]:
        """Run a coroutine on the event loop's thread."""
        return asyncio.run_coroutine_threadsafe(_as_coroutine(work), self.fs.loop)

    def carry(self, work: Awaitable[T], carrier: Carrier) -> T:
        """Run a coroutine and wait for its end; this thread moves the bytes of its requests meanwhile."""
        return carrier.wait(self.start, work)

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine and wait for its end; an interrupt of this thread ends it, too."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        """Make one request, with retries, and wait for its answer."""
        return self.wait(self.request(method, **arguments))

    async def request(self, method: str, **arguments: Any) -> Any:
        """Make one request, with retries."""
        return await self.again(method, str(arguments.get("Key", "")), lambda: self.once(method, **arguments))

    async def once(self, method: str, *, nbytes: int = 0, **arguments: Any) -> Any:
        """Make one request, once; credentials that have expired are read anew. Raises errors of ours."""
        client = None
        for last in (False, True):
            try:
                client = await self._session(stale=client)
                made = getattr(client, method)(Bucket=self.bucket, **arguments)
                return await asyncio.wait_for(made, self.patience(nbytes))
            except Exception as error:
                if last or not _says_expired(error, method):
                    raise translated(error, method, self.where(arguments.get("Key")), arguments) from error
        raise StoreError("unreachable")  # pragma: no cover  the loop returns or raises

    async def _session(self, stale: Any = None) -> Any:
        """The client of s3fs; a new one, with credentials read anew, if it still is the stale one."""
        client = await self.fs.set_session()
        if client is stale:
            async with self.fs.shardstore_renewing:
                client = await self.fs.set_session()
                if client is stale:  # else somebody else has renewed them meanwhile
                    client = await self.fs.set_session(refresh=True)
        return client

    async def again(self, what: str, key: str, make: Callable[[], Awaitable[T]]) -> T:
        """Do something until it succeeds, fails for good, or the attempts are used up; with growing, jittered waits."""
        tries = stamina.retry_context(
            on=StoreUnavailable, attempts=self._attempts, timeout=self._timeout_s,
            wait_initial=0.2, wait_max=20.0, wait_jitter=1.0,
        )  # fmt: skip
        async for attempt in tries:
            with attempt:
                try:
                    return await make()
                except StoreUnavailable as error:
                    if attempt.num < self._attempts:
                        self.listener(Retried(what, key, attempt.num + 1, attempt.next_wait, str(error)))
                    raise
        raise StoreError("unreachable")  # pragma: no cover  the loop returns or raises

    def where(self, key: Any) -> str:
        """A key, for messages."""
        return f"s3://{self.bucket}/{key or ''}"

    def notice(self, what: str) -> None:
        """Tell people something."""
        self.listener(Noticed(what, self.where("")))


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_SECONDS:
        raise InvalidArgument(f"{name} must be from 0 to {_MAX_SECONDS:.0f} seconds, not {value!r}")


def _config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for botocore: no retries below ours, no checksum but ours."""
    from aiobotocore.config import AioConfig

    given = dict(options.get("config_kwargs") or {})
    if "http_session_cls" in signature(AioConfig).parameters:  # not in old ones: their event loop moves the bodies
        from shardstore.storage.s3_session import Session

        given = {"http_session_cls": Session, **given}
    return {
        "max_pool_connections": 64,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "read_timeout": READ_SECONDS,
        "connect_timeout": CONNECT_SECONDS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **given,
        "s3": {"payload_signing_enabled": False, **given.get("s3", {})},
    }


_shared: dict[tuple[object, ...], tuple[Any, Any]] = {}
_sharing = threading.Lock()
_MOST_SHARED = 16


def _file_system(options: Mapping[str, Any], config: dict[str, Any]) -> Any:
    """An s3fs that only shardstore uses: its caches of instances and listings are off.

    To make one takes 0.2 s of the processor, so that those with equal options, in one process and environment, share
    it, and its connections. It is given up by s3fs itself, when nobody has it any more or Python ends.
    """
    import s3fs

    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    name = (os.getpid(), environment, repr(sorted(options.items())))
    with _sharing:
        if name not in _shared:
            given = {**options, "skip_instance_cache": True, "use_listings_cache": False, "config_kwargs": config}
            try:
                made = s3fs.S3FileSystem(**given)
            except TypeError as error:
                raise InvalidArgument(f"storage_options do not fit s3fs: {error}") from error
            made.shardstore_renewing = asyncio.Lock()
            outlive_main(made.loop)
            while len(_shared) >= _MOST_SHARED:
                del _shared[next(iter(_shared))]
            _shared[name] = made, options  # objects among the options must live on, else their names are used again
        return _shared[name][0]


def _says_expired(error: Exception, method: str) -> bool:
    """Whether new credentials may help. The answer to a HEAD has no body that would tell."""
    code = code_of(error)
    return code in EXPIRED or (code == "400" and method.startswith("head"))


def code_of(error: BaseException) -> str:
    """The error code of an S3 answer, or its HTTP status; "" for anything else."""
    response = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    return code or str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))


def status_of(error: BaseException) -> int:
    """The HTTP status of an S3 answer, 0 for anything else."""
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)


def translated(  # noqa: PLR0911 - a table of cases
    error: Exception, method: str, where: str, arguments: Mapping[str, Any]
) -> Exception:
    """One of our errors, or ChecksumRefused, for what a request raised."""
    if isinstance(error, StoreError):
        return error
    code, status = code_of(error), status_of(error)
    text = f"{method} {where!r} failed: "
    if not code:
        return _unanswered(error, text, where)
    if code in {"PreconditionFailed", "412"} or status == 412:  # noqa: PLR2004 - HTTP
        return CheckpointExists(f"{where!r} is not what was expected there: somebody else has written it")
    if code in _MISSING:
        return KeyMissing(f"{where!r} does not exist", errno=errno.ENOENT, filename=where)
    if code in _CHECKSUM_REFUSED and any(name.startswith("Checksum") for name in arguments):
        return ChecksumRefused(f"{code} {_message(error)}")
    if status == 501 or code in {"NotImplemented", "501"}:  # noqa: PLR2004 - HTTP
        return NotImplementedThere(f"{text}{code} {_message(error)}", filename=where)
    if code in PASSING or status >= 500:  # noqa: PLR2004 - HTTP
        return StoreUnavailable(f"{text}{code} {_message(error)}", filename=where)
    denied = errno.EACCES if status == 403 else None  # noqa: PLR2004 - HTTP
    return StoreError(f"{text}{_remedy(code, method, error)}", errno=denied, filename=where, code=code)


def _remedy(code: str, method: str, error: Exception) -> str:
    """What to do about an error that does not pass."""
    if code in EXPIRED:
        return "the credentials have expired: renew them"
    if code in {"403", "AccessDenied"} and method in {"head_object", "get_object"}:
        return "access is denied, or it does not exist: S3 tells which only with the right s3:ListBucket"
    if code in REMEDIES:
        return REMEDIES[code]
    return f"{code} {_message(error)}"


def _message(error: BaseException) -> str:
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Message", ""))[:200]


def _unanswered(error: Exception, text: str, where: str) -> Exception:
    """The error for a request that got no answer, or was never sent."""
    from aiohttp import ClientError
    from botocore.exceptions import (
        BotoCoreError,
        ConnectionError,  # noqa: A004 - not the builtin, which it does not derive from
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from botocore.parsers import ResponseParserError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return StoreError(
            f"{text}there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage_options",
            errno=errno.EACCES,
            filename=where,
        )
    if _redirected(error):
        return StoreError(f"{text}{REMEDIES['PermanentRedirect']}", filename=where)
    why = "no answer came in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    passing = (OSError, EOFError, HTTPException, ClientError, ConnectionError, HTTPClientError, ResponseParserError)
    if isinstance(error, passing):
        return StoreUnavailable(f"{text}{why}", errno=errno.ETIMEDOUT, filename=where)
    if isinstance(error, (TypeError, ValueError)):
        return InvalidArgument(f"{text}{why}")
    if isinstance(error, BotoCoreError):  # parameters, profiles, regions, ways to get credentials
        return StoreError(f"{text}{why}", filename=where)
    return StoreError(f"{text}{type(error).__name__}: {why}", filename=where)


def _redirected(error: Exception) -> bool:
    """Whether aiohttp did not follow a redirect (301, 307), since the body of the request was sent already."""
    cause = error.__cause__ or error.__context__
    return cause is not None and "redirect" in str(cause)
