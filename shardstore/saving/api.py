"""`save`: from a state to a committed checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardstore import strictjson, tree
from shardstore.errors import CommitUnknown, PeerError
from shardstore.events import Listener, Reporter, to_log
from shardstore.hashing import DEFAULT
from shardstore.index import dump_contribution
from shardstore.memory import no_gc
from shardstore.plan import GroupBy, Layout, ShardOptions
from shardstore.ranks import ALL, Alone, Ranks, ranks_of
from shardstore.saving.agree import agree
from shardstore.saving.attempt import Agreement, Attempt, Options
from shardstore.saving.lead import Lead, remove
from shardstore.storage import Store, Urls, close_all, open_roots

_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint. `digest`: the sha256 of its shardstore.json, which `load(expect=)` takes."""

    url: str
    step: int | None
    digest: str
    nbytes: int
    seconds: float


def save(  # noqa: PLR0913 - the public face: every argument but two has a default
    state: Any, url: Urls, *, step: int | None = None, shards: int | None = None,
    shard_bytes: int | None = None, layout: Layout = "balanced", group_by: GroupBy | None = None,
    hash: str = DEFAULT, overwrite: bool = False, single_writer: bool = False, group: Any = ALL,
    threads: int | None = None, listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
) -> Saved:  # fmt: skip
    """Save a state as a checkpoint at `url`; returns when it is committed and durable.

    `state`: a dict of sections (`{"model": model, "optimizer": optimizer, "step": 3}`), a flat state_dict, or a Module.
    Tensors, Modules, Optimizers, schedulers and anything else with `state_dict` may stand in it, and plain data. It is
    not changed.
    `url`: a folder that is made (its parent must exist), or one without a checkpoint; or a URL such as
    `s3://bucket/prefix`; or several of them, over which the shards are striped, the index lying in the first.
    `step`: the training step, kept in the index. `shards`: number of files in all, at least one for weights and one for
    other tensors; or `shard_bytes`, the size to aim at; default: a sixteenth of the state, 64 MiB to 4 GiB.
    `layout`: `balanced`, `round_robin` or `by_group` with `group_by`, a callable on paths or a list of patterns.
    `hash`: `xxh3_128` finds damage, `sha256` also forgery (with `load(expect=)`).
    `overwrite`: replace the checkpoint that is there; readers see the old or the new one.
    `single_writer`: nobody else saves there; only for stores that can't tell two savers apart.
    `group`: the process group whose ranks save one checkpoint together, each its own parts; all of them make the same
    call. Default: all ranks where torch.distributed is initialised; None: this process alone.
    `threads`: default one for each core, 8 at most. `listener` gets events; default: the logger `shardstore`.

    Raises UnsupportedState before a byte is written for what can't be stored; CheckpointExists where a checkpoint is;
    StoreError where the store fails, with what was written removed again; CommitUnknown where the store did not answer;
    PeerError where another rank failed, died or did not come.
    """
    ranks = ranks_of(group)
    with telling(ranks):
        options = Options(ShardOptions(layout, shards, shard_bytes, group_by), step, hash, threads)
    with no_gc():
        return save_to(
            flattened(state, ranks), url, options, ranks=ranks, overwrite=overwrite, single_writer=single_writer,
            listener=listener, storage_options=storage_options,
        )  # fmt: skip


def flattened(state: Any, ranks: Ranks) -> tree.Flat:
    """A state taken apart. What is wrong with it is said to the other ranks, too, who wait for this one."""
    with telling(ranks):
        return tree.flatten(state, ranks.rank)


