"""What may be removed of saves that died or were overwritten: planned as a value, carried out on request.

Only files under an attempt mark that no index names, whose mark is old enough by the store's own clock. Without a mark:
not ours to touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardstore.check.find import Attempt, Found, attempt_of, attempts_in
from shardstore.check.striped import find_roots, stripe_of
from shardstore.errors import Damaged, InvalidArgument, StoreError, UnsupportedVersion
from shardstore.index import HF_NAME, MAX_BYTES, mark_name, origin_of
from shardstore.storage import Entry, Store

OLD_SECONDS = 24 * 3600.0
GRACE_SECONDS = 60.0
UNFINISHED = "temporary files"
_FOLDERS = {"", "state", ".claims"}
"""In which a save has temporary files. What lies in others belongs to other checkpoints."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files of one attempt that no index names. `removable` says whether they may go now, `why` for people."""

    attempt: str
    keys: tuple[str, ...]
    nbytes: int
    age: float | None
    removable: bool
    why: str
    root: int = 0


def plan_leftovers(*stores: Store, old: float = OLD_SECONDS, grace: float = GRACE_SECONDS) -> list[Leftover]:
    """Leftovers at the root of a store, or at all roots of a striped checkpoint; oldest first.

    `old`, `grace`: how many seconds the mark of a dead save, of an overwritten one, must be old before they may go.
    `Leftover.root` is the place of its store among `stores`. Raises InvalidArgument for a part of a striped save: all
    its roots are looked at together, or none.
    """
    try:
        ordered, found = find_roots(stores)
    except (Damaged, UnsupportedVersion):
        return []  # what an index that can't be read needs is not known
    planned: list[Leftover | None] = []
    parts = [attempts_in(store)[0] for store in stores]
    _refuse_parts(stores, parts)
    for root, store in enumerate(stores):
        now, number = store.now(), ordered.index(store)
        for attempt in parts[root].values():
            left = _judge(attempt, found, number, now, old, grace)
            planned.append(left and replace(left, root=root))
        planned += [
            _derived(store, found, now, grace) if number == 0 else None,
            _temporary(store, root, parts[root], now, old),
        ]
    return sorted((left for left in planned if left), key=lambda left: -(left.age or 0))


def _refuse_parts(stores: Sequence[Store], parts: Sequence[dict[str, Attempt]]) -> None:
    """Refuse to look at some roots of a striped save without the others."""
    for store, part in zip(stores, parts, strict=True):
        for attempt in part.values():
            _, count = stripe_of(attempt.mark)
            if count not in {1, len(stores)}:
                raise InvalidArgument(
                    f"{store.url} holds a part of a save over {count} roots ({attempt.id}): name all of them together"
                )


def _judge(attempt: Attempt, found: Found | None, root: int, now: float, old: float, grace: float) -> Leftover | None:
    named = {file.path for file in found.index.files if file.root == root} if found else set()
    if found and found.index.attempt == attempt.id and attempt.mark.get("state") == "striped":
        return None  # this mark belongs to the checkpoint
    keys = [entry for entry in attempt.files if entry.key not in named]
    if found and found.index.attempt == attempt.id and not attempt.marked and not keys:
        return None
    if not attempt.marked:
        why = "it has no attempt mark: not touched"
        return _leftover(attempt, keys, None, removable=False, why=why) if keys else None
    age = now - attempt.marked.modified
    least = grace if attempt.superseded else old
    what = "replaced by a newer save" if attempt.superseded else "a save that did not end"
    if found and found.index.attempt == attempt.id:
        what = "the mark of a committed save"
    ripe = age >= least
    why = f"{what}, {_words(age)} old" + ("" if ripe else f": kept until it is {_words(least)} old")
    return _leftover(attempt, keys, age, removable=ripe, why=why)


def _derived(store: Store, found: Found | None, now: float, grace: float) -> Leftover | None:
    """A derived index of a replaced save, where the one that replaced it died before it wrote its own."""
    entry = next((entry for entry in store.list(HF_NAME) if entry.key == HF_NAME), None)
    if entry is None or found is None:
        return None
    try:
        data = store.get(HF_NAME, limit=MAX_BYTES).data
    except StoreError:
        return None  # not known whose it is
    if origin_of(data, found.index.attempt) != "stale":
        return None
    age = now - entry.modified
    return Leftover(
        f"before {found.index.attempt}", (HF_NAME,), entry.nbytes, age, age >= grace,
        f"derived from a checkpoint that was replaced, {_words(age)} old",
    )  # fmt: skip


def _temporary(store: Store, root: int, attempts: dict[str, Attempt], now: float, old: float) -> Leftover | None:
    """What writers had not finished when they died: temporary files, and uploads, which no listing shows."""
    alive = {a.id for a in attempts.values() if a.marked and now - a.marked.modified < old}
    found = [
        entry
        for entry in store.unfinished()
        if entry.modified <= now - old and _is_here(entry.key) and attempt_of(entry.key) not in alive
    ]
    if not found:
        return None
    age = now - max(entry.modified for entry in found)
    keys, nbytes = tuple(entry.key for entry in found), sum(entry.nbytes for entry in found)
    return Leftover(UNFINISHED, keys, nbytes, age, removable=True, why=f"not finished, {_words(age)} old", root=root)


def _is_here(key: str) -> bool:
    """Whether an unfinished file is one of this checkpoint's, not of one below."""
    folder, _, name = key.rpartition("/")
    return attempt_of(key) is not None or (name.startswith(".") and folder.partition("/")[0] in _FOLDERS)


def _leftover(attempt: Attempt, files: list[Entry], age: float | None, *, removable: bool, why: str) -> Leftover:
    keys = tuple(entry.key for entry in files) + ((mark_name(attempt.id),) if attempt.marked else ())
    return Leftover(attempt.id, keys, sum(entry.nbytes for entry in files), age, removable, why)


def remove(leftover: Leftover, *stores: Store, old: float = OLD_SECONDS, grace: float = GRACE_SECONDS) -> list[str]:
    """Remove what may go, the mark last, so that what an error leaves behind can be found again. Returns errors.

    `stores` are those of the plan. Index and mark are looked at once more: a save that was stopped for a day may have
    come back meanwhile.
    """
    planned = plan_leftovers(*stores, old=old, grace=grace)
    again = {(left.attempt, left.root): left for left in planned}.get((leftover.attempt, leftover.root))
    if again is None or not again.removable:
        return [f"{leftover.attempt}: {again.why if again else 'it is needed now'}"]
    for key in again.keys:
        try:
            store = stores[leftover.root]
            (store.discard if again.attempt == UNFINISHED else store.delete)(key)
        except StoreError as error:
            return [str(error)]
    return []


def _words(seconds: float) -> str:
    """A time span, for people."""
    if seconds < 2 * 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
