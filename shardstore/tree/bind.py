"""Loading into what the caller has: compare everything first, touch nothing, and plan where each tensor goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstore.errors import InvalidArgument, Mismatch
from shardstore.specs import TensorSpec
from shardstore.tree.binding import Binding, Report, Step
from shardstore.tree.destinations import clashes
from shardstore.tree.fit import CPU, Fit
from shardstore.tree.flatten import is_flat
from shardstore.tree.into_data import Walk
from shardstore.tree.meta import Meta
from shardstore.tree.objects import kind_of
from shardstore.tree.rename import Rename, Renamed
from shardstore.tree.select import Chooser, near_names, prune_sections, root_labels, root_sections
from shardstore.tree.skeleton import ABSENT, Node
from shardstore.tree.state import FLAT_SECTION, Tensors, section_label, shorten

_WHOLE = frozenset({"stateful", "optimizer"})  # kinds of objects of which no part can be loaded alone
_SHOWN = 20  # differences that a message shows


def bind(  # noqa: PLR0913 - the options of load
    meta: Meta,
    paths: Sequence[str],
    specs: Sequence[TensorSpec],
    aliases: Mapping[int, int],
    into: Any,
    *,
    only: str | Sequence[str] | None = None,
    strict: bool = True,
    allow_missing: str | Sequence[str] = (),
    allow_unexpected: str | Sequence[str] = (),
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    rank: int = 0,
    size: int = 1,
) -> Binding:
    """Plan to load a checkpoint into `into`: a Module, or a dict of tensors, objects and plain values, nested at will.

    Only the sections that `into` names are loaded, and compared: `missing` is what it wants and the checkpoint lacks,
    `unexpected` what the checkpoint has besides; the patterns `allow_missing` and `allow_unexpected` permit some, and
    `strict=False` all. `only` (patterns) restricts both sides. `rename` is a function from path to path, or a mapping
    (in which a key without a slash renames a section); what it moves takes the place of what stood there. `device` is
    for tensors that `into` has none for; the CPU by default. `rank` of `size` ranks loads.

    Raises Mismatch with all differences at once, and InvalidArgument for an `into` that names nothing.
    """
    table = Tensors(paths, specs, paths)
    sections = root_sections(meta.state, paths, flat=meta.flat)
    fit = Fit(table, aliases, into, torch.device(device) if device is not None else CPU, rank, size)
    fit.left = meta.left
    fit.lenient = size > 1 and (meta.merged or not strict)
    if rename is not None:
        renamed = Renamed(sections, table, rename)
        sections, fit.moved, fit.renamed, fit.table = renamed.sections, renamed.moved, renamed.names, renamed.table
    targets = _targets(into, sections, flat=meta.flat)
    if only is not None:
        sections = _choose(fit, sections, only)
    _walk(fit, sections, targets, into)
    _late_checks(fit)
    report = _judge(fit, strict, Chooser(allow_missing), Chooser(allow_unexpected))
    return Binding(fit.fills, fit.fresh, report, into, fit.steps, fit.restorer)


def _targets(into: Any, sections: Mapping[Any, Node], *, flat: bool) -> dict[Any, Any]:
    """The sections of the target. One that is flat itself is the section `model`."""
    name = FLAT_SECTION[:-1]
    if kind_of(into) == "module":
        return {name: into}
    if not isinstance(into, dict):
        raise InvalidArgument(
            f"into is a dict or a Module, not a {type(into).__name__}; wrap it, as in {{'optimizer': ...}}"
        )
    if not into:
        raise InvalidArgument("into is empty, so it names nothing to load; leave it out to load everything anew")
    if flat:
        return into if name in into and not isinstance(into[name], torch.Tensor) else {name: into}
    return {name: into} if is_flat(into) and not into.keys() & sections.keys() else into


def _choose(fit: Fit, sections: Mapping[Any, Node], only: str | Sequence[str]) -> dict[Any, Node]:
    """Restrict both sides to what `only` selects."""
    fit.chooser = Chooser(only, _WHOLE)
    kept = prune_sections(sections, fit.chooser, fit.table)
    moved = {path: node for path, node in fit.moved.items() if fit.chooser(path)}
    fit.chooser.require_hits([*root_labels(sections, fit.table), *fit.moved])
    fit.moved = moved
    return kept


def _walk(fit: Fit, sections: Mapping[Any, Node], targets: Mapping[Any, Any], into: Any) -> None:
    walk = Walk(fit)
    for key, target in targets.items():
        label = section_label(key)
        node = sections.get(key, ABSENT)
        step = walk.place(node, target, label, label)
        if step is not None:
            fit.steps.plain.append(step if targets is not into else _assigned(into, key, step))
    named = {section_label(key) for key in targets}
    fit.unexpected.extend(path for path in fit.moved if path.partition("/")[0] + "/" in named)


def _assigned(into: Any, key: Any, step: Step) -> Step:
    def assign(made: Any) -> None:
        into[key] = step(made)

    return assign


def _late_checks(fit: Fit) -> None:
    """What can only be seen once the whole target is known."""
    for first, second in clashes(fit.fills):
        one, other = fit.table.labels[first], fit.table.labels[second]
        fit.differ(
            one,
            f"its target shares memory with that of {other}, but the checkpoint has two different tensors; clone() one",
        )
    for label, optimizer in fit.reordered:
        for path, scheduler in fit.objects:
            if getattr(scheduler, "optimizer", None) is optimizer:
                fit.differ(
                    label,
                    f"its groups come in another order than in the checkpoint, and {path} is loaded as well, which "
                    "counts groups by number; build the groups in the saved order, or leave the scheduler out of into",
                )


def _judge(fit: Fit, strict: bool, may_miss: Chooser, may_surplus: Chooser) -> Report:  # noqa: FBT001
    """Raise Mismatch if anything differs that isn't allowed; else report what does."""
    missing, unexpected = tuple(fit.missing), tuple(fit.unexpected)
    bad_missing = tuple(path for path in missing if strict and not may_miss.test(path))
    surplus = () if fit.lenient or not strict else unexpected
    bad_unexpected = tuple(path for path in surplus if not may_surplus.test(path))
    different = tuple(fit.different)
    if bad_missing or bad_unexpected or different:
        raise Mismatch(
            _message(bad_missing, bad_unexpected, different),
            missing=bad_missing,
            unexpected=bad_unexpected,
            different=different,
        )
    return Report(missing, unexpected)


def _message(missing: Sequence[str], unexpected: Sequence[str], different: Sequence[str]) -> str:
    parts = ["the checkpoint doesn't fit the target; nothing was touched"]
    if missing:
        parts.append(f"{len(missing)} missing (wanted, not in the checkpoint): {shorten(missing)}")
        for name in missing[:3]:
            near = near_names(name, unexpected, 1)
            if near:
                parts.append(f"perhaps {near[0]!r} is {name!r}: see rename=")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected (in the checkpoint, not wanted): {shorten(unexpected)}")
    if different:
        parts.append(f"{len(different)} different:")
        parts += [f"  {text}" for text in different[:_SHOWN]]
        if len(different) > _SHOWN:
            parts.append(f"  and {len(different) - _SHOWN} more")
    return "\n".join(parts)