@contextlib.contextmanager
def telling(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks of an error that keeps this one from beginning the save."""

    def fail(error: Exception) -> bytes:
        raise error

    try:
        yield
    except Exception as error:
        raised = error  # Python forgets `error` at the end of this block
        if ranks.size > 1:
            with contextlib.suppress(Exception):  # it is raised below
                ranks.share("begin", lambda: fail(raised), lambda _: b"")
        raise


def save_to(
    flat: tree.Flat, url: Urls, options: Options, *, ranks: Ranks | None = None, overwrite: bool, single_writer: bool,
    listener: Listener | None, storage_options: Mapping[str, Any] | None,
) -> Saved:  # fmt: skip
    """Save a flattened state at a place, whose stores are opened for it."""
    ranks = ranks or Alone()
    with telling(ranks):
        stores = open_roots(url, storage_options=storage_options, listener=listener)
    try:
        return save_flat(
            flat, stores, options, ranks=ranks, overwrite=overwrite, single_writer=single_writer,
            listener=to_log if listener is None else listener,
        )  # fmt: skip
    finally:
        close_all(stores)


def save_flat(
    flat: tree.Flat, stores: Sequence[Store], options: Options, *, ranks: Ranks | None = None,
    overwrite: bool, single_writer: bool, listener: Listener, before_commit: Callable[[], None] = lambda: None,
) -> Saved:  # fmt: skip
    """Save a flattened state, whose tensors stay as they are meanwhile.

    `before_commit` is called on rank 0, last before the point of no return; what it raises ends the save, with its
    files removed.
    """
    began = time.perf_counter()
    ranks = ranks or Alone()
    lead = Lead(stores, options, overwrite=overwrite, single_writer=single_writer, before_commit=before_commit)
    reporter = Reporter("save", stores[0].url, listener)
    with lead:
        try:
            settle = agree(flat, options, _settings(stores, options, overwrite=overwrite), ranks, lead.begin)
        except Exception:  # so nobody writes
            lead.unmark()
            raise
        writing = _Writing(settle, options, stores, ranks, reporter)
        reply = writing.run(lead)
    lead.tidy_up(reporter)
    reporter.finished()
    said = strictjson.loads(reply, limit=_LIMIT)
    return Saved(writing.stores[0].url, options.step, said["digest"], said["nbytes"], time.perf_counter() - began)


def _settings(stores: Sequence[Store], options: Options, *, overwrite: bool) -> dict[str, Any]:
    """What every rank must give alike."""
    cut = options.shards
    return {
        "url": [store.url for store in stores], "step": options.step, "hash": options.hash, "overwrite": overwrite,
        "layout": cut.layout, "shards": cut.shards, "shard_bytes": cut.shard_bytes, "attempt": options.attempt,
    }  # fmt: skip


class _Writing:
    """The writing of this rank's files. They are removed again if it is certain that nobody can have committed them."""

    def __init__(
        self, settle: Callable[[], Agreement], options: Options, stores: Sequence[Store], ranks: Ranks,
        reporter: Reporter,
    ) -> None:  # fmt: skip
        self._settle, self._options, self._given, self._ranks = settle, options, stores, ranks
        self._reporter = reporter
        self._agreed: Agreement
        self._attempt: Attempt | None = None
        self._sent = False

    @property
    def stores(self) -> Sequence[Store]:
        """The roots in order."""
        return [self._given[root] for root in self._agreed.roots]

    def run(self, lead: Lead) -> bytes:
        """Write, and have rank 0 commit what all ranks wrote; returns its answer."""
        try:
            return self._ranks.share("write", lambda: self._work(lead), lambda sent: lead.commit(self._agreed, sent))
        except BaseException as error:
            self._undo(error, lead)
            raise

    def _work(self, lead: Lead) -> bytes:
        agreed, ranks = self._settle(), self._ranks
        self._agreed = agreed
        for note in agreed.notes if ranks.rank == 0 else ():
            self._reporter.noticed(note)
        attempt = Attempt(agreed, self._options, len(self._given), self._reporter, rank=ranks.rank, size=ranks.size)
        if ranks.size == 1:  # after all that can be wrong with the state
            agreed.roots = lead.begin(agreed.attempt)
        self._attempt = attempt
        self._reporter.started(attempt.nbytes, len(attempt.files))
        attempt.write(self.stores)
        data = dump_contribution(attempt.contribution())
        self._sent = True
        return data

    def _undo(self, error: BaseException, lead: Lead) -> None:
        peers = isinstance(error, PeerError)
        if self._sent and getattr(error, "lost", False):
            raise CommitUnknown(
                f"{self._given[0].url}: whether the checkpoint was committed is unknown, since rank 0 can't be heard "
                f"any more ({error}); no file was removed"
            ) from error
        if self._attempt is None or (self._sent and not (peers and getattr(error, "settled", False))):
            return
        stores = self.stores
        gone = remove((stores[file.root], file.key) for file in self._attempt.files)
        if gone and self._ranks.size == 1:  # what other ranks leave is found by the marks
            lead.unmark()
