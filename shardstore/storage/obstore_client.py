"""Single requests through obstore: its stores, and errors of ours for what they raise.

Obstore's own retries are used for the parts of an upload alone: it would repeat a conditional put, too, whose lost
answer only a look at the place explains.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from errno import EACCES, ENOENT, ETIMEDOUT
from typing import Any, NamedTuple, TypeVar

from shardstore.errors import (
    CheckpointExists,
    InvalidArgument,
    KeyMissing,
    ShardstoreError,
    StoreError,
    StoreUnavailable,
)
from shardstore.storage.obstore_options import Target, Unfit
from shardstore.storage.s3_client import EXPIRED, PASSING, REMEDIES, SLOWEST, NotImplementedThere

T = TypeVar("T")

_WHOLE_SECONDS = 3600.0  # most for one read; each wait in it has a limit of its own
_LONGEST_RETRIES = 300.0  # the signature of a request that is repeated gets no younger
_MOST_SHARED = 16
_OLDEST = (0, 12, 1)
_GET_IT = "pip install 'shardstore[obstore]'"
_TAKEN = {
    "PreconditionFailed",
    "ConditionNotMet",
    "BlobAlreadyExists",
    "TargetConditionNotMet",
    "UpdateConditionNotMet",
}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_CLOUD_REMEDIES = {
    **REMEDIES,
    "ContainerNotFound": "the container does not exist: make it, or correct its name; shardstore never makes one",
    "AuthenticationFailed": "the credentials are refused: check account_key, sas_token, and the clock of this machine",
    "AuthorizationFailure": "access is denied: check the network rules of the storage account, and its keys",
    "AuthorizationPermissionMismatch": "access is denied: the role Storage Blob Data Contributor is needed",
}


class Stores(NamedTuple):
    """Obstore's stores for one place, which differ in patience. `parts` makes a failed request again, the others don't.

    `name` is where they lead.
    """

    reads: Any
    writes: Any
    parts: Any


_shared: dict[tuple[object, ...], Stores] = {}
_sharing = threading.Lock()
_process: list[int] = []


def stores_for(target: Target, *, part_bytes: int, attempts: int, timeout_s: float) -> Stores:
    """The stores for a place. To make one takes 0.03 s, so that equal ones, and their connections, are shared.

    Raises Unfit where obstore is not installed, InvalidArgument for settings that it does not take.
    """
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "AZURE_", "GOOGLE_")))
    )
    name = (os.getpid(), environment, repr(target), part_bytes, attempts, timeout_s)
    with _sharing:
        if name not in _shared:
            made = _made(target, part_bytes, attempts, timeout_s)
            while len(_shared) >= _MOST_SHARED:
                del _shared[next(iter(_shared))]
            _shared[name] = made
        return _shared[name]


def _made(target: Target, part_bytes: int, attempts: int, timeout_s: float) -> Stores:
    _require()
    from obstore import store as kinds
    from obstore.exceptions import BaseError

    make = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[target.kind]
    provider = {} if target.profile is None else {"credential_provider": _Botocore(target.profile)}
    never = {"max_retries": 0}
    again = {
        "max_retries": attempts - 1,
        "retry_timeout": timedelta(seconds=min(timeout_s, _LONGEST_RETRIES)),
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=20)},
    }
    connect = timedelta(seconds=target.connect_s)
    client = {**target.client, "connect_timeout": connect}
    reading = {**client, "read_timeout": timedelta(seconds=target.read_s), "timeout": timedelta(seconds=_WHOLE_SECONDS)}
    patience = target.connect_s + target.read_s + part_bytes / SLOWEST
    writing = {**client, "timeout": timedelta(seconds=patience)}
    config: Any = {**_region(target), **target.config}
    try:
        return Stores(*(
            make(target.bucket, config=config, client_options=options, retry_config=retries, **provider)
            for options, retries in ((reading, never), (writing, never), (writing, again))
        ))  # fmt: skip
    except (BaseError, ValueError, TypeError) as error:
        raise InvalidArgument(f"obstore does not take these storage_options: {_brief(str(error))}") from error


def _require() -> None:
    """Older releases leave the parts of a failed upload there (0.11), or forget generations (0.12.0)."""
    try:
        import obstore
    except ImportError as error:
        raise Unfit(f"obstore is not installed: {_GET_IT}") from error
    found = obstore.__version__
    if tuple(int(digits) for digits in re.findall(r"\d+", found)[:3]) < _OLDEST:
        raise Unfit(f"obstore {found} is too old: {_GET_IT}")


def _region(target: Target) -> dict[str, str]:
    """The region where s3fs finds it, which is also in files, where obstore does not look."""
    if target.kind != "s3" or "region" in target.config:
        return {}
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        found = Session(profile=target.profile or None).get_config_variable("region")
    except BotoCoreError as error:
        raise InvalidArgument(f"the region can't be found out: {error}") from error
    return {"region": found} if found else {}


class _Botocore:
    """Credentials as s3fs finds them: the environment, files, profiles, roles. Obstore asks when they have expired."""

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._found: Any = None

    def __call__(self) -> Mapping[str, Any]:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        with self._lock:
            try:
                if self._found is None:
                    self._found = Session(profile=self._profile or None).get_credentials()
                if self._found is None:
                    raise StoreError("there are no credentials", errno=EACCES)
                keys = self._found.get_frozen_credentials()
            except BotoCoreError as error:
                raise StoreError(f"there are no credentials: {error}", errno=EACCES) from error
        renewed = hasattr(self._found, "refresh_needed")
        expires = datetime.now(UTC) + timedelta(minutes=5) if renewed else None  # it renews its own in time
        return {
            "access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token,
            "expires_at": expires,
        }  # fmt: skip


def request(doing: str, where: str, make: Callable[[], T]) -> T:
    """Make one request, once. Raises errors of ours."""
    from obstore.exceptions import BaseError

    _refuse_fork(where)
    try:
        return make()
    except ShardstoreError:
        raise
    except (BaseError, OSError, NotImplementedError, TypeError, ValueError) as error:
        raise translated(error, f"{doing} {where!r} failed: ", where) from error


def _refuse_fork(where: str) -> None:
    """The threads of obstore are not there in a forked child, where each call would wait for ever."""
    if not _process:
        _process.append(os.getpid())
    if _process[0] != os.getpid():
        raise StoreError(
            f"{where!r}: obstore can't be used in a process that was forked from one that has used it: "
            "start it by 'spawn' or 'forkserver', or say engine='fsspec'",
            filename=where,
        )


_ADDRESS = re.compile(r"https?://[^\s\"',]+")  # names in it are the user's, and may hold any word
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")


def translated(error: Exception, text: str, where: str) -> Exception:  # noqa: PLR0911 - a table of cases
    """One of our errors for what obstore raised. It says most in its text."""
    said = _ADDRESS.sub("<address>", str(error)).replace(where.partition("://")[2].partition("/")[2] or "\0", "<name>")
    status = int(found[1]) if (found := _STATUS.search(said)) else 0
    code = found[1] if (found := _CODE.search(said)) else ""
    if not status or ("token request" in said and status < 500):  # noqa: PLR2004 - HTTP
        return _unanswered(error, said, text, where)
    if status == 412 or code in _TAKEN:  # noqa: PLR2004 - HTTP
        return CheckpointExists(f"{where!r} is not what was expected there: somebody else has written it")
    if status == 404 and code not in _NO_BUCKET:  # noqa: PLR2004 - HTTP
        return KeyMissing(f"{where!r} does not exist", errno=ENOENT, filename=where)
    message = _brief(found[1] if (found := _MESSAGE.search(said)) else said)
    if status == 501 or code == "NotImplemented":  # noqa: PLR2004 - HTTP
        return NotImplementedThere(f"{text}{message}", filename=where)
    if status >= 500 or status in {408, 409, 429} or code in PASSING:  # noqa: PLR2004 - HTTP
        return StoreUnavailable(f"{text}{status} {code} {message}", filename=where)
    if status == 416:  # noqa: PLR2004 - HTTP
        return StoreError(f"{text}it has no such range: it is cut short", filename=where)
    denied = EACCES if status in {401, 403} else None
    return StoreError(f"{text}{_remedy(code, status, message)}", errno=denied, filename=where, code=code)


def _remedy(code: str, status: int, message: str) -> str:
    if code in EXPIRED:
        return "the credentials have expired: renew them"
    if code in _CLOUD_REMEDIES or str(status) in _CLOUD_REMEDIES:
        return _CLOUD_REMEDIES.get(code) or _CLOUD_REMEDIES[str(status)]
    return f"{status} {code} {message}"


def _unanswered(error: Exception, said: str, text: str, where: str) -> Exception:  # noqa: PLR0911 - a table
    """The error for a request that got no answer, or was never sent."""
    low = said.lower()
    why = "no answer came in time" if "timedout" in low or "timed out" in low else _brief(said)
    if isinstance(error, FileNotFoundError):
        return KeyMissing(f"{where!r} does not exist", errno=ENOENT, filename=where)
    if "received redirect" in low:
        return StoreError(f"{text}{REMEDIES['PermanentRedirect']}", filename=where)
    if "credential" in low or "token request" in low or "tokenrequest" in low:
        return StoreError(
            f"{text}there are no credentials, or they can't be had: set them in the environment or in storage_options "
            f"({why})",
            errno=EACCES, filename=where,
        )  # fmt: skip
    if "certificate" in low:
        return StoreError(f"{text}the certificate of the server is not trusted", filename=where)
    if isinstance(error, TypeError | ValueError) or type(error).__name__ == "InvalidPathError":
        return InvalidArgument(f"{text}{why}")
    if "range" in low and "object was only" in low:
        return StoreError(f"{text}it has no such range: it is cut short", filename=where)
    # Whatever else it is, the server may have done what it was asked for.
    return StoreUnavailable(f"{text}{why}", errno=ETIMEDOUT, filename=where)


def _brief(said: str) -> str:
    """What an error of obstore says in its first paragraph."""
    return " ".join(said.partition("Debug source:")[0].split())[:300]
