"""Checkpoints of an older schema, rewritten: index and meta become the present ones, shards are not touched.

The old index is copied beside the new one, and goes when the new one was read back and verified; where that fails, it
is put back. New files have unique names and lie under the mark of the attempt, so that what a dead process leaves can
be pruned. The attempt stays: folders, pins and marks go on naming it. So does what is derived from the index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from shardstore import strictjson
from shardstore.check import Found, default_threads, find_index, mark_content, need_roots
from shardstore.check.verifying import verify_file
from shardstore.errors import Damaged, InvalidArgument, KeyMissing, ShardstoreError, StoreError, Superseded
from shardstore.events import Noticed, Reporter, to_log
from shardstore.hashing import BlockHasher
from shardstore.index import MAX_BYTES, FileEntry, Index, mark_name, parse, rewritten, schema_of
from shardstore.index import NAME as INDEX
from shardstore.run.documents import put_if
from shardstore.schemas import INDEX as INDEX_SCHEMAS
from shardstore.schemas import META as META_SCHEMAS
from shardstore.storage import Bytes, Store
from shardstore.transfer import in_parallel


class Change(NamedTuple):
    """The schema of a document before and after; both are the same where nothing is to be done."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Migration:
    """What migrating one checkpoint changes. `digest`: the sha256 of its shardstore.json as it is now."""

    url: str
    attempt: str
    step: int | None
    index: Change
    meta: Change
    digest: str
    found: Found = dataclasses.field(repr=False)

    @property
    def needed(self) -> bool:
        """Whether anything is older than what this version writes."""
        return self.index.before != self.index.after or self.meta.before != self.meta.after


def plan_migration(stores: Sequence[Store]) -> Migration:
    """What is older at the checkpoint at these roots. Nothing is changed.

    Raises CheckpointNotFound, Unfinished, Damaged, UnsupportedVersion, InvalidArgument, StoreError.
    """
    (home, *_), found = need_roots(stores)
    meta = Change(str(_read_meta(home, found.index).get("schema")), META_SCHEMAS.current)
    return Migration(
        home.url, found.index.attempt, found.index.step, Change(schema_of(found.data), INDEX_SCHEMAS.current), meta,
        sha256(found.data).hexdigest(), found,
    )  # fmt: skip


def migrate(stores: Sequence[Store], plan: Migration, *, single_writer: bool = False) -> str:
    """Carry a plan out; returns the sha256 of the new shardstore.json. Where nothing is needed, nothing is done.

    `single_writer`: the caller's word that nobody else writes there, for stores without conditional puts.

    Raises Superseded where the checkpoint was replaced since it was planned, or as soon as it was migrated; Damaged
    where the new index does not verify, with the old one in its place again; InvalidArgument, StoreError.
    StoreUnavailable leaves it unclear whether the new index is there: either is whole.
    """
    if not plan.needed:
        return plan.digest
    stores, _ = need_roots(stores)
    stores[0].prepare()
    if not stores[0].capabilities.exclusive and not single_writer:
        raise InvalidArgument(
            f"{stores[0].url} can't keep two writers apart ({stores[0].capabilities.why}): "
            "say that nobody else writes there (single_writer)"
        )
    work = _Work(stores, plan, single_writer=single_writer)
    try:
        data = work.prepare()
    except BaseException:
        work.clean_up()
        raise
    work.commit(data)
    return sha256(data).hexdigest()


