"""Bytes by key: the store port, the stores, and wrappers that are stores themselves."""

from __future__ import annotations

from shardstore.storage.local import LocalStore
from shardstore.storage.memory import MemoryStore
from shardstore.storage.opening import join, open_store
from shardstore.storage.port import Blob, Body, Bytes, Capabilities, Entry, Store, check_key
from shardstore.storage.retrying import RetryingStore, unwrap
from shardstore.storage.roots import Urls, close_all, open_roots

__all__ = [
    "Blob",
    "Body",
    "Bytes",
    "Capabilities",
    "Entry",
    "LocalStore",
    "MemoryStore",
    "RetryingStore",
    "Store",
    "Urls",
    "check_key",
    "close_all",
    "join",
    "open_roots",
    "open_store",
    "unwrap",
]
