"""Which library carries the bytes of a URL: s3fs, obstore, or whatever fsspec has for the scheme."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from shardstore.errors import InvalidArgument, brief
from shardstore.events import Listener, Noticed
from shardstore.storage.port import Store
from shardstore.storage.retrying import RetryingStore

_S3 = {"s3", "s3a"}
_OURS = {"part_bytes", "in_flight"}

_told: set[tuple[str, str]] = set()
_telling = threading.Lock()


def open_remote(scheme: str, url: str, options: Mapping[str, Any], listener: Listener) -> Store:
    """The store of a URL that is no path. `engine` among the options: "auto" (default), "obstore" or "fsspec".

    "auto" takes s3fs for S3, and for Google Cloud Storage and Azure obstore where it is installed and knows all the
    options, else fsspec; it says which. Raises InvalidArgument for an engine that can't be used there.
    """
    from shardstore.storage.obstore_options import KINDS, Unfit

    given = dict(options)
    engine = given.pop("engine", "auto")
    if engine not in {"auto", "obstore", "fsspec"}:
        raise InvalidArgument(f"engine must be 'auto', 'obstore' or 'fsspec', not {brief(engine)}")
    if engine == "obstore" and scheme not in KINDS:
        raise InvalidArgument(
            f"obstore has no {scheme}://, only {', '.join(sorted(KINDS))}: leave out engine='obstore'"
        )
    if engine == "obstore" or (engine == "auto" and scheme in KINDS and scheme not in _S3):
        from shardstore.storage.obstore_store import ObstoreStore

        try:
            made = RetryingStore(ObstoreStore(url, given, listener), attempts=1)  # it retries single requests
        except Unfit as why:
            if engine == "obstore":
                raise
            _tell(url, f"goes through fsspec, without conditions and in whole files: {why}", listener, warning=True)
        else:
            if engine == "auto":
                _tell(url, "goes through obstore", listener, warning=False)
            return made
    return _by_fsspec(scheme, url, given, listener)


def _by_fsspec(scheme: str, url: str, given: dict[str, Any], listener: Listener) -> Store:
    if scheme in _S3:
        from shardstore.storage.s3 import S3Store

        return RetryingStore(S3Store(url, given, listener), attempts=1)  # it retries single requests
    from shardstore.storage.generic import FsspecStore

    limits = {name: given.pop(name) for name in ("attempts", "timeout_s") if name in given}
    theirs = {name: value for name, value in given.items() if name not in _OURS}  # it moves whole files, one by one
    return RetryingStore(FsspecStore(url, theirs), listener=listener, **limits)


def _tell(url: str, what: str, listener: Listener, *, warning: bool) -> None:
    """Say something once for each bucket and process."""
    place = "/".join(url.split("/")[:3])
    with _telling:
        new = (place, what) not in _told
        _told.add((place, what))
    if new:
        listener(Noticed(what, place, warning))
