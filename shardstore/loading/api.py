"""`load`: from a checkpoint to a state, or into one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from shardstore import tree
from shardstore.errors import Damaged, InvalidArgument, Superseded, brief
from shardstore.events import Listener
from shardstore.loading.fresh import read_fresh, read_mapped
from shardstore.loading.into import fill
from shardstore.loading.source import Source
from shardstore.memory import no_gc
from shardstore.ranks import ALL, Ranks, ranks_of
from shardstore.storage import Urls

Mode: TypeAlias = Literal["copy", "map"]
Patterns: TypeAlias = str | Sequence[str]
Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

_RESTARTS = 4


def load(  # noqa: PLR0913 - the public face: every argument but one has a default
    url: Urls, *, into: Any = None, only: Patterns | None = None, device: Any = "cpu",
    mode: Mode = "copy", strict: bool = True, allow_missing: Patterns = (), allow_unexpected: Patterns = (),
    rename: Rename | None = None, expect: str | None = None, group: Any = ALL, threads: int | None = None,
    listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Load a checkpoint; every byte that is used has been verified.

    `url`: where it was saved; for a striped one all its roots, in any order.
    Without `into`: returns the state as it was saved, tensors on `device`; objects come back as plain data.
    `into`: a state like the saved one, with tensors and objects in it, which are filled in place; returned again.
    Nothing is touched before names, shapes and dtypes were found to fit. Only the sections that it has are loaded.
    `only`: patterns on paths (`model/*`, `step`). `strict=False`, `allow_missing`, `allow_unexpected` (patterns) let
    checkpoint and target differ. `rename`: checkpoint path to target path.
    `mode="map"`: private memory maps, verified once, without a copy; a file that is cut later ends the process.
    `expect`: the sha256 of shardstore.json, kept elsewhere; for checkpoints saved with `hash="sha256"`.
    `group`: the process group whose ranks load; each reads what it needs of its own accord, without communication.
    `threads`: default one for each core, 8 at most.

    Raises CheckpointNotFound, Unfinished, Damaged, Mismatch, UnsupportedVersion, StoreError, InvalidArgument.
    """
    ranks = ranks_of(group)
    if mode not in ("copy", "map"):
        raise InvalidArgument(f"mode must be 'copy' or 'map', not {brief(mode)}")
    to = _device(device)
    if mode == "map" and (into is not None or to.type != "cpu"):
        raise InvalidArgument("mode='map' gives new CPU tensors: it goes with neither into= nor another device")
    if into is None and rename is not None:
        raise InvalidArgument("rename= goes with into=; rename the keys of what load returns instead")
    if rename is not None and not (callable(rename) or isinstance(rename, Mapping)):
        raise InvalidArgument(f"rename must be a dict or a function from path to path, not {brief(rename)}")
    for name, patterns in (("only", only), ("allow_missing", allow_missing), ("allow_unexpected", allow_unexpected)):
        _check_patterns(name, patterns)

    def once() -> Any:
        with _opened(url, expect, threads, listener, storage_options) as source:
            if into is None:
                return _new(source, only, to, mode, ranks)
            with source.structuring():
                binding = tree.bind(
                    source.meta, source.index.paths, source.index.specs, source.index.aliases, into, only=only,
                    strict=strict, allow_missing=allow_missing, allow_unexpected=allow_unexpected, rename=rename,
                    rank=ranks.rank, size=ranks.size,
                )  # fmt: skip
            return _into(source, binding)

    with no_gc():
        return _restarted(once)


def _check_patterns(name: str, patterns: Patterns | None) -> None:
    several = isinstance(patterns, (list, tuple)) and all(isinstance(pattern, str) for pattern in patterns)
    if not (patterns is None or isinstance(patterns, str) or several):
        raise InvalidArgument(f"{name} must be a pattern or a list of patterns, not {brief(patterns)}")


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"{brief(device)} is no device of torch's: {str(error)[:200]}") from None


def _restarted(work: Callable[[], Any]) -> Any:
    """Do the work again where the checkpoint was replaced under it."""
    for _ in range(_RESTARTS):
        with contextlib.suppress(Superseded):
            return work()
    return work()


@contextlib.contextmanager
def _opened(
    url: Urls, expect: str | None, threads: int | None, listener: Listener | None,
    storage_options: Mapping[str, Any] | None,
) -> Iterator[Source]:  # fmt: skip
    source = Source(url, expect=expect, threads=threads, listener=listener, storage_options=storage_options)
    try:
        yield source
    finally:
        source.close()


def _new(source: Source, only: Patterns | None, device: torch.device, mode: Mode, ranks: Ranks) -> Any:
    with source.structuring():
        selection = tree.select(source.meta, source.index.paths, only)
    aliases = source.index.aliases
    numbers: Collection[int] = (
        {aliases.get(number, number) for number in selection.numbers} if aliases else selection.numbers
    )
    source.reporter.started(sum(map(source.index.sizes.__getitem__, numbers)), len(source.index.files))
    source.check_headers(numbers)
    tensors = (read_mapped if mode == "map" else read_fresh)(source, numbers)
    if device.type != "cpu":
        tensors = {n: t if n in selection.host else t.to(device) for n, t in tensors.items()}
    for alias, target in aliases.items():
        if target in tensors:
            tensors[alias] = tensors[target]
    with source.structuring():
        state = tree.restore(selection, source.index.paths, tensors, ranks.rank, ranks.size)
    source.reporter.finished()
    return state


def _into(source: Source, binding: tree.Binding) -> Any:
    aliases, sizes = source.index.aliases, source.index.sizes
    fills = binding.fills
    if aliases:
        fills = [item._replace(number=aliases.get(item.number, item.number)) for item in fills]
    wanted = {aliases.get(number, number) for number in binding.fresh}
    split = [item for item in fills if item[2] is not None]
    parts = sum(item.tensor.nbytes for item in split)
    whole = {number for number, _, _ in fills}.difference(item.number for item in split)
    source.reporter.started(parts + sum(map(sizes.__getitem__, wanted | whole)), len(source.index.files))
    if source.index.world == 1:
        source.check_present(range(len(source.index.files)))
    source.check_headers(wanted | whole)
    new = read_fresh(source, wanted) if wanted else {}
    tensors = {n: new[aliases.get(n, n)].to(device) for n, device in binding.fresh.items()}
    fill(source, fills)
    try:
        with source.structuring():
            state = binding.finish(tensors)
    except Damaged as error:
        error.overwritten = tuple(dict.fromkeys(source.index.paths[item.number] for item in fills))
        raise
    for what, paths in zip(("missing", "unexpected"), binding.report, strict=True):
        if paths:
            source.reporter.noticed(f"{what}, as allowed: {', '.join(paths)}")
    source.reporter.finished()
    return state
