"""`save_async`: the state is copied, and a thread saves the copy while training goes on.

One save at a time. What goes wrong is raised at `result()`, at the next save, or at the end of the process, which then
exits with a code that is not 0; it is never only logged.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

from shardstore import tree
from shardstore.check import threads_of
from shardstore.errors import InvalidArgument, brief
from shardstore.events import Listener
from shardstore.hashing import DEFAULT
from shardstore.memory import Arena, needed, no_gc
from shardstore.plan import GroupBy, Layout, ShardOptions
from shardstore.ranks import ALL, Alone, Ranks, ranks_of
from shardstore.saving.api import Saved, save_to, telling
from shardstore.saving.attempt import Options
from shardstore.storage import Urls

NICE = 19
"""A background save takes what the training leaves: its threads run at the lowest priority."""


class Pending:
    """A save that is under way on a thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._told = False

    def staged(self) -> bool:
        """Whether the state has been copied, so that it may be changed: always, once `save_async` has returned."""
        return True

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Saved:
        """Wait for the end, for at most `timeout` seconds; returns what `save` would have, or raises its error.

        Raises TimeoutError where it has not ended by then.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save has not ended after {timeout} s")
        self._raise()
        if self._saved is None:
            raise TimeoutError("the save ended without a result")
        return self._saved

    def _raise(self) -> None:
        """Raise the error, if there is one; it counts as told then."""
        if self._error is not None:
            self._told = True
            raise self._error

    def _untold(self) -> BaseException | None:
        return None if self._told else self._error


class _Background:
    """The one background save of this process, and the memory that it copies states into."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.current: Pending | None = None
        self.lock = threading.Lock()

    def wait(self) -> None:
        """Wait for the running save; an error that nobody has seen is raised."""
        if self.current is not None:
            self.current._ended.wait()  # noqa: SLF001 - the two are one
            if self.current._untold() is not None:  # noqa: SLF001
                self.current._raise()  # noqa: SLF001

    def forget(self) -> None:
        """In a forked child: the save, its thread and its memory are the parent's."""
        self.__init__()  # type: ignore[misc]


_background = _Background()
os.register_at_fork(after_in_child=_background.forget)


def save_async(  # noqa: PLR0913 - the public face: every argument but two has a default
    state: Any, url: Urls, *, step: int | None = None, shards: int | None = None, shard_bytes: int | None = None,
    layout: Layout = "balanced", group_by: GroupBy | None = None, hash: str = DEFAULT, overwrite: bool = False,
    single_writer: bool = False, group: Any = ALL, threads: int | None = None, busy: Literal["wait", "skip"] = "wait",
    listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
) -> Pending | None:  # fmt: skip
    """Save a copy of a state on a thread; returns a Pending as soon as the copy is made.

    Arguments are those of `save`; without `threads`, all cores copy, and one thread writes, or one for each connection
    of an object store. Whatever happens to the state afterwards, tensors and plain data alike, does not
    reach the checkpoint. The copy needs as much memory as the tensors; it is kept and used again (`warm_up` makes it
    early). A process that ends meanwhile finishes the save first.

    One save runs at a time: with `busy="wait"` a second waits for it, with `busy="skip"` it returns None.
    Raises UnsupportedState and InvalidArgument at once, and the error of an earlier background save that nobody saw.
    """
    if busy not in ("wait", "skip"):
        raise InvalidArgument(f"busy must be 'wait' or 'skip', not {brief(busy)}")
    ranks = ranks_of(group, "background save")
    with telling(ranks):
        options = Options(ShardOptions(layout, shards, shard_bytes, group_by), step, hash, threads, background=True)
        if ranks.size > 1 and busy == "skip":
            raise InvalidArgument("busy='skip' is for one process alone: some ranks would skip what others begin")

    def work(flat: tree.Flat) -> Saved:
        return save_to(
            flat, url, options, ranks=ranks, overwrite=overwrite, single_writer=single_writer, listener=listener,
            storage_options=storage_options,
        )  # fmt: skip

    return in_background(state, work, threads=threads_of(threads), busy=busy, ranks=ranks)


def in_background(
    state: Any, work: Callable[[tree.Flat], Saved], *, threads: int, busy: Literal["wait", "skip"] = "wait",
    ranks: Ranks | None = None,
) -> Pending | None:  # fmt: skip
    """Copy a state, and call `work` with the copy on a thread of low priority; `threads` copy. As `save_async`."""
    ranks = ranks or Alone()
    with _background.lock:
        if busy == "skip" and _background.current is not None and not _background.current.done():
            return None
        with telling(ranks):
            _background.wait()
        ranks.prepare()
        with no_gc(), telling(ranks):
            flat = _staged(tree.flatten(state, ranks.rank), threads)
        pending = _background.current = Pending()
        # No daemon: a process whose main thread has ended waits for it.
        threading.Thread(target=_run, args=(pending, flat, work), name="shardstore-save", daemon=False).start()
    return pending


def warm_up(state: Any) -> int:
    """Make the memory for background saves of such a state now, rather than at the first; returns its bytes."""
    with _background.lock:
        _background.wait()
        flat = tree.flatten(state)
        tensors = [leaf.tensor for leaf in (*flat.leaves, *flat.own)]
        _background.arena.reserve(needed(tensors), pinned=any(tensor.is_cuda for tensor in tensors))
        return _background.arena.nbytes


def _staged(flat: tree.Flat, threads: int) -> tree.Flat:
    """The same with copies of its tensors; tied ones are copied once."""
    stored = [number for number in range(len(flat.leaves)) if number not in flat.aliases]
    tensors = [flat.leaves[number].tensor for number in stored] + [leaf.tensor for leaf in flat.own]
    copies = _background.arena.stage(tensors, threads)
    by_number = dict(zip(stored, copies, strict=False))
    leaves = [
        leaf._replace(tensor=by_number[flat.aliases.get(number, number)]) for number, leaf in enumerate(flat.leaves)
    ]
    own = [leaf._replace(tensor=copy) for leaf, copy in zip(flat.own, copies[len(stored) :], strict=True)]
    return dataclasses.replace(flat, leaves=leaves, own=own)


def _run(pending: Pending, flat: tree.Flat, work: Callable[[tree.Flat], Saved]) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux, of this thread and its own alone
        pending._saved = work(flat)  # noqa: SLF001 - the two are one
    except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
        pending._error = error  # noqa: SLF001
    finally:
        pending._ended.set()  # noqa: SLF001


@atexit.register
def _at_exit() -> None:
    """A failed save that nobody has asked about makes the process fail."""
    pending = _background.current
    error = pending._untold() if pending is not None else None  # noqa: SLF001
    if error is not None:
        sys.stdout.flush()
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.write("shardstore: the last background save failed\n")
        sys.stderr.flush()
        os._exit(1)
