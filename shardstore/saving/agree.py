"""What the ranks of a save agree on before they write: the same call, the same state, and who writes what.

Of equal states a fingerprint is compared and nothing else is sent. Of different ones (pipeline stages) one rank of each
kind sends its structure, and rank 0 unites them.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardstore import strictjson, tree
from shardstore.errors import InvalidArgument, UnsupportedState
from shardstore.hashing import DEFAULT, digest
from shardstore.plan import Replica, share_out
from shardstore.ranks import Ranks
from shardstore.saving.attempt import Agreement, Options, new_attempt
from shardstore.saving.meshes import SMALL, Meshes, digest_of, siblings
from shardstore.specs import Box, TensorSpec

_compared: set[tuple[Any, ...]] = set()  # names, shapes and ranks of what has been compared whole
_LIMIT = 1 << 30
_NOTE = (
    "buffers of modules (statistics of BatchNorm, say) differ between ranks: those of the first rank that has them are "
    "saved"
)


def agree(
    flat: tree.Flat, options: Options, settings: dict[str, Any], ranks: Ranks, begin: Callable[[str], list[int]]
) -> Callable[[], Agreement]:
    """Talk with all ranks; returns what makes the agreement of it, in the next phase, so that its errors are told.

    `settings`: what must be equal everywhere. `begin`: on rank 0 of several, the look at the place; returns the order
    of the roots.
    Both raise UnsupportedState, this one also InvalidArgument, PeerError, and what `begin` raises.
    """
    if ranks.size == 1:
        _refuse_parts(flat)
        return lambda: Agreement.alone(flat, options.attempt)
    return _Talk(flat, ranks, settings, begin, options.attempt).agree()


def _refuse_parts(flat: tree.Flat) -> None:
    for leaf in flat.leaves:
        if leaf.part is not None and leaf.part.box != Box.whole(leaf.spec.shape):
            raise tree.refuse(
                leaf.path, "this DTensor is spread over several ranks: let all of them save it, with their group"
            )


class _Talk:
    """One agreement among several ranks."""

    def __init__(
        self, flat: tree.Flat, ranks: Ranks, settings: dict[str, Any], begin: Callable[[str], list[int]],
        attempt: str | None,
    ) -> None:  # fmt: skip
        self._ranks, self._settings, self._begin, self._attempt = ranks, settings, begin, attempt
        self._flat = flat
        self._united: tree.Flat | None = None
        self._elsewhere: set[int] = set()  # split tensors that ranks of another kind write

    def agree(self) -> Callable[[], Agreement]:
        reply = strictjson.loads(self._ranks.share("begin", self._record, self._judge), limit=_LIMIT)
        if reply["differ"]:
            kinds: list[int] = reply["kinds"]
            data = self._ranks.share("merge", lambda: self._member(kinds), lambda results: self._unite(results, kinds))
            return lambda: self._merged(reply, strictjson.loads(data, limit=_LIMIT))
        return lambda: self._same(reply)

    def _same(self, reply: Any) -> Agreement:
        _compared.add(self._compared_as)
        self._flat.aliases = self._ties(dict(reply["ties"]))
        self._meshes.meet(reply["siblings"][0])
        count = len(self._flat.leaves)
        everybody = tuple(range(self._ranks.size))
        plain = [
            Replica(number, leaf.spec.nbytes, everybody)
            for number, leaf in self._plain()
            if number not in self._flat.buffers
        ]
        owned = self._owned(plain, reply["loads"], range(count))
        if self._ranks.rank == 0:
            owned += [number for number, _ in self._plain() if number in self._flat.buffers]
        return self._agreement(reply, count, owned, range(count))

    def _agreement(self, reply: Any, count: int, owned: list[int], numbers: Sequence[int]) -> Agreement:
        return Agreement(
            reply["attempt"], self._flat, count, sorted(owned), numbers, reply["roots"], self._united, reply["late"],
            reply["notes"],
        )  # fmt: skip

    # ---------------------------------------------------------------------------------- the first round

    def _record(self) -> bytes:
        """What this rank says first."""
        self._flat = _settled(self._flat, self._ranks.members())
        tensors = _tensors_print(self._flat)
        self._print = _fingerprint(self._flat, tensors)
        self._compared_as = tensors, *self._ranks.members()
        known = self._compared_as in _compared
        self._meshes = Meshes(self._flat, self._ranks.size)
        plain = [(number, leaf) for number, leaf in self._plain() if number not in self._flat.buffers]
        small = [leaf for _, leaf in plain if leaf.spec.nbytes <= SMALL]
        large = [leaf for _, leaf in plain if leaf.spec.nbytes > SMALL]
        buffers = [leaf for number, leaf in self._plain() if number in self._flat.buffers]
        load = sum(leaf.tensor.nbytes // max(1, len(leaf.part.places)) for leaf in self._flat.leaves if leaf.part)
        record = {
            "settings": self._settings, "print": self._print, "small": digest_of(small), "buffers": digest_of(buffers),
            "large": "" if known else digest_of(large), "load": load, "own": len(self._flat.nodes),
            "meshes": self._meshes.told(self._ranks.rank, large=not known), "ties": sorted(self._flat.aliases.items()),
        }  # fmt: skip
        return strictjson.dumps(record)

    def _judge(self, results: Sequence[bytes]) -> bytes:
        """On rank 0: what all records say together."""
        records = [strictjson.loads(result, limit=_LIMIT) for result in results]
        _same_settings([record["settings"] for record in records])
        values = [{record[name] for record in records} - {""} for name in ("print", "small", "large")]
        notes = []
        if len({record["buffers"] for record in records}) > 1 and len(values[0]) == 1:
            notes.append(_NOTE)
        attempt, kinds = self._attempt or new_attempt(), _kinds([record["print"] for record in records])
        same = siblings(kinds, [record["meshes"] for record in records])
        ties = {number: target for record in reversed(records) for number, target in record["ties"]}
        reply = {
            "attempt": attempt, "roots": self._begin(attempt), "notes": notes,
            "differ": any(len(found) > 1 for found in values), "loads": [record["load"] for record in records],
            "ties": sorted(ties.items()), "kinds": kinds, "late": any(record["own"] for record in records),
            "siblings": same,
        }  # fmt: skip
        return strictjson.dumps(reply)

    def _ties(self, ties: dict[int, int]) -> dict[int, int]:
        """The ties that any rank sees: of an empty part none can be told. Raises where ours contradict."""
        for number, target in ties.items():
            one, other = self._flat.leaves[number], self._flat.leaves[target]
            if one.tensor.numel() and self._flat.aliases.get(number) != target:
                raise tree.refuse(
                    one.path,
                    f"on another rank this tensor is tied to {other.path}, on rank {self._ranks.rank} it is not",
                )
        return ties

    def _plain(self) -> list[tuple[int, tree.Leaf]]:
        """The tensors that are whole on this rank and stored for themselves."""
        aliases = self._flat.aliases
        return [(n, leaf) for n, leaf in enumerate(self._flat.leaves) if leaf.part is None and n not in aliases]

    def _owned(self, plain: Iterable[Replica], loads: list[int], numbers: Sequence[int]) -> list[int]:
        """Local numbers of what this rank writes. `plain`: what is dealt with the same outcome on every rank."""
        here, rank = self._flat, self._ranks.rank
        split = [
            Replica(number, leaf.tensor.nbytes, self._meshes.holders(leaf.part))
            for number, leaf in enumerate(here.leaves)
            if leaf.part is not None and leaf.tensor.numel() and number not in here.aliases
            and number not in self._elsewhere
        ]  # fmt: skip
        mine = [number for number, owner in share_out(split).items() if owner == rank]
        local = {number: at for at, number in enumerate(numbers)}
        dealt = share_out(plain, loads)
        return mine + [local[number] for number, owner in dealt.items() if owner == rank]

    # -------------------------------------------------------------------- the second, where states differ

    def _merged(self, first: Any, reply: Any) -> Agreement:
        kind: int = first["kinds"][self._ranks.rank]
        numbers: list[int] = reply["numbers"][kind]
        local = {number: at for at, number in enumerate(numbers)}
        self._meshes.meet(first["siblings"][kind])
        first["notes"] += reply["notes"]
        self._flat.aliases = self._ties({local[a]: local[b] for a, b in reply["aliases"] if a in local and b in local})
        plain = [Replica(number, nbytes, tuple(holders)) for number, nbytes, holders in reply["plain"]]
        shared = {local[number]: storer for number, storer in reply["shared"] if number in local}
        self._elsewhere = {number for number, storer in shared.items() if storer != kind}
        owned = self._owned(plain, first["loads"], numbers)
        agreement = self._agreement(first, reply["count"], owned, numbers)
        agreement.shared = [number for number in shared if self._flat.leaves[number].part is not None]
        return agreement

    def _member(self, kinds: list[int]) -> bytes:
        """The digests of this rank's plain tensors; and its structure, if it is the first of its kind."""
        flat, rank = self._flat, self._ranks.rank
        digests = {number: digest_of([leaf]) for number, leaf in self._plain()}
        plain = {
            leaf.path: [digests[flat.aliases.get(number, number)], leaf.spec.nbytes, number in flat.buffers]
            for number, leaf in enumerate(flat.leaves)
            if leaf.part is None
        }
        structure = None
        if kinds.index(kinds[rank]) == rank:
            structure = {
                "state": flat.state, "flat": flat.flat, "left": flat.left, "paths": [leaf.path for leaf in flat.leaves],
                "specs": [[leaf.spec.dtype, list(leaf.spec.shape)] for leaf in flat.leaves],
                "ties": sorted(flat.aliases.items()),
                "split": [number for number, leaf in enumerate(flat.leaves) if leaf.part is not None],
            }  # fmt: skip
        return strictjson.dumps({"plain": plain, "structure": structure})

    def _unite(self, results: Sequence[bytes], kinds: list[int]) -> bytes:
        """On rank 0: one state of all."""
        told = [strictjson.loads(result, limit=_LIMIT) for result in results]
        members, split = [], []
        for kind in range(max(kinds) + 1):
            ranks = [rank for rank, found in enumerate(kinds) if found == kind]
            given = told[ranks[0]]["structure"]
            split.append(given["split"])
            specs = [TensorSpec(dtype, tuple(shape)) for dtype, shape in given["specs"]]
            ties = dict(given["ties"])
            members.append(
                tree.Member(given["state"], given["paths"], specs, ties, given["left"], given["flat"], ranks)
            )
        united = tree.unite(members)
        nothing = torch.empty(0, device="cpu")
        leaves = [tree.Leaf(path, spec, nothing) for path, spec in zip(united.paths, united.specs, strict=True)]
        self._united = tree.Flat(
            leaves, united.aliases, united.state, united.flat, united.left, merged=len(members) > 1
        )
        plain, differ = _holders([one["plain"] for one in told], united)
        return strictjson.dumps({
            "count": len(united.paths), "numbers": united.numbers, "aliases": sorted(united.aliases.items()),
            "plain": plain, "notes": [_NOTE] if differ else [], "shared": _shared(united.numbers, split),
        })  # fmt: skip


