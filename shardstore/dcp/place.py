"""Where DCP's storages lie."""

from __future__ import annotations

import os

from shardstore.storage import Urls
from shardstore.storage.roots import urls_of


class Place:
    """What a writer and a reader tell DCP of their place, and how `checkpoint_id=` changes it."""

    def __init__(self, url: Urls) -> None:
        urls_of(url)
        self._url = url

    @property
    def checkpoint_id(self) -> str:
        """The place, for DCP's log."""
        return os.fspath(urls_of(self._url)[0])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a place. DCP asks its own storages only."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save or load begins, at `checkpoint_id` if one is given."""
        if checkpoint_id is not None:
            urls_of(checkpoint_id)
            self._url = checkpoint_id
