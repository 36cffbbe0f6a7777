"""A checkpoint whose files are spread over several roots: which root is which is told by its marks, not by a path."""

from __future__ import annotations

from collections.abc import Sequence

from shardstore.check.find import Found, attempts_in, find_index, need_index, read_mark
from shardstore.errors import InvalidArgument
from shardstore.index import Index, mark_name
from shardstore.storage import Store


def find_roots(stores: Sequence[Store]) -> tuple[list[Store], Found | None]:
    """The roots in the order of their numbers, and the index, which lies in the first; as given where there is none.

    Raises InvalidArgument for a root that is wrong, missing or not alone in being a part.
    """
    if len(stores) == 1:
        found = find_index(stores[0])
        if found and found.index.roots > 1:
            raise _count(stores[0], found.index, 1)
        return list(stores), found
    homes = [(store, found) for store in stores if (found := find_index(store)) is not None]
    if not homes:
        return list(stores), None
    if len(homes) > 1:
        raise InvalidArgument(f"{homes[0][0].url} and {homes[1][0].url} each hold a checkpoint of their own")
    home, found = homes[0]
    if found.index.roots != len(stores):
        raise _count(home, found.index, len(stores))
    return _ordered(home, [store for store in stores if store is not home], found.index), found


def need_roots(stores: Sequence[Store]) -> tuple[list[Store], Found]:
    """As find_roots, but raises CheckpointNotFound or Unfinished where there is no index."""
    ordered, found = find_roots(stores)
    if found is None:
        for store in stores:
            _refuse_part(store, len(stores))
        found = need_index(ordered[0])
    return ordered, found


def _refuse_part(store: Store, given: int) -> None:
    """Say so where a root without an index is a part of a striped checkpoint."""
    for attempt in attempts_in(store)[0].values():
        number, count = stripe_of(attempt.mark)
        if attempt.mark.get("state") == "striped" and count != given:
            raise InvalidArgument(
                f"{store.url} is root {number + 1} of {count} of a striped checkpoint, {given} given: give all of them"
            )


def _ordered(home: Store, others: Sequence[Store], index: Index) -> list[Store]:
    places: dict[int, Store] = {0: home}
    for store in others:
        number, count = stripe_of(read_mark(store, mark_name(index.attempt)))
        if count != index.roots or not 0 < number < count:
            raise InvalidArgument(f"{store.url} holds no part of the checkpoint at {home.url}: a wrong root?")
        if number in places:
            raise InvalidArgument(f"{store.url} and {places[number].url} hold the same part of {home.url}")
        places[number] = store
    return [places[number] for number in range(index.roots)]


def stripe_of(mark: dict[str, object]) -> tuple[int, int]:
    """Which root of how many a mark says that it lies in; (0, 1) for one that says nothing."""
    stripe = mark.get("stripe")
    if isinstance(stripe, list) and len(stripe) == 2 and all(type(n) is int for n in stripe):  # noqa: PLR2004
        return stripe[0], stripe[1]
    return 0, 1


def _count(home: Store, index: Index, given: int) -> InvalidArgument:
    return InvalidArgument(
        f"the checkpoint at {home.url} is spread over {index.roots} roots, {given} given: "
        "give all of them, in any order"
    )
