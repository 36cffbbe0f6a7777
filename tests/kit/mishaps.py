"""What may happen to a request on its way, for `FaultProxy.on`: each is an action, or makes one."""

from __future__ import annotations

import contextlib
import os
import signal as signals
import threading
from collections import Counter
from typing import Literal
from xml.sax.saxutils import escape

from tests.kit.proxy import (
    FOREVER,
    PATIENCE_S,
    Action,
    Exchange,
    FaultProxy,
    Hangup,
    Headers,
    Request,
    resigned,
    with_query,
)
from tests.kit.sigv4 import sign

# -- answers that the server did not give


def answering(status: int, code: str, message: str = "as the test wants it", **headers: str) -> Action:
    """Answer with an error of S3; the server never hears of the request. `headers`: with `_` for `-`."""

    def answer(exchange: Exchange) -> None:
        exchange.take_body()
        body = b"" if exchange.request.method == "HEAD" else error_body(code, message, exchange.request.key)
        extra: Headers = [(name.replace("_", "-"), value) for name, value in headers.items()]
        exchange.reply(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), *extra], body)

    answer.__name__ = code
    return answer


def error_body(code: str, message: str, key: str) -> bytes:
    """The body of an error of S3."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{escape(message)}</Message>'
        f"<Key>{escape(key)}</Key><RequestId>0</RequestId></Error>"
    ).encode()


slow_down = answering(503, "SlowDown", "Please reduce your request rate.")
internal_error = answering(500, "InternalError", "We encountered an internal error. Please try again.")
access_denied = answering(403, "AccessDenied", "Access Denied")
expired_token = answering(400, "ExpiredToken", "The provided token has expired.")
other_region = answering(
    301, "PermanentRedirect", "The bucket must be addressed using another endpoint.", x_amz_bucket_region="eu-west-9"
)


def failing_late(exchange: Exchange) -> None:
    """Answer 200 with an error in the body, as CompleteMultipartUpload may. The server never hears of it."""
    exchange.take_body()
    body = error_body("InternalError", "We encountered an internal error. Please try again.", exchange.request.key)
    exchange.reply(200, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)


# -- answers that are spoilt


def cut(exchange: Exchange) -> None:
    """Give the right head and half the body, then end the connection."""
    _half_answer(exchange)
    raise Hangup


def cut_hard(exchange: Exchange) -> None:
    """Give the right head and half the body, then reset the connection."""
    _half_answer(exchange)
    exchange.reset()


def stalled(exchange: Exchange) -> None:
    """Give the right head and half the body, then nothing more."""
    _half_answer(exchange)
    exchange.wait_for_hangup()


def _half_answer(exchange: Exchange) -> None:
    with contextlib.closing(exchange.ask()) as answer:
        body = answer.read()
        exchange.reply(answer.status, answer.headers, body[: len(body) // 2])


def short(exchange: Exchange) -> None:
    """Give half the body, and a head that says that this is all."""
    with contextlib.closing(exchange.ask()) as answer:
        body = answer.read()
        half = body[: len(body) // 2]
        headers = [(name, value) for name, value in answer.headers if name.lower() != "content-length"]
        exchange.reply(answer.status, [*headers, ("Content-Length", str(len(half)))], half)


def flipping_answer(exchange: Exchange) -> None:
    """Change one bit of the body of the answer."""
    with contextlib.closing(exchange.ask()) as answer:
        body = bytearray(answer.read())
        body[len(body) // 2] ^= 4
        exchange.reply(answer.status, answer.headers, bytes(body))


# -- requests that do not arrive, or not as they were


def never(exchange: Exchange) -> None:
    """Take the request, pass nothing on, and never answer."""
    exchange.take_body()
    exchange.wait_for_hangup()


def reset(exchange: Exchange) -> None:
    """Reset the connection when half of the request's body has come; the server gets no part of it."""
    exchange.take_half()
    exchange.reset()


def reset_midway(exchange: Exchange) -> None:
    """Reset both connections when the server has got half of the request's body."""
    with contextlib.suppress(Hangup):
        exchange.ask(half=True)
    exchange.reset()


