"""Fixtures for all tests here."""

from __future__ import annotations

from tests.kit.azurite import azurite, container
from tests.kit.gcs import gcs
from tests.kit.s3 import _proxy, no_waits, place, proxy, seaweed

__all__ = ["_proxy", "azurite", "container", "gcs", "no_waits", "place", "proxy", "seaweed"]