class _Work:
    """One migration on its way."""

    def __init__(self, stores: Sequence[Store], plan: Migration, *, single_writer: bool) -> None:
        self._stores, self._home, self._plan, self._single_writer = stores, stores[0], plan, single_writer
        self._index = plan.found.index
        token = secrets.token_hex(4)
        self._copy = f"state/index-{plan.attempt}-{token}.json"
        self._meta = f"state/meta-{plan.attempt}-{token}.json" if plan.meta.before != plan.meta.after else None
        self._marked = self._index.roots == 1  # the mark of a striped checkpoint says more, and stays

    def prepare(self) -> bytes:
        """Write all but the index; returns its bytes, of which it is certain that they say the same."""
        entry = None
        if self._marked:
            self._home.put(mark_name(self._plan.attempt), Bytes(mark_content(self._plan.attempt, "migrating")))
        self._home.put(self._copy, Bytes(self._plan.found.data))
        if self._meta:
            document = META_SCHEMAS.upgrade(
                _read_meta(self._home, self._index), self._index.files[self._index.meta].path
            )
            content = strictjson.dumps(document)
            self._home.put(self._meta, Bytes(content))
            entry = _entry(self._meta, content, self._index)
        data = rewritten(self._plan.found.data, entry)
        self._refuse_other(parse(data))
        return data

    def _refuse_other(self, new: Index) -> None:
        files = [file if at != new.meta else self._index.files[at] for at, file in enumerate(new.files)]
        if dataclasses.replace(new, files=files) != self._index:
            raise Damaged(f"{INDEX} in {self._home.url} would say something else when migrated", file=INDEX)

    def commit(self, data: bytes) -> None:
        """Replace exactly the index that was planned for, verify the new one, and remove what it replaces."""
        if not self._put(data, self._plan.found.version):
            self.clean_up()
            raise Superseded(f"{self._home.url} was replaced meanwhile: nothing was migrated")
        try:
            self._verify(data)
        except Superseded:
            self.clean_up()
            raise
        except ShardstoreError as error:
            self._put_back(data, error)
        try:
            if self._meta:
                self._home.delete(self._index.files[self._index.meta].path)
            self._home.delete(self._copy)
            self._unmark()
        except StoreError as error:
            to_log(Noticed(f"it is migrated, but tidying up after it failed: {error}", self._home.url))

    def _put(self, data: bytes, version: str) -> bool:
        return put_if(self._home, INDEX, data, version, single_writer=self._single_writer, limit=MAX_BYTES)

    def _verify(self, data: bytes) -> None:
        """That the index which is there now is the new one, and finds all its files.

        Raises Superseded for a whole one of somebody else, which stays; Damaged, StoreError.
        """
        found = find_index(self._home)
        if found is None:
            raise Damaged(f"{INDEX} in {self._home.url} is gone again", file=INDEX)
        if found.data != data:
            raise Superseded(f"{self._home.url} was replaced as soon as it was migrated: it is what was saved last")
        in_parallel(self._look, found.index.files, self._home.capabilities.connections or default_threads())
        problems = verify_file(self._home, found.index, found.index.meta, Reporter("verify", self._home.url, to_log))
        if problems:
            raise Damaged(problems[0].message, file=problems[0].file)

    def _look(self, file: FileEntry) -> None:
        try:
            found = self._stores[file.root].stat(file.path)
        except KeyMissing:
            raise Damaged(f"{file.path} is missing from {self._home.url}", file=file.path) from None
        if found.nbytes != file.nbytes:
            raise Damaged(f"{file.path} has {found.nbytes} bytes, {file.nbytes} were saved", file=file.path)

    def _put_back(self, data: bytes, error: ShardstoreError) -> None:
        left = f"the old one lies in {self._copy}"
        if isinstance(error, StoreError):
            raise StoreError(f"{self._home.url}: the new index could not be verified ({error}); {left}") from error
        present = find_index(self._home)
        ours = present is not None and present.data == data
        if present is None or not ours or not self._put(self._plan.found.data, present.version):
            raise Damaged(f"{self._home.url}: the new index does not verify ({error}); {left}", file=INDEX) from error
        self.clean_up()
        raise Damaged(f"{self._home.url}: the old index was put back: {error}", file=INDEX) from error

    def clean_up(self) -> None:
        """Remove what was written for nothing, the mark last, so that `prune` finds what could not go."""
        with contextlib.suppress(ShardstoreError):
            for key in filter(None, (self._copy, self._meta)):
                self._home.delete(key)
            self._unmark()

    def _unmark(self) -> None:
        if self._marked:
            self._home.delete(mark_name(self._plan.attempt))


def _read_meta(store: Store, index: Index) -> dict[str, object]:
    """The meta as JSON, every byte of it verified. Raises Damaged."""
    entry = index.files[index.meta]
    problems = verify_file(store, index, index.meta, Reporter("verify", store.url, to_log))
    if problems:
        raise Damaged(problems[0].message, file=entry.path)
    data = memoryview(bytearray(entry.nbytes))
    store.read_into(entry.path, 0, [data])
    document: dict[str, object] = strictjson.loads(data, limit=entry.nbytes)
    return document


def _entry(path: str, data: bytes, index: Index) -> FileEntry:
    hasher = BlockHasher(index.hash, index.block)
    hasher.update(memoryview(data))
    digest, blocks = hasher.finish()
    return FileEntry(path, len(data), digest, b"".join(blocks))
