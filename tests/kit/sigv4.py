"""Signatures of S3 requests (AWS Signature Version 4), for requests that were changed on their way.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
from urllib.parse import parse_qsl, quote

_AUTHORIZATION = re.compile(r"AWS4-HMAC-SHA256 Credential=([^,]+), ?SignedHeaders=([^,]+), ?Signature=(\w+)")


def sign(
    method: str, target: str, headers: list[tuple[str, str]], secret: str, access_key: str = ""
) -> list[tuple[str, str]]:
    """The headers with another signature; of the headers that were signed, those are that are still there.

    `access_key`: of somebody else than signed it before.
    """
    found = {name.lower(): value for name, value in headers}
    match = _AUTHORIZATION.fullmatch(found["authorization"])
    assert match, found["authorization"]
    old, _, scope = match[1].partition("/")
    credential = f"{access_key or old}/{scope}"
    names = [name for name in match[2].split(";") if name in found]
    signature = _signature(method, target, found, names, scope, secret)
    text = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return [(name, text if name.lower() == "authorization" else value) for name, value in headers]


def _signature(method: str, target: str, headers: dict[str, str], names: list[str], scope: str, secret: str) -> str:
    path, _, query = target.partition("?")
    members = sorted(
        (quote(key, safe="-_.~"), quote(value, safe="-_.~")) for key, value in parse_qsl(query, keep_blank_values=True)
    )
    request = "\n".join(
        [
            method,
            path,
            "&".join(f"{key}={value}" for key, value in members),
            *(f"{name}:{' '.join(headers[name].split())}" for name in names),
            "",
            ";".join(names),
            headers["x-amz-content-sha256"],
        ]
    )
    day, region, service, ending = scope.split("/")
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, ending):
        key = hmac.digest(key, part.encode(), hashlib.sha256)
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashlib.sha256(request.encode()).hexdigest()])
    return hmac.digest(key, text.encode(), hashlib.sha256).hex()
