"""The writer for `dcp.save` and `dcp.async_save`: DCP plans, we write, hash and commit."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardstore import tree
from shardstore.dcp.gathering import Said, gather, hear, tell
from shardstore.dcp.naming import path_of
from shardstore.dcp.place import Place
from shardstore.dcp.taking import Taken, local_plan, take
from shardstore.errors import InvalidArgument
from shardstore.events import Listener, Reporter, to_log
from shardstore.hashing import DEFAULT
from shardstore.index import Contribution, dump_contribution
from shardstore.memory import no_gc
from shardstore.plan import ShardOptions
from shardstore.saving.attempt import Agreement, Attempt, Options, new_attempt
from shardstore.saving.lead import Lead, remove
from shardstore.storage import Store, Urls, close_all, open_roots


class Writer(Place, StorageWriter):
    """Writes a verified, atomic checkpoint without pickle: `dcp.save(state, storage_writer=Writer(url))`.

    `url`, `step`, `hash`, `overwrite`, `single_writer`, `threads`, `listener`, `storage_options`: as in
    `shardstore.save`. `checkpoint_id=` of `dcp.save` takes the place of `url`. Every rank gives the same.

    Errors come inside of DCP's CheckpointException, a BaseException whose `failures` have them by rank:
    UnsupportedState before a byte is written for values that are no plain ones; CheckpointExists where a checkpoint is;
    StoreError where a file could not be written, or was gone before the commit; CommitUnknown.
    """

    def __init__(
        self, url: Urls, *, step: int | None = None, hash: str = DEFAULT, overwrite: bool = False,
        single_writer: bool = False, threads: int | None = None, listener: Listener | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(url)
        self._options = Options(ShardOptions(), step, hash, threads)
        self._overwrite, self._single_writer = overwrite, single_writer
        self._listener, self._storage_options = listener, storage_options
        self._save: _Save | None = None
        self._close: weakref.finalize[[], Writer] | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - DCP's
        """Forget what an earlier save has left. Raises InvalidArgument for `use_collectives=False`."""
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument("use_collectives=False writes a checkpoint for each rank; save with collectives")
        self._end()
        _arrived.order = None
        self._save = _Save(self._options, self._listener or to_log)
        self._close = weakref.finalize(self, self._save.close)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note what this rank has; a planner that caches gives no plan where nothing has changed."""
        self._running.local = plan if plan.usable else None
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: look at the place, mark the save, and tell each rank where to write."""
        save = self._running
        save.open(self._url, self._storage_options)
        save.lead = Lead(
            save.stores, self._options, overwrite=self._overwrite, single_writer=self._single_writer,
            before_commit=lambda: None,
        )  # fmt: skip
        attempt = new_attempt()
        roots = save.lead.begin(attempt)
        flat = _is_flat(plans)
        orders = [_Order(attempt, roots, rank, len(plans), flat) for rank in range(len(plans))]
        _arrived.order = orders[0]
        return [_Planned.of(replace(plan, storage_data=order)) for plan, order in zip(plans, orders, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files."""
        order: _Order | None = getattr(_arrived, "order", None)
        if order is None:
            raise InvalidArgument("the coordinator's plan has not arrived on this thread")
        save = self._running
        save.open(self._url, self._storage_options)
        with no_gc():
            told, nbytes = save.write(order, plan, planner)
        if save.lead is None:
            self._end()
        else:  # where another rank fails, nobody tells this one, and a save that died must not look alive
            save.lead.__exit__()
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(MetadataIndex(""), nbytes, told)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: commit. The index is written last."""
        save = self._running
        try:
            with no_gc():
                save.commit(metadata, [result.storage_data for given in results for result in given])
        finally:
            self._end()

    @property
    def _running(self) -> _Save:
        if self._save is None:
            raise InvalidArgument("no save is under way: the writer is called by dcp.save")
        return self._save

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_save": None, "_close": None}  # for async_save in a process of its own

    def _end(self) -> None:
        if self._close is not None:
            self._close()
        self._save = self._close = None


_arrived = threading.local()
"""On each thread, the order of the save that runs there."""


class _Order(NamedTuple):
    """What the coordinator tells a rank. `roots`: their order; `flat`: whether the state is nothing but weights."""

    attempt: str
    roots: list[int]
    rank: int
    size: int
    flat: bool | None


class _Planned(SavePlan):
    """A plan whose order arrives with it, even where the planner then takes a cached plan, with an earlier order."""

    @classmethod
    def of(cls, plan: SavePlan) -> _Planned:
        made = object.__new__(cls)
        made.__dict__.update(plan.__dict__, _plan=plan)
        return made

    def __reduce__(self) -> Any:
        return _arrive, (self.__dict__["_plan"],)


def _arrive(plan: SavePlan) -> SavePlan:
    """Called where DCP unpickles what the coordinator has sent."""
    _arrived.order = plan.storage_data
    return plan


class _Save:
    """One save on this rank. `lead`: on the coordinator."""

    def __init__(self, options: Options, listener: Listener) -> None:
        self.local: SavePlan | None = None
        self.lead: Lead | None = None
        self.stores: Sequence[Store] = ()
        self._options, self._listener = options, listener
        self._order: _Order | None = None

    def open(self, url: Urls, storage_options: Mapping[str, Any] | None) -> None:
        if not self.stores:
            self.stores = open_roots(url, storage_options=storage_options, listener=self._listener)
            self._reporter = Reporter("save", self.stores[0].url, self._listener)

    def close(self) -> None:
        """Refresh no mark any more, and give back the stores."""
        if self.lead is not None:
            self.lead.__exit__()
        stores, self.stores = self.stores, ()
        close_all(stores)

    def write(self, order: _Order, plan: SavePlan, planner: SavePlanner) -> tuple[tuple[bytes, bytes], int]:
        """Write, and return what the coordinator is told, and the bytes. What fails is removed again."""
        stores = [self.stores[root] for root in order.roots]
        files: list[tuple[Store, str]] = []
        try:
            self.local = self.local or local_plan(planner, plan)
            order = self._order = order._replace(flat=_known(plan, order.flat))
            taken = take(planner, plan, self.local, flat=order.flat is True)
            attempts = self._attempts(taken, order)
            files += [(stores[file.root], file.key) for attempt in attempts for file in attempt.files]
            nbytes = sum(attempt.nbytes for attempt in attempts)
            self._reporter.started(nbytes, len(files))
            for attempt in attempts:
                attempt.write(stores)
        except BaseException:
            if remove(files) and self.lead is not None and order.size == 1:
                self.lead.unmark()  # what other ranks leave is found by the marks
            self.close()
            raise
        return tell(taken, order.flat is True, _united([attempt.contribution() for attempt in attempts])), nbytes

    def _attempts(self, taken: Taken, order: _Order) -> list[Attempt]:
        """The files. Of a tensor of which this rank has several parts, each lies in other files than the next."""
        count = len(taken.leaves)
        flat, numbers = tree.Flat(taken.leaves), range(count)
        layers = _layers([leaf.path for leaf in taken.leaves])
        return [
            Attempt(
                Agreement(order.attempt, flat, count, layer, numbers, order.roots, late=True), self._options,
                len(order.roots), self._reporter, rank=at * order.size + order.rank, size=order.size * len(layers),
            )
            for at, layer in enumerate(layers)
        ]  # fmt: skip

    def commit(self, metadata: Metadata, told: Sequence[tuple[bytes, bytes]]) -> None:
        """Commit what all ranks have told."""
        order, lead = self._order, self.lead
        if order is None or lead is None:
            raise InvalidArgument("the coordinator has planned nothing")
        said = [hear(one, self._options.hash, rank) for rank, one in enumerate(told)]
        try:
            united = self._gathered(metadata, said, order)
        except BaseException:
            stores = [self.stores[root] for root in order.roots]
            if remove((stores[file.root], file.path) for one in said for file in one.contribution.files):
                lead.unmark()
            raise
        lead.commit(united, [dump_contribution(one.contribution) for one in said])
        lead.tidy_up(self._reporter)
        self._reporter.finished()

    def _gathered(self, metadata: Metadata, said: Sequence[Said], order: _Order) -> Agreement:
        if len(said) != order.size:
            raise InvalidArgument(f"{order.size} ranks were to write, {len(said)} have")
        first = [item.index.fqn for item in self.local.items] if self.local else []
        flat = gather(metadata, said, first, flat=order.flat is True)
        count = len(flat.leaves)
        return Agreement(order.attempt, flat, count, [], range(count), order.roots, late=True)


def _known(plan: SavePlan, flat: bool | None) -> bool:  # noqa: FBT001
    """Whether the state is flat; where the coordinator can't tell, as it was when the plan was cached."""
    if flat is None:
        earlier = plan.storage_data
        flat = earlier.flat if isinstance(earlier, _Order) else None
    if flat is None:
        raise InvalidArgument("the planner has lost plan.storage_data; use one without a cache of plans")
    return flat


def _is_flat(plans: Sequence[SavePlan]) -> bool | None:
    """Whether the state of all ranks is a plain dict of tensors: the section `model` itself; None if all is cached."""
    if not any(plan.usable for plan in plans):
        return None
    items = [(item, plan.planner_data) for plan in plans for item in plan.items]
    return bool(items) and all(
        item.type != WriteItemType.BYTE_IO and len(path_of(item.index.fqn, said)) == 1 for item, said in items
    )


def _layers(paths: Sequence[str]) -> list[list[int]]:
    """Places of paths, such that no path comes twice in a layer."""
    seen: Counter[str] = Counter()
    layers: list[list[int]] = []
    for place, path in enumerate(paths):
        if seen[path] == len(layers):
            layers.append([])
        layers[seen[path]].append(place)
        seen[path] += 1
    return layers


def _united(given: Sequence[Contribution]) -> Contribution:
    whole = Contribution([])
    for one in given:
        whole.parts.update({len(whole.files) + at: boxes for at, boxes in one.parts.items()})
        whole.files += one.files
    return whole
