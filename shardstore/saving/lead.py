"""What rank 0 alone does in a save: it looks at the place, keeps the marks, puts the index together, and commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Self

from shardstore import strictjson
from shardstore.check import Found, find_roots
from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, ShardstoreError
from shardstore.events import Reporter
from shardstore.index import NAME, Index, dump, mark_name, parse_contribution
from shardstore.saving.after import supersede, tidy_up
from shardstore.saving.assemble import Assembly
from shardstore.saving.attempt import Agreement, Options
from shardstore.saving.commit import Marks, check_written, commit
from shardstore.storage import Store


class Lead:
    """One save, as rank 0 leads it. On other ranks nothing of it is called, and it does nothing."""

    def __init__(
        self, stores: Sequence[Store], options: Options, *, overwrite: bool, single_writer: bool,
        before_commit: Callable[[], None],
    ) -> None:  # fmt: skip
        self._given, self._options = stores, options
        self._overwrite, self._single_writer, self._before_commit = overwrite, single_writer, before_commit
        self._stores: Sequence[Store] = ()
        self._replaced: Found | None = None
        self._marks: Marks | None = None
        self._attempt = ""
        self._done: tuple[Index, bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._marks is not None:
            self._marks.stop()

    def begin(self, attempt: str) -> list[int]:
        """Look at the place, and mark the attempt; returns the order of the roots.

        Raises CheckpointExists unless what lies there may be replaced, InvalidArgument where the place is not safe.
        """
        for store in self._given:
            store.prepare()
        self._require_exclusive()
        self._stores, self._replaced = self._look()
        self._marks, self._attempt = Marks(self._stores, attempt), attempt
        try:
            self._marks.start()
        except BaseException:
            self.unmark()
            raise
        return [self._given.index(store) for store in self._stores]

    def unmark(self) -> None:
        """Remove the marks, if there are any, of a save that has failed and of which no file is left."""
        if self._marks is not None:
            self._marks.stop()
            remove((store, mark_name(self._attempt)) for store in self._stores)

    def _require_exclusive(self) -> None:
        home = self._given[0]
        if not home.capabilities.exclusive and not self._single_writer:
            raise InvalidArgument(
                f"{home.url} can't keep two savers from overwriting each other ({home.capabilities.why}): "
                "say single_writer=True if nobody else saves there"
            )

    def _look(self) -> tuple[Sequence[Store], Found | None]:
        """The roots in order, and what lies there."""
        if self._overwrite:
            return find_roots(self._given)
        for store in self._given:
            if _occupied(store):
                raise CheckpointExists(
                    f"{store.url} holds a checkpoint already: choose another place, or overwrite=True"
                )
        return self._given, None

    def commit(self, agreed: Agreement, sent: Sequence[bytes]) -> bytes:
        """Commit what all ranks wrote; returns what each of them is told."""
        algorithm = self._options.hash
        given = [parse_contribution(data, algorithm, rank) for rank, data in enumerate(sent)]
        files = [(self._stores[file.root], file.path) for one in given for file in one.files]
        with _Cleanup(files, self.unmark) as cleanup:
            assembly = Assembly(agreed, given)
            if agreed.late:
                meta = assembly.late_meta(algorithm)
                files.append((self._stores[meta.root], meta.key))
                self._stores[meta.root].put(meta.key, meta.body)
                assembly.take(meta)
            index = assembly.index(self._options, self._replaced, len(self._stores))
            if self._marks is not None:
                self._marks.renew()
            check_written(self._stores, index)
            data = dump(index)
            self._prepare_after()
            self._before_commit()
            cleanup.no_return()
            version = self._replaced.version if self._replaced else None
            commit(self._stores[0], index.attempt, data, version, single_writer=self._single_writer)
        self._done = index, data
        return strictjson.dumps({"digest": sha256(data).hexdigest(), "nbytes": index.nbytes})

    def _prepare_after(self) -> None:
        """See to it that who dies after the commit leaves no files without a mark."""
        if self._replaced:
            supersede(self._stores, self._replaced.index)
        if len(self._stores) > 1 and self._marks is not None:
            self._marks.make_lasting()

    def tidy_up(self, reporter: Reporter) -> None:
        """What follows the commit."""
        if self._done is not None:
            tidy_up(self._stores, *self._done, self._replaced, reporter)


def _occupied(store: Store) -> bool:
    try:
        store.stat(NAME)
    except KeyMissing:
        return False
    return True


class _Cleanup:
    """Removes an attempt's files if the save fails before its commit was called; never afterwards."""

    def __init__(self, files: Iterable[tuple[Store, str]], unmark: Callable[[], None]) -> None:
        self._files, self._unmark = files, unmark
        self._returnable = True

    def __enter__(self) -> Self:
        return self

    def no_return(self) -> None:
        """From here on a failure leaves every file, since the commit may have happened."""
        self._returnable = False

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        # a definite no: the files can't be needed
        lost = isinstance(error, CheckpointExists) or getattr(error, "definite", False)
        if error is not None and (self._returnable or lost) and remove(self._files):
            self._unmark()  # last, so that `prune` finds what could not go


def remove(files: Iterable[tuple[Store, str]]) -> bool:
    """Remove files that nobody can need; returns whether the store let us."""
    try:
        for store, key in files:
            store.delete(key)
    except ShardstoreError:
        return False
    return True
