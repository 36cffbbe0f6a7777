"""Tensors on a part of the ranks: other ranks may hold the same ones, on a mesh of their own.

FSDP2 beside tensor parallelism spreads a tensor that the latter leaves alone over each data-parallel mesh anew, and no
DTensor says that the others are there. So ranks tell each other on which meshes their tensors lie: of ranks with the
same state, the k-th mesh of each is that of the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardstore import tree
from shardstore.errors import UnsupportedState
from shardstore.hashing import DEFAULT, new
from shardstore.memory import stream

SMALL = 1024 * 1024
"""Bytes up to which a tensor that several ranks hold is compared at every save; larger ones are at the first."""


def digest_of(leaves: Sequence[tree.Leaf]) -> str:
    """The digest of the bytes of tensors, as far as they are here."""
    state = new(DEFAULT)
    for buffer in stream([leaf.tensor for leaf in leaves]):
        state.update(buffer)
    return state.digest().hex()


class Meshes:
    """The meshes of less than all ranks on which tensors of this rank lie, in the order in which they come."""

    def __init__(self, flat: tree.Flat, size: int) -> None:
        self._leaves: dict[tuple[int, ...], list[tree.Leaf]] = {}
        for leaf in flat.leaves:
            if leaf.part is not None and 0 < len(leaf.part.mesh) < size:
                self._leaves.setdefault(leaf.part.mesh, []).append(leaf)
        self._order = {mesh: at for at, mesh in enumerate(self._leaves)}

    @property
    def paths(self) -> list[str]:
        """Of each mesh, the first tensor, for messages."""
        return [leaves[0].path for leaves in self._leaves.values()]

    def told(self, rank: int, *, large: bool) -> list[list[Any]]:
        """Of each mesh: its ranks, the place of this one, and digests of what lies here, of small and of large ones."""
        told = []
        for mesh, leaves in self._leaves.items():
            small = digest_of([leaf for leaf in leaves if leaf.tensor.nbytes <= SMALL])
            rest = digest_of([leaf for leaf in leaves if leaf.tensor.nbytes > SMALL]) if large else ""
            told.append([mesh, mesh.index(rank), small, rest])
        return told

    def holders(self, part: tree.Part, siblings: Sequence[Sequence[Sequence[int]]]) -> tuple[int, ...]:
        """All ranks that hold a part: those of its own mesh, and those at the same places of the meshes beside it."""
        at = self._order.get(part.mesh)
        meshes = [part.mesh] if at is None else siblings[at]
        return tuple(sorted(mesh[place] for mesh in meshes for place in part.places))


def siblings(kinds: Sequence[int], records: Sequence[dict[str, Any]], paths: Sequence[str]) -> list[list[list[Any]]]:
    """By kind of state and number of mesh: all meshes on which its ranks have the same tensors.

    Raises UnsupportedState where ranks at the same place of two of them hold different values.
    """
    found: list[list[list[Any]]] = [[] for _ in range(max(kinds) + 1)]
    for kind, meshes in enumerate(found):
        told = [record["meshes"] for record, of in zip(records, kinds, strict=True) if of == kind]
        for at, same in enumerate(zip(*told, strict=False)):
            _compare(same, paths[at] if at < len(paths) else "")
            meshes.append([list(mesh) for mesh in dict.fromkeys(tuple(mesh) for mesh, *_ in same)])
    return found


def _compare(same: Sequence[Sequence[Any]], path: str) -> None:
    seen: dict[tuple[int, int], list[str]] = {}
    for mesh, place, *digests in same:
        first = seen.setdefault((len(mesh), place), digests)
        if any(one and other and one != other for one, other in zip(first, digests, strict=True)):
            raise UnsupportedState(
                f"{path}, or another tensor beside it: ranks at place {place} of different meshes hold different "
                f"values of the same part; {tree.REMEDY}",
                path=path,
            )
