"""The options of s3fs, gcsfs and adlfs in the words of obstore.

Sources: the documentation of s3fs, gcsfs and adlfs, and of `obstore.store`. What has no counterpart is refused by name,
never dropped: nobody's encryption, proxy or identity is left out without a word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from shardstore.errors import InvalidArgument, brief
from shardstore.storage.s3_client import CONNECT_SECONDS, READ_SECONDS

Kind = Literal["s3", "gs", "az"]
KINDS: dict[str, Kind] = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
_FILES_OF = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
# Caches, and file objects, which no engine uses here.
_IDLE = {
    "skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "default_block_size",
    "default_fill_cache", "default_cache_type", "cache_regions", "block_size", "blocksize", "cache_timeout",
    "check_connection", "assume_container_exists", "default_location", "consistency",
}  # fmt: skip
_MAX_SECONDS = 86_400.0


class Unfit(InvalidArgument):
    """Obstore can't be used: it is not installed, or an option has no counterpart in it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where obstore is to go. `prefix`: what every name begins with. `config`: of its store; `client`: of its requests.

    `profile`: whose credentials botocore is to look for, "" for the usual ones, None where they are not looked for.
    """

    kind: Kind
    bucket: str
    prefix: str
    config: dict[str, Any]
    client: dict[str, Any] = field(default_factory=dict)
    connect_s: float = CONNECT_SECONDS
    read_s: float = READ_SECONDS
    profile: str | None = None

    @property
    def endpoint(self) -> str:
        """Which service it is."""
        named = self.config.get("endpoint") or self.config.get("base_url") or self.config.get("account_name")
        return f"{self.kind}:{named or ''}"


def translate(url: str, options: Mapping[str, Any]) -> Target:
    """Where a URL with options of fsspec leads. Raises Unfit, which names the option that has no counterpart."""
    scheme, _, rest = url.partition("://")
    kind = KINDS[scheme.lower()]
    place, _, path = rest.partition("/")
    prefix = path.strip("/")
    if any(part in {"", ".", ".."} for part in prefix.split("/")[bool(not prefix) :]):
        raise Unfit(f"obstore can't name {url!r}: it has a part that is empty, '.' or '..'")
    prefix = f"{prefix}/" if prefix else ""
    words = _Words(options, _FILES_OF[kind])
    target = _TRANSLATORS[kind](words, place, prefix)
    words.end()
    if not target.bucket:
        raise InvalidArgument(f"{url!r} names no bucket: {scheme}://bucket/prefix")
    return target


class _Words:
    """Options that are taken one by one; what is left in the end has no counterpart."""

    def __init__(self, options: Mapping[str, Any], origin: str, parent: str = "") -> None:
        self._left = {name: value for name, value in options.items() if value is not None and name not in _IDLE}
        self._origin, self._parent = origin, parent
        self._nested: list[_Words] = []

    def take(self, name: str, *kinds: type) -> Any:
        """An option of one of these types (str where none is said), None where it is not given."""
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, kinds or (str,)):
            self.refuse(name, value)
        return value

    def take_one_of(self, name: str, *allowed: object) -> Any:
        """An option that may have only some values."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            self.refuse(name, value)
        return value

    def inner(self, name: str) -> _Words:
        """Options within an option."""
        made = _Words(self.take(name, dict) or {}, self._origin, f"{self._parent}{name}.")
        self._nested.append(made)
        return made

    def seconds(self, name: str, default: float) -> float:
        """A time limit."""
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_SECONDS:
            raise InvalidArgument(f"{self._parent}{name} must be from 0 to {_MAX_SECONDS:.0f} seconds, not {value!r}")
        return float(value)

    def refuse(self, name: str, value: object = None, hint: str = "") -> None:
        """Raise Unfit for an option. Values may be secret: only those that can't be are shown."""
        shown = f"={brief(value)}" if isinstance(value, bool | int | float) else ""
        raise Unfit(
            f"obstore has no counterpart to {self._parent}{name}{shown} of {self._origin}: "
            f"{hint or 'leave it out'}, or say engine='fsspec'"
        )

    def end(self) -> None:
        """Refuse what is left."""
        for name, value in self._left.items():
            self.refuse(name, value)
        for each in self._nested:
            each.end()


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


# -- s3fs


