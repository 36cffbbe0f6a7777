"""After a commit: the new checkpoint is read back, and what the policies let go goes, one save later."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from shardstore.check import CheckpointReport, threads_of
from shardstore.errors import InvalidArgument, ShardstoreError, brief
from shardstore.run import Policy, Run, RunCheckpoint, folder_name
from shardstore.storage import LocalStore, unwrap
from shardstore.storage.posix import close_quietly, forget_pages

DAMAGE = frozenset({"size", "damaged", "digest", "header"})
"""Kinds of problems that are wrong bytes, and not only bytes that can't be had now."""


def check_policies(keep: Sequence[Policy] | Policy) -> list[Policy]:
    """The policies as a list. Raises InvalidArgument for anything else."""
    policies: list[Policy] = list(keep) if isinstance(keep, Sequence) else [keep]
    for policy in policies:
        if not callable(getattr(policy, "kept", None)):
            raise InvalidArgument(f"keep takes policies such as KeepLast(5), not {brief(policy)}")
    return policies


def verify_uncached(run: Run, one: RunCheckpoint, threads: int | None) -> CheckpointReport:
    """Read a checkpoint back and check every byte, on local file systems from the device, not from memory."""
    drop_cache(run, one.name)
    return run.verify(one, threads=threads)


def drop_cache(run: Run, name: str) -> None:
    """Have this machine forget what it holds in memory of the files of a checkpoint, where it can."""
    local = unwrap(run.store)
    if not isinstance(local, LocalStore):
        return
    for folder, _, files in os.walk(os.path.join(run.url, name)):
        for file in files:
            try:
                fd = os.open(os.path.join(folder, file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # verifying says what is wrong with it
            forget_pages(fd)
            close_quietly(fd)


class Keeping:
    """Retention of a run in training. Nothing here ever stops it: what goes wrong is told."""

    def __init__(self, run: Run, policies: Sequence[Policy], threads: int | None) -> None:
        self._run, self._policies, self._threads = run, policies, threads
        self._doomed: set[str] = set()
        self._swept = False

    def begin(self, attempt: str) -> None:
        """After a resume, which has verified that checkpoint: what is to go by it goes with the next save."""
        if self._policies:
            self._quietly(attempt, lambda: self._remove(attempt))

    def after(self, step: int, attempt: str, *, background: bool) -> None:
        """To be called after each commit, from the thread of a save in the background or from the one that trains."""
        if self._policies:
            threads = threads_of(self._threads, [self._run.store], background=background)
            self._quietly(attempt, lambda: self._look_after(step, attempt, threads))

    def _look_after(self, step: int, attempt: str, threads: int) -> None:
        one = RunCheckpoint(folder_name(step, attempt), self._run.place(step, attempt), step, attempt)
        if self._is_whole(one, threads):
            self._remove(attempt)
        if not self._swept:  # what dead saves and removals have left, where it is old enough
            self._swept = True
            self._tell(self._run.sweep())

    def _quietly(self, attempt: str, work: Callable[[], None]) -> None:
        try:
            work()
        except ShardstoreError as error:
            self._run.notice(f"nothing more was removed after the save {attempt}: {error}")
        except Exception as error:  # noqa: BLE001 - a policy of the user's may raise anything
            self._run.notice(f"nothing more was removed after the save {attempt}: {type(error).__name__}: {error}")

    def _is_whole(self, one: RunCheckpoint, threads: int) -> bool:
        if verify_uncached(self._run, one, threads).ok:
            return True
        again = verify_uncached(self._run, one, threads)
        if again.ok:
            return True
        why = str(again.error) if again.error else again.problems[0].message
        self._run.notice(f"the checkpoint {one.name} is damaged in the store, so nothing older is removed: {why}")
        if any(problem.kind in DAMAGE for problem in again.problems):
            self._run.quarantine(one, why)
        return False

    def _remove(self, attempt: str) -> None:
        plan = self._run.plan_retention(self._policies, verified={attempt})
        going = {decision.checkpoint.attempt: decision.checkpoint for decision in plan if not decision.keep}
        for one in going.keys() & self._doomed:
            self._tell(self._run.remove(going[one]))
        self._doomed = set(going)

    def _tell(self, problems: Sequence[str]) -> None:
        for problem in problems:
            self._run.notice(f"could not be removed: {problem}")
