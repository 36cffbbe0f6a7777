"""The conformance kit of stores, through obstore: on S3, Azure's emulator, and a small server that speaks like GCS."""

from __future__ import annotations

import pytest

from shardstore.events import to_log
from shardstore.storage.obstore_store import ObstoreStore
from tests.kit import azurite as az
from tests.kit.contract import MakeStore, StoreContract
from tests.kit.gcs import Bucket
from tests.kit.mishaps import paged, refuse_twice
from tests.kit.proxy import FOREVER, FaultProxy
from tests.kit.s3 import Place, options_for
from tests.kit.weed import Weed


@pytest.mark.s3
class TestS3(StoreContract):
    @pytest.fixture
    def make_store(self, place: Place, seaweed: Weed) -> MakeStore:
        return lambda: ObstoreStore(place.url, options_for(seaweed.s3), to_log)


@pytest.mark.s3
class TestS3OnTrouble(StoreContract):
    """A server that refuses every unconditional request twice, and lists two keys at a time."""

    @pytest.fixture
    def make_store(self, place: Place, proxy: FaultProxy, no_waits: None) -> MakeStore:
        refuse_twice(proxy)
        proxy.on("list_objects_v2", paged(2), times=FOREVER)
        return lambda: ObstoreStore(place.url, options_for(proxy.url), to_log)

    @pytest.mark.parametrize("turn", [0])
    def test_L11_racing_threads(self, make_store: MakeStore, turn: int):
        """As in the kit; once, since the server takes seconds for it."""
        super().test_L11_racing_threads(make_store, turn)


class TestAzure(StoreContract):
    @pytest.fixture
    def make_store(self, container: str, azurite: str) -> MakeStore:
        return lambda: ObstoreStore(container, az.options_for(azurite), to_log)


class TestGoogle(StoreContract):
    @pytest.fixture
    def make_store(self, gcs: Bucket) -> MakeStore:
        return lambda: ObstoreStore("gs://bucket/run/step-7", {"endpoint_url": gcs.url}, to_log)
