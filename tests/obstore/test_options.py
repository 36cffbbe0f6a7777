"""The words of s3fs, gcsfs and adlfs mean the same through obstore, or are refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardstore.errors import InvalidArgument
from shardstore.storage.obstore_options import Target, Unfit, translate

CERTIFICATE = Path(__file__).parents[1] / "kit" / "tls.pem"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine has set does not count."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)


def config(url: str, **options: Any) -> dict[str, Any]:
    """The settings of obstore's store, without those that every one has."""
    found = dict(translate(url, options).config)
    found.pop("disable_bulk_delete", None)
    return found


S3 = [
    ({}, {}),
    ({"key": "k", "secret": "s", "token": "t"}, {"access_key_id": "k", "secret_access_key": "s", "session_token": "t"}),
    ({"anon": True}, {"skip_signature": True}),
    ({"anon": False}, {}),
    ({"requester_pays": True}, {"request_payer": True}),
    ({"endpoint_url": "https://h:9/"}, {"endpoint": "https://h:9"}),
    ({"client_kwargs": {"endpoint_url": "https://h", "region_name": "r"}}, {"endpoint": "https://h", "region": "r"}),
    (
        {"endpoint_url": "https://h:9", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
        {"endpoint": "https://bucket.h:9", "virtual_hosted_style_request": True},
    ),
    ({"config_kwargs": {"s3": {"addressing_style": "path"}, "signature_version": "s3v4"}}, {}),
    ({"skip_instance_cache": True, "use_listings_cache": False, "default_block_size": 5}, {}),
]


@pytest.mark.parametrize(("options", "expected"), S3)
@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_words_of_s3fs(scheme: str, options: dict[str, Any], expected: dict[str, Any]):
    """Keys, endpoints, regions and styles of addresses; caches that are not used are no matter."""
    assert config(f"{scheme}://bucket/x", **options) == expected


def test_clients_of_s3fs():
    """Time limits, certificates, and plain HTTP where the endpoint says so."""
    found = translate("s3://bucket", {
        "endpoint_url": "http://h", "client_kwargs": {"verify": False},
        "config_kwargs": {"connect_timeout": 3, "read_timeout": 4.5, "user_agent_extra": "me/1"},
    })  # fmt: skip
    assert (found.connect_s, found.read_s) == (3.0, 4.5)
    assert found.client == {"allow_http": True, "allow_invalid_certificates": True, "user_agent": "shardstore me/1"}
    trusting = translate("s3://bucket", {"client_kwargs": {"verify": str(CERTIFICATE)}})
    assert trusting.client == {"root_certificate": CERTIFICATE.read_bytes()}


@pytest.mark.parametrize(
    ("options", "profile"),
    [({}, ""), ({"profile": "p"}, "p"), ({"key": "k", "secret": "s"}, None), ({"anon": True}, None)],
)
def test_who_looks_for_credentials(options: dict[str, Any], profile: str | None):
    """Without keys they come from where s3fs takes them: environment, files, profiles."""
    assert translate("s3://bucket", options).profile == profile


def test_the_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    """The command line works with the same environment as with s3fs."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    assert config("s3://bucket") == {"endpoint": "http://h:1"}
    assert config("s3://bucket", endpoint_url="https://given") == {"endpoint": "https://given"}


def test_words_of_gcsfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokens in each of their forms, and endpoints."""
    file = tmp_path / "key.json"
    file.write_text("{}")
    account = {"type": "service_account", "client_email": "e"}
    assert config("gs://bucket/x") == config("gcs://bucket/x", token="google_default", project="p") == {}
    assert config("gs://bucket", token="anon") == {"skip_signature": True}
    assert config("gs://bucket", token=str(file)) == {"application_credentials": str(file)}
    assert (
        config("gs://bucket", token=account)["service_account_key"]
        == '{"type": "service_account", "client_email": "e"}'
    )
    assert config("gs://bucket", endpoint_url="http://h:1/") == {"base_url": "http://h:1"}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "h:2")
    found = translate("gs://bucket", {})
    assert (found.config, found.client) == ({"base_url": "http://h:2"}, {"allow_http": True})


