"""The conformance kit of stores, on S3 directly and through a proxy that does nothing or stands for other servers."""

from __future__ import annotations

import pytest
from aiobotocore.httpsession import AIOHTTPSession

from shardstore.events import to_log
from shardstore.storage.s3 import S3Store
from tests.kit.contract import MakeStore, StoreContract
from tests.kit.mishaps import paged, refuse_twice
from tests.kit.proxy import FOREVER, FaultProxy
from tests.kit.s3 import Place, options_for
from tests.kit.weed import Weed


class _OneRace(StoreContract):
    """The server takes seconds for a race, and has run it often enough without a proxy."""

    @pytest.mark.parametrize("turn", [0])
    def test_L11_racing_threads(self, make_store: MakeStore, turn: int):
        """As in the kit."""
        super().test_L11_racing_threads(make_store, turn)


class TestDirect(StoreContract):
    @pytest.fixture
    def make_store(self, place: Place, seaweed: Weed) -> MakeStore:
        return lambda: S3Store(place.url, options_for(seaweed.s3), to_log)


class TestThroughAProxy(_OneRace):
    """Nothing is lost or added by the proxy, so what fails behind it fails because of what it was told to do."""

    @pytest.fixture
    def make_store(self, place: Place, proxy: FaultProxy) -> MakeStore:
        return lambda: S3Store(place.url, options_for(proxy.url), to_log)


class TestByTheEventLoop(_OneRace):
    """Bodies on the event loop of s3fs, as with old releases of it, and with sessions that people bring."""

    @pytest.fixture
    def make_store(self, place: Place, seaweed: Weed) -> MakeStore:
        options = options_for(seaweed.s3, config_kwargs={"http_session_cls": AIOHTTPSession})
        return lambda: S3Store(place.url, options, to_log)


class TestOnTrouble(_OneRace):
    """A server that refuses every unconditional request twice, and lists two keys at a time."""

    @pytest.fixture
    def make_store(self, place: Place, proxy: FaultProxy, no_waits: None) -> MakeStore:
        refuse_twice(proxy)
        proxy.on("list_objects_v2", paged(2), times=FOREVER)
        return lambda: S3Store(place.url, options_for(proxy.url), to_log)