def flipping_request(exchange: Exchange) -> None:
    """Change one bit of the body of the request."""
    body = bytearray(exchange.take_body())
    body[len(body) // 2] ^= 4
    exchange._body = bytes(body)
    exchange.pass_on()


class Hold:
    """Keep a request back until `release()`; then the server gets it, whether or not the client still waits.

    The first request that comes here is kept, later ones are passed on.
    """

    def __init__(self) -> None:
        self._came = threading.Event()
        self._released = threading.Event()
        self._done = threading.Event()
        self.status = 0

    def __call__(self, exchange: Exchange) -> None:
        if self._came.is_set():
            exchange.pass_on()
            return
        exchange.take_body()
        self._came.set()
        if not self._released.wait(PATIENCE_S):
            raise Hangup
        with contextlib.closing(exchange.ask()) as answer:
            body = answer.read()
            self.status = answer.status
            self._done.set()
            exchange.reply(answer.status, answer.headers, body)

    def wait_until_reached(self) -> None:
        """Until a request is kept here; TimeoutError after a minute."""
        _wait(self._came)

    def release(self) -> int:
        """Let the server have it; returns the status that it answered with."""
        self._released.set()
        _wait(self._done)
        return self.status


def _wait(event: threading.Event) -> None:
    if not event.wait(PATIENCE_S):
        raise TimeoutError("what was waited for did not happen")


# -- answers that are lost


def losing(how: Literal["reset", "silence", "error"] = "reset") -> Action:
    """The server does what it is asked to; the client does not hear of it: a reset, silence, or 500 instead."""

    def lose(exchange: Exchange) -> None:
        with contextlib.closing(exchange.ask()) as answer:
            answer.read()
        if how == "reset":
            exchange.reset()
        if how == "silence":
            exchange.wait_for_hangup()
        internal_error(exchange)

    lose.__name__ = f"losing the answer: {how}"
    return lose


def refuse_twice(proxy: FaultProxy) -> None:
    """Every unconditional request is refused twice, for each object; listings never are."""
    refused: Counter[tuple[str, str]] = Counter()

    def twice(request: Request) -> bool:
        if request.header("if-none-match") or request.header("if-match") or request.op == "list_objects_v2":
            return False
        refused[request.op, request.key] += 1
        return refused[request.op, request.key] <= 2

    proxy.on(".*", slow_down, times=FOREVER, when=twice)


# -- requests that are changed


def paged(most: int) -> Action:
    """Listings come in pages of at most `most` keys."""

    def page(exchange: Exchange) -> None:
        request = exchange.request
        size = min(most, int(request.query.get("max-keys", most)))
        resigned(exchange, with_query(request.target, **{"max-keys": str(size)}), request.headers)
        exchange.pass_on()

    return page


def ignoring_conditions(exchange: Exchange) -> None:
    """A server that does not know If-Match and If-None-Match."""
    request = exchange.request
    ignored = {"if-match", "if-none-match"}
    resigned(exchange, request.target, [header for header in request.headers if header[0].lower() not in ignored])
    exchange.pass_on()


def signed_by(access_key: str) -> Action:
    """Sign the request as somebody whom the server knows: so credentials may be valid that it has never heard of."""

    def sign_again(exchange: Exchange) -> None:
        request = exchange.request
        secret = exchange.proxy.secrets[access_key]
        headers = [header for header in request.headers if header[0].lower() != "x-amz-security-token"]
        request.headers = sign(request.method, request.target, headers, secret, access_key)
        exchange.pass_on()

    return sign_again


# -- clients that die


def killing(when: Literal["before", "midway", "after"] = "before", signal: int = signals.SIGKILL) -> Action:
    """Send the client's process a signal, and hang up. The client has to give its pid: see `Request.pid`.

    `when`: before the server hears of the request, when it has got half of it, or when it has answered.
    """

    def kill(exchange: Exchange) -> None:
        assert exchange.request.pid, "the client did not say who it is"
        if when == "after":
            with contextlib.closing(exchange.ask()) as answer:
                answer.read()
        if when == "midway" and exchange.request.header("content-length") not in ("", "0"):
            with contextlib.suppress(Hangup):
                exchange.ask(half=True)
        os.kill(exchange.request.pid, signal)
        raise Hangup

    kill.__name__ = f"killing {when}"
    return kill
