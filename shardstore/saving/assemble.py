"""From what all ranks wrote to the index of the whole, on rank 0."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from shardstore import tree
from shardstore._version import __version__
from shardstore.check import Found, utc_now
from shardstore.errors import Damaged, UnsupportedState
from shardstore.index import Contribution, FileEntry, Index, check
from shardstore.saving.attempt import Agreement, File, Lineage, Options, meta_file, written
from shardstore.specs import Box, TensorSpec


class Assembly:
    """All files of a checkpoint, and its tensors: those that the ranks share first, then those of each rank alone."""

    def __init__(self, agreed: Agreement, given: Sequence[Contribution]) -> None:
        whole = agreed.united or agreed.flat
        self.paths = [leaf.path for leaf in whole.leaves]
        self.specs = [leaf.spec for leaf in whole.leaves]
        self.files: list[FileEntry] = []
        self._parts: dict[int, dict[int, Box]] = {}
        self._agreed, self._whole, self._given = agreed, whole, given
        self._require_equal()
        taken = set(self.paths)
        self._offsets: list[int] = []
        for contribution in given:
            self._add(contribution, taken)

    def _require_equal(self) -> None:
        """That ranks with different states have the same values in what they share."""
        seen: dict[tuple[int, Box], tuple[int, str]] = {}
        for rank, contribution in enumerate(self._given):
            for number, box, digest in contribution.compared:
                first, known = seen.setdefault((number, box), (rank, digest))
                if known != digest:
                    path = self.paths[number]
                    raise tree.refuse(
                        path, f"rank {first} and rank {rank} hold different values of the same part; {tree.REMEDY}"
                    )

    def _add(self, contribution: Contribution, taken: set[str]) -> None:
        first, count = len(self.paths), self._agreed.count
        self._offsets.append(first)
        for path, spec in contribution.own:
            while path in taken:
                path += "~"  # noqa: PLW2901 - a label only; what is where, numbers say
            taken.add(path)
            self.paths.append(path)
            self.specs.append(spec)
        for at, file in enumerate(contribution.files):
            if at in contribution.parts:
                self._parts[len(self.files)] = contribution.parts[at]
            if contribution.own:
                file.pieces = [number if number < count else number - count + first for number in file.pieces]
            self.files.append(file)

    def late_meta(self, algorithm: str) -> File:
        """The file with the structure, where that had to wait for all ranks."""
        tree.join(self._whole.state, [contribution.nodes for contribution in self._given], self._offsets)
        return meta_file(self._whole, self._agreed.attempt, algorithm)

    def take(self, file: File) -> None:
        """Count a file that has been written since."""
        self.files.append(written(file))

    def index(self, options: Options, replaced: Found | None, roots: int) -> Index:
        """The index. Raises UnsupportedState where the pieces of several ranks don't make whole tensors."""
        table: dict[TensorSpec, int] = {}
        kinds = [table.setdefault(spec, len(table)) for spec in self.specs]
        parent = replaced.index.attempt if replaced else None
        line = options.lineage or Lineage("", 0, replaced.index.seq + 1 if replaced else 0, parent)
        meta = next(at for at, file in enumerate(self.files) if file.start is None)
        index = Index(
            attempt=self._agreed.attempt, run=line.run or None, owner=line.owner, seq=line.seq, parent=line.parent,
            time=utc_now(), hash=options.hash, files=self.files, meta=meta, paths=self.paths, table=list(table),
            kinds=kinds, aliases=self._whole.aliases, parts=self._parts, step=options.step, roots=roots,
            world=len(self._given),
            versions={"shardstore": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        )  # fmt: skip
        if len(self._given) > 1:
            _require_whole(index)
        return index


def _require_whole(index: Index) -> None:
    try:
        check(index, "what the ranks wrote")
    except Damaged as error:
        raise UnsupportedState(
            f"{error}: every element of a tensor must lie on a rank of the group; {tree.REMEDY}", path=""
        ) from None