AZURE = [
    ("az://c/x", {"account_name": "a", "account_key": "k"}, {"account_name": "a", "account_key": "k"}),
    ("abfs://c/x", {"account_name": "a", "sas_token": "?s=1"}, {"account_name": "a", "sas_key": "s=1"}),
    (
        "abfss://c@a.dfs.core.windows.net/x", {"account_key": "k"},
        {"account_name": "a", "account_key": "k", "endpoint": "https://a.blob.core.windows.net"},
    ),
    (
        "az://c", {"account_name": "a", "tenant_id": "t", "client_id": "i", "client_secret": "s"},
        {"account_name": "a", "tenant_id": "t", "client_id": "i", "client_secret": "s"},
    ),
    ("az://c", {"account_name": "a"}, {"account_name": "a", "skip_signature": True}),
    ("az://c", {"account_name": "a", "anon": True}, {"account_name": "a", "skip_signature": True}),
    ("az://c", {"account_name": "a", "anon": False}, {"account_name": "a"}),
    (
        "az://c", {"account_name": "a", "anon": False, "account_host": "a.blob.example"},
        {"account_name": "a", "endpoint": "https://a.blob.example"},
    ),
    (
        "az://c", {"connection_string": "AccountName=a;AccountKey=k==;BlobEndpoint=http://h:1/a/"},
        {"account_name": "a", "account_key": "k==", "endpoint": "http://h:1/a"},
    ),
    (
        "az://c", {"connection_string": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k;EndpointSuffix=x.y"},
        {"account_name": "a", "account_key": "k", "endpoint": "https://a.blob.x.y"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("url", "options", "expected"), AZURE)
def test_words_of_adlfs(url: str, options: dict[str, Any], expected: dict[str, Any]):
    """Accounts by name, URL or connection string; keys, tokens, and nobody at all."""
    assert config(url, **options) == expected


def test_the_account_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    """As adlfs has it."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "k")
    assert config("az://c") == {"account_name": "a", "account_key": "k"}


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://bucket", {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}, "s3_additional_kwargs of s3fs"),
        ("s3://bucket", {"session": object()}, "session of s3fs"),
        ("s3://bucket", {"client_kwargs": {"aws_session_token": "t"}}, r"client_kwargs\.aws_session_token of s3fs"),
        ("s3://bucket", {"config_kwargs": {"proxies": {"https": "p"}}}, r"config_kwargs\.proxies of s3fs"),
        ("s3://bucket", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "use_accelerate_endpoint=True"),
        ("s3://bucket", {"key": 7}, "key=7 of s3fs"),
        ("gs://bucket", {"token": "browser"}, "token of gcsfs"),
        ("gs://bucket", {"token": {"type": "authorized_user"}}, "token of gcsfs"),
        ("gs://bucket", {"requester_pays": True}, "requester_pays of gcsfs"),
        ("gs://bucket", {"access": "read_only"}, "access of gcsfs"),
        ("az://c", {"account_name": "a", "credential": object()}, "credential of adlfs"),
        ("az://c", {"account_name": "a", "location_mode": "secondary"}, "location_mode of adlfs"),
        ("az://c", {"account_key": "k"}, "account_name or connection_string"),
        ("az://c", {"connection_string": "UseDevelopmentStorage=true"}, "UseDevelopmentStorage"),
        ("s3://bucket/a//b", {}, "a part that is empty"),
        ("s3://bucket/a/../b", {}, "a part that is empty"),
    ],
)
def test_what_has_no_counterpart_is_named(url: str, options: dict[str, Any], named: str):
    """Nothing is dropped without a word."""
    with pytest.raises(Unfit, match=named):
        translate(url, options)


@pytest.mark.parametrize("url", ["s3://", "gs:///x"])
def test_no_bucket(url: str):
    """A URL without a bucket is an error of the call, with any engine."""
    with pytest.raises(InvalidArgument, match="names no bucket") as caught:
        translate(url, {})
    assert not isinstance(caught.value, Unfit)


@pytest.mark.parametrize("limit", [0, -1, "5", True, 1e9])
def test_time_limits_that_can_not_be(limit: object):
    """Named, with their bounds."""
    with pytest.raises(InvalidArgument, match=r"config_kwargs\.read_timeout must be"):
        translate("s3://bucket", {"config_kwargs": {"read_timeout": limit}})


def test_secrets_are_not_shown():
    """What is refused is named; its value may be a secret."""
    with pytest.raises(Unfit) as caught:
        translate("gs://bucket", {"token": "very-secret"})
    assert "very-secret" not in str(caught.value)


def test_services_are_told_apart():
    """What a probe has found out holds for one endpoint, and one account."""
    named: list[Target] = [
        translate("s3://bucket", {}), translate("s3://bucket", {"endpoint_url": "http://h"}),
        translate("gs://bucket", {}),
        translate("az://bucket", {"account_name": "a"}), translate("az://bucket", {"account_name": "b"}),
    ]  # fmt: skip
    assert len({each.endpoint for each in named}) == len(named)
