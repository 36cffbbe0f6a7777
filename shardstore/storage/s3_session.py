"""The HTTP session of the clients of s3fs: requests that a carrier waits for are carried by it, others go as ever."""

from __future__ import annotations

import ssl
from typing import Any, Self

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import get_cert_path

from shardstore.storage.carrying import Connections, Payload, current


class Session(AIOHTTPSession):  # type: ignore[misc]  # it ships no types
    """For `http_session_cls` of aiobotocore's configuration. Through a proxy everything goes as ever."""

    def __init__(
        self, *, timeout: Any = None, verify: Any = True, client_cert: Any = None, proxies: Any = None, **more: Any
    ) -> None:
        super().__init__(timeout=timeout, verify=verify, client_cert=client_cert, proxies=proxies, **more)
        connect, read = timeout if isinstance(timeout, (list, tuple)) else (timeout, timeout)
        self._carried = not proxies
        self._connections = Connections(connect, read, lambda: _tls(verify, client_cert))

    async def send(self, request: Any) -> Any:
        """One request; what its answer means, the client tells."""
        carrier, body = current.get(), request.body
        if carrier is None or not self._carried or not (body is None or isinstance(body, bytes | Payload)):
            return await super().send(request)
        made = await carrier.hand_over(
            lambda: self._connections.exchange(carrier, request.method, request.url, request.headers, body)
        )
        return AioAWSResponse(request.url, made.status, made.headers, _Body(made.body))

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._connections.close()


class _Body:
    """What came of a body, as the client reads it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data

    def close(self) -> None:
        """Nothing is open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


def _tls(verify: Any, client_cert: Any) -> ssl.SSLContext:
    """What botocore's settings ask for."""
    context = ssl.create_default_context(cafile=get_cert_path(verify) if verify else None)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if client_cert:
        context.load_cert_chain(*([client_cert] if isinstance(client_cert, str) else client_cert))
    return context
