"""Pictures of loss curves. matplotlib is an extra, imported when it is needed."""

from __future__ import annotations

import bisect
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardstore.errors import InvalidArgument, from_os_error
from shardstore.run import Losses, Origin

_MARKS = {"start": "|", "resume": "^", "pivot": "D", "fork": "s"}


@dataclass(frozen=True, slots=True)
class Curve:
    """What is drawn of a run. `checkpoints`: steps."""

    url: str
    run: str
    losses: Losses
    checkpoints: list[int]
    origin: Origin | None


def draw(curves: Sequence[Curve], file: str, metric: str) -> None:
    """Write the picture, whole or not at all. Raises InvalidArgument without matplotlib; StoreError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgument(f"plot needs matplotlib ({error}): pip install 'shardstore[plot]'") from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        _draw(axes, curve, f"C{number % 10}")
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.grid(visible=True, alpha=0.3)
    _legend(axes)
    _write(figure, file)


def _draw(axes: Any, curve: Curve, color: str) -> None:
    steps, values = list(curve.losses), list(curve.losses.values())
    name = _plain(os.path.basename(curve.url.rstrip("/")))
    own = bisect.bisect_left(steps, curve.origin.step) if curve.origin else 0
    axes.plot(steps[own:], values[own:], color=color, linewidth=1.2, zorder=2, label=name)
    # Inherited: dotted and below all else, since the run that it comes from may be in the picture, too.
    axes.plot(steps[: own + 1], values[: own + 1], color=color, linewidth=1.0, linestyle=":", zorder=1.5)
    _put_marks(axes, steps, values, curve.checkpoints, color=color, marker=".", label="checkpoint")
    for kind, marker in _MARKS.items():
        where = [event.step for event in curve.losses.events if event.kind == kind]
        _put_marks(axes, steps, values, where, color=color, marker=marker, label=kind)


def _plain(name: str) -> str:
    """A name in which matplotlib sees no formula, and which it does not hide from the legend."""
    return f" {name}".replace("$", r"\$")


def _put_marks(axes: Any, steps: list[int], values: list[float], where: list[int], **style: Any) -> None:
    """Marks on the curve; where it has no value at a step, at that of the step before."""
    at = [max(0, bisect.bisect_right(steps, step) - 1) for step in where]
    heights = [values[place] if values else 0.0 for place in at]
    if where:
        axes.plot(
            where,
            heights,
            linestyle="none",
            zorder=3,
            markersize=7,
            markeredgecolor="black",
            markeredgewidth=0.4,
            **style,
        )


def _legend(axes: Any) -> None:
    """The runs, then each kind of mark once, whatever their number."""
    handles, labels = axes.get_legend_handles_labels()
    kinds = {"checkpoint", *_MARKS}
    found = list(zip(handles, labels, strict=True))
    marks = {label: handle for handle, label in reversed(found) if label in kinds}
    chosen = [(handle, label) for handle, label in found if label not in kinds]
    chosen += [(handle, label) for label, handle in sorted(marks.items())]
    axes.legend([handle for handle, _ in chosen], [label for _, label in chosen])


def _write(figure: Any, file: str) -> None:
    temp = f"{file}.{secrets.token_hex(4)}.tmp"
    try:
        try:
            figure.savefig(temp, format=file.rpartition(".")[2], dpi=120)
            os.replace(temp, file)
        finally:
            if os.path.exists(temp):
                os.unlink(temp)
    except OSError as error:
        raise from_os_error(error, "writing the picture", file) from error