def _s3(words: _Words, bucket: str, prefix: str) -> Target:
    inner, config = words.inner("client_kwargs"), words.inner("config_kwargs")
    style = config.inner("s3").take_one_of("addressing_style", "auto", "path", "virtual")
    config.take_one_of("signature_version", "s3v4")
    config.take("max_pool_connections", int)
    endpoints = words.take("endpoint_url"), inner.take("endpoint_url")
    endpoint = (
        endpoints[0] or endpoints[1] or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    anon = words.take("anon", bool)
    key, secret = words.take("key"), words.take("secret")
    token, profile = words.take("token"), words.take("profile")
    agent = config.take("user_agent_extra")
    settings = _given(
        access_key_id=key, secret_access_key=secret, session_token=token, skip_signature=anon or None,
        region=inner.take("region_name"), request_payer=words.take("requester_pays", bool) or None,
    )  # fmt: skip
    if style == "virtual":
        settings["virtual_hosted_style_request"] = True
    if endpoint:
        settings["endpoint"] = _with_bucket(endpoint, bucket) if style == "virtual" else endpoint.rstrip("/")
    return Target(
        "s3", bucket, prefix, {**settings, "disable_bulk_delete": True},
        {**_http(settings.get("endpoint")), **_verify(inner), **_given(user_agent=agent and f"shardstore {agent}")},
        config.seconds("connect_timeout", CONNECT_SECONDS), config.seconds("read_timeout", READ_SECONDS),
        None if key or anon else profile or "",
    )  # fmt: skip


def _with_bucket(endpoint: str, bucket: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{bucket}.{parts.netloc}"


def _http(endpoint: str | None) -> dict[str, Any]:
    return {"allow_http": True} if endpoint and endpoint.lower().startswith("http://") else {}


def _verify(words: _Words) -> dict[str, Any]:
    """What botocore calls `verify`: a file with certificates to trust, or False to trust all."""
    verify = words.take("verify", bool, str)
    if isinstance(verify, str):
        try:
            with open(verify, "rb") as file:
                return {"root_certificate": file.read()}
        except OSError as error:
            raise InvalidArgument(f"client_kwargs.verify names {verify!r}: {error.strerror}") from error
    return {"allow_invalid_certificates": True} if verify is False else {}


# -- gcsfs


def _gs(words: _Words, bucket: str, prefix: str) -> Target:
    words.take("project")  # for making and listing buckets, which shardstore never does
    words.take_one_of("access", "full_control", "read_write")
    if words.take("requester_pays", bool):
        words.refuse("requester_pays")
    endpoint = words.take("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    settings = {**_google_credentials(words), **_given(base_url=endpoint and endpoint.rstrip("/"))}
    return Target("gs", bucket, prefix, settings, _http(endpoint))


def _google_credentials(words: _Words) -> dict[str, Any]:
    token = words.take("token", str, dict)
    if token in (None, "google_default"):
        return {}
    if token == "anon":  # noqa: S105 - a word of gcsfs
        return {"skip_signature": True}
    if isinstance(token, dict) and token.get("type") == "service_account":
        return {"service_account_key": json.dumps(token)}
    if isinstance(token, str) and os.path.isfile(token):
        return {"application_credentials": token}
    words.refuse("token", hint="give 'google_default', 'anon', a file, or a service account as a dict")
    return {}


# -- adlfs

_AZURE = {
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY", "sas_token": "AZURE_STORAGE_SAS_TOKEN",
    "tenant_id": "AZURE_STORAGE_TENANT_ID", "client_id": "AZURE_STORAGE_CLIENT_ID",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
}  # fmt: skip


def _az(words: _Words, place: str, prefix: str) -> Target:
    container, at, host = place.partition("@")
    text = words.take("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    connected = _connection(text) if text else {}
    found = {name: words.take(name) or connected.get(name) or os.environ.get(env) for name, env in _AZURE.items()}
    account = words.take("account_name") or (host.partition(".")[0] if at else None) or connected.get("account_name")
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    named = words.take("account_host") or host.replace(".dfs.", ".blob.", 1)
    endpoint = connected.get("endpoint") or (f"https://{named}" if named else None)
    words.take_one_of("location_mode", "primary")
    anonymous = _anonymous(words) and not any(found.values())
    if account is None:
        raise Unfit(f"{place!r} names no storage account: give account_name or connection_string")
    sas = found["sas_token"]
    settings = _given(
        account_name=account, account_key=found["account_key"], sas_key=sas and sas.lstrip("?"),
        tenant_id=found["tenant_id"], client_id=found["client_id"], client_secret=found["client_secret"],
        endpoint=endpoint, skip_signature=anonymous or None,
    )  # fmt: skip
    return Target("az", container, prefix, settings, _http(endpoint))


def _anonymous(words: _Words) -> bool:
    """As in adlfs: who has no credentials and does not ask for a look-up of them (anon=False) goes without."""
    anon = words.take("anon", bool)
    return bool(
        os.environ.get("AZURE_STORAGE_ANON", "true").lower() not in {"false", "0", "f"} if anon is None else anon
    )


def _connection(text: str) -> dict[str, str]:
    """The members of a connection string, in adlfs' words."""
    members = {name.strip().lower(): value for name, _, value in (each.partition("=") for each in text.split(";"))}
    if "usedevelopmentstorage" in members:
        raise Unfit(
            "obstore has no counterpart to UseDevelopmentStorage: give AccountName, AccountKey and BlobEndpoint"
        )
    names = {"accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_token",
             "blobendpoint": "endpoint"}  # fmt: skip
    found = {ours: members[theirs] for theirs, ours in names.items() if members.get(theirs)}
    if "endpoint" in found:
        found["endpoint"] = found["endpoint"].rstrip("/")
    elif "endpointsuffix" in members and "account_name" in found:
        protocol = members.get("defaultendpointsprotocol", "https")
        found["endpoint"] = f"{protocol}://{found['account_name']}.blob.{members['endpointsuffix']}"
    return found


_TRANSLATORS: dict[Kind, Callable[[_Words, str, str], Target]] = {"s3": _s3, "gs": _gs, "az": _az}
