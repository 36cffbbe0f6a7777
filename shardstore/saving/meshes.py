"""Tensors on a part of the ranks: other ranks may hold the same ones, on a mesh of their own.

FSDP2 beside tensor parallelism spreads a tensor that the latter leaves alone over each data-parallel mesh anew, and no
DTensor says that the others are there. So ranks tell each other on which meshes which of their tensors lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The meshes of less than all ranks on which tensors of this rank lie.

    Each is known by its first tensor and the number of its tensors, which are the same on the meshes beside it.
    """

    def __init__(self, flat: tree.Flat, size: int) -> None:
        self._leaves: dict[tuple[int, ...], list[tree.Leaf]] = {}
        self._beside: dict[tuple[int, ...], list[Sequence[int]]] = {}
        for leaf in flat.leaves:
            if leaf.part is not None and 0 < len(leaf.part.mesh) < size:
                self._leaves.setdefault(leaf.part.mesh, []).append(leaf)

    def told(self, rank: int, *, large: bool) -> list[list[Any]]:
        """Of each mesh: its name, its ranks, the place of this one, and digests of what is here, small and large."""
        told = []
        for mesh, leaves in self._leaves.items():
            small = digest_of([leaf for leaf in leaves if leaf.tensor.nbytes <= SMALL])
            rest = digest_of([leaf for leaf in leaves if leaf.tensor.nbytes > SMALL]) if large else ""
            told.append([_name(leaves), mesh, mesh.index(rank), small, rest])
        return told

    def meet(self, siblings: Mapping[str, list[Sequence[int]]]) -> None:
        """Learn which meshes lie beside ours."""
        self._beside = {mesh: siblings[_name(leaves)] for mesh, leaves in self._leaves.items()}

    def holders(self, part: tree.Part) -> tuple[int, ...]:
        """All ranks that hold a part: those of its own mesh, and those at the same places of the meshes beside it."""
        return tuple(sorted(mesh[place] for mesh in self._beside.get(part.mesh, [part.mesh]) for place in part.places))


def _name(leaves: Sequence[tree.Leaf]) -> str:
    return f"{len(leaves)}:{leaves[0].path}"


def siblings(kinds: Sequence[int], told: Sequence[list[list[Any]]]) -> list[dict[str, list[list[int]]]]:
    """By kind of state and name of mesh: all meshes on which its ranks have the same tensors.

    Raises UnsupportedState where ranks at the same place of two of them hold different values.
    """
    found: list[dict[str, list[list[int]]]] = [{} for _ in range(max(kinds) + 1)]
    seen: dict[tuple[Any, ...], list[str]] = {}
    for kind, meshes in zip(kinds, told, strict=True):
        for name, mesh, place, *digests in meshes:
            known = found[kind].setdefault(name, [])
            if mesh not in known:
                known.append(mesh)
            first = seen.setdefault((kind, name, len(mesh), place), digests)
            if any(one and other and one != other for one, other in zip(first, digests, strict=True)):
                path = name.partition(":")[2]
                raise UnsupportedState(
                    f"{path}, or another tensor on the same ranks: those at place {place} of different meshes hold "
                    f"different values of the same part; {tree.REMEDY}",
                    path=path,
                )
    return found
