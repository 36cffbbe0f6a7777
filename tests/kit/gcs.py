"""A small server that speaks the XML API of Google Cloud Storage, as far as obstore uses it: no emulator does.

It shows the shape of requests and what conditions do; that the service itself behaves so, its documentation says.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from time import gmtime, strftime, time
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

BUCKET = "bucket"
_PAGE = 3


@dataclass(frozen=True)
class _Object:
    data: bytes
    generation: int
    modified: float

    @property
    def tag(self) -> str:
        return f'"{md5(self.data).hexdigest()}"'


@dataclass
class Bucket:
    """One bucket. `log`: the requests that came, as method, name, and the generation that they want, "" for any."""

    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    log: list[tuple[str, str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generations: count[int] = field(default_factory=lambda: count(1000))
    url: str = ""

    def put(self, name: str, data: bytes, wanted: str) -> _Object | None:
        """Put an object; None where its generation is not the wanted one."""
        with self.lock:
            present = self.objects.get(name)
            if wanted and int(wanted) != (present.generation if present else 0):
                return None
            self.objects[name] = _Object(data, next(self.generations), time())
            return self.objects[name]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def _begin(self) -> tuple[str, dict[str, str], bytes]:
        parts = urlsplit(self.path)
        name = unquote(parts.path.removeprefix(f"/{BUCKET}").removeprefix("/"))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.bucket.lock:
            self.bucket.log.append((self.command, name, self.headers.get("x-goog-if-generation-match", "")))
        return name, dict(parse_qsl(parts.query, keep_blank_values=True)), body

    def _reply(self, status: int, body: bytes | str = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def do_PUT(self) -> None:
        name, query, body = self._begin()
        if "uploadId" in query:
            self.bucket.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._reply(200, ETag=f'"{md5(body).hexdigest()}"')
        elif made := self.bucket.put(name, body, self.headers.get("x-goog-if-generation-match", "")):
            self._reply(200, ETag=made.tag, x_goog_generation=str(made.generation))
        else:
            self._refuse(412, "PreconditionFailed")

    def do_POST(self) -> None:
        name, query, _ = self._begin()
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self.bucket.uploads[upload] = {}
            self._reply(200, _xml("InitiateMultipartUploadResult", Bucket=BUCKET, Key=name, UploadId=upload))
        else:
            parts = self.bucket.uploads.pop(query["uploadId"])
            made = self.bucket.put(name, b"".join(data for _, data in sorted(parts.items())), "")
            assert made is not None
            body = _xml("CompleteMultipartUploadResult", Bucket=BUCKET, Key=name, ETag=made.tag)
            self._reply(200, body, x_goog_generation=str(made.generation))

    def do_DELETE(self) -> None:
        name, query, _ = self._begin()
        if "uploadId" in query:
            self.bucket.uploads.pop(query["uploadId"], None)
            self._reply(204)
        elif self.bucket.objects.pop(name, None):
            self._reply(204)
        else:
            self._refuse(404, "NoSuchKey")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, query, _ = self._begin()
        found = self.bucket.objects.get(name)
        if not name:
            self._reply(200, _listing(self.bucket, query), Content_Type="application/xml")
        elif found is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._send(found)

    def _send(self, found: _Object) -> None:
        head = {"ETag": found.tag, "x-goog-generation": str(found.generation),
                "Last-Modified": formatdate(found.modified, usegmt=True)}  # fmt: skip
        wanted, size = self.headers.get("Range"), len(found.data)
        if not wanted:
            self._reply(200, found.data, **head)
            return
        first, last = (int(each) for each in wanted.removeprefix("bytes=").split("-"))
        if first >= size:
            self._refuse(416, "InvalidRange")
            return
        last = min(last, size - 1)
        self._reply(206, found.data[first : last + 1], **head, Content_Range=f"bytes {first}-{last}/{size}")

    def log_message(self, *args: object) -> None:
        pass


def _xml(name: str, **members: str) -> str:
    inner = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in members.items())
    return f"<?xml version='1.0' encoding='UTF-8'?><{name}>{inner}</{name}>"


def _listing(bucket: Bucket, query: dict[str, str]) -> str:
    prefix, delimiter, after = (query.get(key, "") for key in ("prefix", "delimiter", "continuation-token"))
    with bucket.lock:
        objects = dict(bucket.objects)
    found: dict[str, str] = {}
    for name in sorted(objects):
        if not name.startswith(prefix):
            continue
        head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        key = f"{prefix}{head}{cut}" if cut else name
        found[key] = _xml("x", Prefix=key) if cut else ""
    keys = [key for key in found if key > after]
    page, more = keys[:_PAGE], len(keys) > _PAGE
    body = "".join(
        f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
        if found[key]
        else _contents(key, objects[key])
        for key in page
    )
    token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
    head = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
    return f"<?xml version='1.0'?><ListBucketResult>{head}{token}{body}</ListBucketResult>"


def _contents(key: str, found: _Object) -> str:
    modified = strftime("%Y-%m-%dT%H:%M:%S.000Z", gmtime(found.modified))
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size><LastModified>{modified}</LastModified>"
        f"<ETag>{escape(found.tag)}</ETag></Contents>"
    )


@contextmanager
def serving() -> Iterator[Bucket]:
    """A server with an empty bucket."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A server, and a token for it in the environment."""
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    with serving() as bucket:
        yield bucket
