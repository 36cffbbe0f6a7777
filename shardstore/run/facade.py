"""`Run`: a run folder as training, the command line and people see it. Free of torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from shardstore.check import CheckpointReport, find_index, threads_of, utc_now, verify_store
from shardstore.errors import CheckpointNotFound, Damaged, Fenced, InvalidArgument, UnsupportedVersion, brief
from shardstore.events import Listener, Noticed, to_log
from shardstore.run import forking, latest, listing, loss_log, losses, marks, owners, removing, sidecars
from shardstore.run import info as run_info
from shardstore.run.info import Origin, Pivot, RunInfo
from shardstore.run.listing import RunCheckpoint
from shardstore.run.loss_log import LossWriter
from shardstore.run.losses import Losses, LossEvent
from shardstore.run.names import folder_name
from shardstore.run.owners import Owner, OwnerRecord
from shardstore.run.retention import Decision, Facts, Policy, plan_retention
from shardstore.run.sidecars import Sidecar
from shardstore.storage import LocalStore, Store, join, open_store, unwrap


class Run:
    """A run folder. Nothing is made or changed until a method that says so is called. A context manager.

    `url`: a path or URL; a relative path stays what it is when the process changes its folder. `storage_options`: as in
    `save`. `single_writer`: the caller's word that nobody else writes there, for stores without conditional puts.
    `listener` gets events; default: the logger `shardstore`.
    """

    def __init__(
        self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *,
        listener: Listener | None = None, single_writer: bool = False,
    ) -> None:  # fmt: skip
        self._options = storage_options
        self._listener = to_log if listener is None else listener
        self._single_writer = single_writer
        self._log: LossWriter | None = None
        self.store = self._open(url)
        local = unwrap(self.store)
        place = os.path.join(os.getcwd(), local.url) if isinstance(local, LocalStore) else os.fspath(url)
        self.url = place.rstrip("/") or "/"

    def _open(self, url: str | os.PathLike[str]) -> Store:
        return open_store(url, storage_options=self._options, listener=self._listener)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[Store]:
        """The store at the folder of a checkpoint, or with `""` at that of the run."""
        store = self._open(join(self.url, name))
        try:
            yield store
        finally:
            store.close()

    def notice(self, what: str, *, warning: bool = True) -> None:
        """Tell the listener something about this run."""
        self._listener(Noticed(what, self.url, warning))

    # -- what it is

    @property
    def info(self) -> RunInfo:
        """What run.json says, read anew. Where it is lost, the newest checkpoint tells the id.

        Raises CheckpointNotFound where there is no run; Damaged, UnsupportedVersion, StoreError.
        """
        found = run_info.read(self.store) or self._adopted()
        if found is None:
            raise CheckpointNotFound(f"{self.url} is no run: it has neither {run_info.NAME} nor a checkpoint of one")
        return found

    def _adopted(self) -> RunInfo | None:
        """What the checkpoints say of a run whose run.json has gone."""
        found = [one for one in self._scan(None) if one.usable and one.run]
        newest = max(found, key=lambda one: one.order, default=None)
        return RunInfo(str(newest.run), committed=True) if newest else None

    @property
    def id(self) -> str:
        """The id of the run, which stands in the index of each checkpoint."""
        return self.info.run

    def create(self) -> RunInfo:
        """Make the place a run, unless it is one; returns what run.json says. Its parent folder must exist."""
        present = run_info.read(self.store)
        if present is not None:
            return present
        adopted = self._adopted()
        if adopted is not None:
            self.notice(f"{run_info.NAME} was lost, and is made again from the checkpoints")
        new = adopted or RunInfo(run_info.new_id())
        return run_info.create(self.store, new, single_writer=self._single_writer)

    # -- checkpoints

    def checkpoints(self, *, sizes: bool = False) -> list[RunCheckpoint]:
        """All checkpoints: those that may be resumed from first, the newest last; then unfinished and damaged ones.

        Reads the head of each index, with `sizes` all of it. An empty list where there is no run.
        """
        return self._scan(run_info.read(self.store) or self._adopted(), sizes=sizes, notice=self.notice)

    def _scan(self, info: RunInfo | None, **how: Any) -> list[RunCheckpoint]:
        with self.opened("") as fresh:  # one that has been used keeps files open, also those that have been removed
            return listing.scan(fresh, self.url, info, **how)

    def candidates(self) -> list[RunCheckpoint]:
        """What may be resumed from, best first: the newest and what leads to it, then what was left behind.

        Raises UnsupportedVersion where a newer shardstore has written to the run: what is newest can't be told then.
        """
        return _candidates(self.checkpoints())

    def newest(self) -> RunCheckpoint | None:
        """The newest checkpoint whose index is whole, by owner epoch and number of the save; None without any.

        What was passed over is told to the listener. Its data is not read: `verify` does that.
        """
        found = self.checkpoints()
        for odd in found:
            if odd.state == "unfinished":
                self.notice(f"{odd.name} is passed over: {odd.why}", warning=False)
            elif odd.state != "committed":
                self.notice(f"{odd.name} is passed over: {odd.why}")
        whole = next((whole for one in _candidates(found) if (whole := self._with_size(one))), None)
        for bad in (one for one in found if one.state == "committed" and one.quarantined):
            if whole is None or bad.order > whole.order:
                self.notice(f"{bad.name} is passed over: it is in quarantine")
        return whole

    def _with_size(self, one: RunCheckpoint) -> RunCheckpoint | None:
        with self.opened(one.name) as store:
            try:
                found = find_index(store)
            except Damaged as error:
                self.notice(f"{one.name} is passed over: {error}")
                return None
        if found is None or found.index.attempt != one.attempt:
            return None  # removed meanwhile
        return dataclasses.replace(one, nbytes=found.index.nbytes)

    def at(self, step: int) -> RunCheckpoint:
        """The checkpoint of a step: on the line of the newest one, else the newest of that step that was left behind.

        Raises CheckpointNotFound, which names the steps that there are.
        """
        found = _best_first(self.checkpoints())
        for one in found:
            if one.step == step:
                return one
        steps = sorted({one.step for one in found})
        there = f"it has {', '.join(map(str, steps[-5:]))}" if steps else "it has no checkpoint"
        raise CheckpointNotFound(f"{self.url} has no checkpoint of step {step}; {there}")

    def find(self, which: int | str | RunCheckpoint) -> RunCheckpoint:
        """A committed checkpoint by step, by attempt or folder name, or as it is. Raises CheckpointNotFound."""
        if isinstance(which, RunCheckpoint):
            return which
        if isinstance(which, int) and not isinstance(which, bool):
            return self.at(which)
        for one in self.checkpoints():
            if which in (one.attempt, one.name) and one.state == "committed":
                return one
        raise CheckpointNotFound(f"{self.url} has no checkpoint {brief(which)}")

    def place(self, step: int, attempt: str) -> str:
        """The URL of the folder for a new checkpoint."""
        return join(self.url, folder_name(step, attempt))

    def next_seq(self) -> int:
        """The number for the next save: one above all that are there."""
        return max((one.seq + 1 for one in self.checkpoints() if one.state == "committed"), default=0)

    def commit_hint(self, step: int, attempt: str) -> None:
        """To be called after a commit: remembers that the run has had one, and names it in latest.json."""
        info = run_info.read(self.store)
        if info is not None and not info.committed:
            self._change(lambda info: dataclasses.replace(info, committed=True))
        latest.write(self.store, folder_name(step, attempt))

    def verify(self, which: int | str | RunCheckpoint, *, threads: int | None = None) -> CheckpointReport:
        """Read and check every byte of a checkpoint. Damage is reported, not raised."""
        with self.opened(self.find(which).name) as store:
            return verify_store([store], threads_of(threads, [store]), self._listener)

    # -- marks

    def pin(self, which: int | str | RunCheckpoint, reason: str = "") -> RunCheckpoint:
        """Keep a checkpoint, whatever retention says, until `unpin`."""
        one = self.find(which)
        marks.put(self.store, "pin", one.attempt, one.step, reason)
        return one

    def unpin(self, which: int | str | RunCheckpoint) -> RunCheckpoint:
        """Leave a checkpoint to retention again."""
        one = self.find(which)
        marks.remove(self.store, "pin", one.attempt)
        return one

    def quarantine(self, which: int | str | RunCheckpoint, reason: str) -> RunCheckpoint:
        """Mark a checkpoint as damaged: nothing resumes from it any more."""
        one = self.find(which)
        marks.put(self.store, "quarantine", one.attempt, one.step, reason)
        return one

    def release(self, which: int | str | RunCheckpoint) -> RunCheckpoint:
        """Take a checkpoint out of quarantine."""
        one = self.find(which)
        marks.remove(self.store, "quarantine", one.attempt)
        return one

    # -- owners

    def owner(self) -> OwnerRecord | None:
        """Who writes to the run, or did last; None where nobody ever has."""
        return owners.current(self.store)

    def take_owner(self) -> Owner:
        """Become the owner: older ones are fenced off at their next save. The run must have been created."""
        info = self.info
        above = max((one.owner for one in self.checkpoints()), default=0)
        above = max(above, info.origin.owner if info.origin else 0)
        owner = owners.claim(self.store, above=above, single_writer=self._single_writer)
        self._log = LossWriter(self.store, owner.epoch)
        return owner

    # -- losses and sidecars

    @property
    def log(self) -> LossWriter:
        """The loss log of this owner. Raises InvalidArgument before `take_owner`."""
        if self._log is None:
            raise InvalidArgument(f"only an owner records losses: take_owner() of {self.url} first")
        return self._log

    def record_loss(self, step: int, loss: float, **values: float) -> None:
        """Add the loss of a step, and other values by name, to the history; `log.flush()` makes them durable."""
        self.log.record(step, {losses.LOSS: loss, **values})

    def losses(self, name: str = losses.LOSS) -> Losses:
        """One value a step for the life of the run, with what happened on the way. `name`: another recorded value."""
        read = loss_log.read(self.store, self.notice)
        info = run_info.read(self.store)
        pivots = [LossEvent("pivot", pivot.step, 0, dataclasses.asdict(pivot)) for pivot in info.pivots] if info else []
        return read.with_events(pivots).of(name)

    def sidecar(self, name: str, *, generation: int | None = None) -> Sidecar:
        """A small JSON file beside the checkpoints, of the present generation unless said otherwise."""
        return sidecars.sidecar(self.store, name, self.info.generation if generation is None else generation)

    # -- turns

    def pivot(self) -> RunInfo:
        """Start the next generation of sidecars at the newest checkpoint, which is verified first. Losses go on.

        Raises Fenced while a living process holds the run; CheckpointNotFound without a checkpoint; Damaged.
        """
        self.refuse_live("pivot")
        newest = self._verified_newest()
        self.refuse_live("pivot")

        def turned(info: RunInfo) -> RunInfo:
            pivot = Pivot(info.generation + 1, newest.step, newest.attempt, utc_now())
            return dataclasses.replace(info, generation=pivot.generation, pivots=(*info.pivots, pivot))

        self.create()  # where run.json was lost
        return self._change(turned)

    def _verified_newest(self) -> RunCheckpoint:
        self.info  # noqa: B018 - raises where there is no run
        newest = self.newest()
        if newest is None:
            raise CheckpointNotFound(f"{self.url} has no checkpoint to go on from")
        report = self.verify(newest)
        if not report.ok:
            raise report.error or Damaged(
                f"the newest checkpoint {newest.name} is not whole: {report.problems[0].message}",
                file=report.problems[0].file, tensors=report.problems[0].tensors,
            )  # fmt: skip
        return newest

    def refuse_live(self, what: str) -> None:
        """Raise Fenced while a living process holds the run. `what`: what the caller is about to do, as a verb."""
        holder = self.owner()
        if holder is not None and holder.live:
            raise Fenced(
                f"{self.url} is held by process {holder.pid} on {holder.host}, heard of {holder.age:.0f} s ago: end it "
                f"before you {what}",
                by=holder.epoch, host=holder.host, pid=holder.pid,
            )  # fmt: skip

    def _change(self, how: Any) -> RunInfo:
        return run_info.change(self.store, how, single_writer=self._single_writer)

    def fork(self, which: int | str | RunCheckpoint, new_url: str | os.PathLike[str]) -> Run:
        """A new run at `new_url` that begins with a copy of a checkpoint, verified after copying, and its losses.

        Where the file system can share blocks, it does; either run may be removed without harm to the other.
        Raises CheckpointNotFound; CheckpointExists where `new_url` is a run; Damaged; StoreError.
        """
        info, one = self.info, self.find(which)
        new = Run(new_url, self._options, listener=self._listener, single_writer=self._single_writer)
        origin = Origin(info.run, self.url, one.attempt, one.step, one.owner, one.seq, utc_now())
        forking.check_free(new.store, one.name)
        written = forking.losses_put(new.store, origin, self.losses())
        with written, self.opened(one.name) as source, new.opened(one.name) as target:
            forking.copy_checkpoint(source, target, self._listener, single_writer=self._single_writer)
        forking.found_run(new.store, origin, single_writer=self._single_writer)
        latest.write(new.store, one.name)
        return new

    # -- retention

    def plan_retention(
        self, policies: Sequence[Policy], *, verified: Collection[str], quarantined: bool = False
    ) -> list[Decision]:
        """What the policies keep, for each checkpoint, with reasons. `verified`: attempts that were read back whole."""
        found = self.checkpoints()
        history = self.losses()
        values = {one.attempt: history.row(one.step) for one in found if one.line}
        facts = Facts(self.store.now(), values)
        return plan_retention(found, policies, verified=verified, facts=facts, quarantined=quarantined)

    def remove(self, checkpoint: RunCheckpoint) -> list[str]:
        """Remove a checkpoint that retention lets go, index first. Never raises: returns what went wrong."""
        with self.opened(checkpoint.name) as place:
            return removing.remove_from_run(self.store, place, checkpoint)

    def sweep(self) -> list[str]:
        """Remove what dead saves and removals have left, where it is old enough. Returns what went wrong."""
        errors: list[str] = []
        for one in self.checkpoints():
            if one.state == "unfinished":
                with self.opened(one.name) as place:
                    errors += removing.sweep(place)
        return errors

    def close(self) -> None:
        """Flush the loss log, and give back the store's handles."""
        try:
            if self._log is not None:
                self._log.close()
        finally:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({self.url!r})"


def _candidates(found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
    """What may be resumed from, best first. Raises UnsupportedVersion where it can't be told what is newest."""
    unknown = next((one for one in found if one.state == "unsupported"), None)
    if unknown is not None:
        raise UnsupportedVersion(f"{unknown.url}: {unknown.why}")
    return _best_first(found)


def _best_first(found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
    return sorted((one for one in found if one.usable), key=lambda one: (one.line, one.order), reverse=True)