def _shared(numbers: Sequence[Sequence[int]], split: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Split tensors that several kinds of ranks have, each with the kind that writes it; -1: those that have it whole.

    `numbers`: of each kind's tensors in all; `split`: which of its own are split.
    """
    had = list(map(set, numbers))
    parted = [{mine[at] for at in own} for mine, own in zip(numbers, split, strict=True)]
    shared = []
    for number in sorted(set().union(*parted)):
        kinds = [kind for kind, mine in enumerate(had) if number in mine]
        whole = any(number not in parted[kind] for kind in kinds)
        if len(kinds) > 1:
            shared.append((number, -1 if whole else kinds[0]))
    return shared


def _settled(flat: tree.Flat, members: Sequence[int]) -> tree.Flat:
    """The state with numbers of ranks in the group for global ones, and what all ranks hold whole as plain tensors."""
    if not any(map(operator.attrgetter("part"), flat.leaves)):
        return flat
    place = {member: rank for rank, member in enumerate(members)}
    leaves = []
    for leaf in flat.leaves:
        part = leaf.part
        if part is not None:
            strange = [rank for rank in part.mesh if rank not in place]
            if strange:
                raise tree.refuse(leaf.path, f"this DTensor lies on rank {strange[0]} as well, which is not in group=")
            part = part._replace(mesh=tuple(place[rank] for rank in part.mesh))
            everywhere = len(part.places) == len(members) and part.box == Box.whole(leaf.spec.shape)
            if everywhere or not leaf.spec.nbytes:  # of nothing, everybody holds all
                part = None
        leaves.append(leaf._replace(part=part))
    return dataclasses.replace(flat, leaves=leaves)


def _tensors_print(flat: tree.Flat) -> str:
    """A fingerprint of paths, dtypes and shapes: the same at every save of a training."""
    specs = dict.fromkeys(leaf.spec for leaf in flat.leaves)
    kinds = {spec: at for at, spec in enumerate(specs)}
    rows = [[leaf.path, kinds[leaf.spec], leaf.part is None] for leaf in flat.leaves]
    return digest(DEFAULT, json.dumps([[[spec.dtype, spec.shape] for spec in specs], rows]).encode()).hex()


def _fingerprint(flat: tree.Flat, tensors: str) -> str:
    """Of structure and plain values as well."""
    return digest(DEFAULT, tensors.encode(), strictjson.dumps([flat.flat, flat.left, flat.state])).hex()


def _same_settings(settings: Sequence[dict[str, Any]]) -> None:
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other.get(name) != value:
                raise InvalidArgument(
                    f"rank 0 calls save with {name}={value!r}, rank {rank} with {other.get(name)!r}: every rank must "
                    "give the same"
                )


def _kinds(prints: Sequence[str]) -> list[int]:
    """By rank, which kind of state it has: numbered in the order in which they come."""
    order = {found: at for at, found in enumerate(dict.fromkeys(prints))}
    return [order[found] for found in prints]


def _holders(plain: Sequence[dict[str, Any]], united: tree.Union) -> tuple[list[list[Any]], bool]:
    """Number, bytes and holders of every plain tensor, and whether buffers differ.

    Raises UnsupportedState where ranks hold different values of anything else.
    """
    found: dict[str, tuple[str, int, bool, list[int]]] = {}
    differ = False
    for rank, tensors in enumerate(plain):
        for path, (mine, nbytes, buffer) in tensors.items():
            first, _, _, holders = found.setdefault(path, (mine, nbytes, buffer, []))
            differ |= mine != first
            if mine != first and not buffer:
                raise UnsupportedState(
                    f"{path}: rank {holders[0]} and rank {rank} hold different values of this tensor; {tree.REMEDY}",
                    path=path,
                )
            holders.append(rank)
    numbers = {path: number for number, path in enumerate(united.paths)}
    rows = [
        [numbers[path], nbytes, holders[:1] if buffer else holders]
        for path, (_, nbytes, buffer, holders) in found.items()
        if numbers[path] not in united.aliases
    ]
    return rows, differ
