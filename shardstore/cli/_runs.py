"""A run as `shardstore ls` shows it: its checkpoints in their order, with losses and marks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardstore.cli._output import complain, remark, size, when
from shardstore.errors import Damaged, UnsupportedVersion
from shardstore.run import OwnerRecord, Run, RunCheckpoint, RunInfo
from shardstore.run import info as run_info

COLUMNS = ">STEP TIME >SIZE >LOSS ATTEMPT STATE PATH MARKS"


@dataclass(frozen=True, slots=True)
class RunView:
    """What stands beside the rows: the run, its owner, and by folder its checkpoints and the losses at their steps."""

    info: RunInfo
    owner: OwnerRecord | None
    found: Mapping[str, RunCheckpoint]
    losses: Mapping[str, float]
    newest: str | None

    def order(self, path: str) -> tuple[bool, int, int]:
        """Where a row stands: all that may be resumed from in the order of saving, the rest as it was."""
        one = self.found.get(path)
        return (False, *one.order) if one and one.usable else (True, 0, 0)

    def members(self, path: str) -> dict[str, Any]:
        """What --json has of a row beside what every listing has."""
        one = self.found.get(path)
        if one is None:
            return dict.fromkeys(["owner", "seq", "loss", "pinned", "quarantined", "newest", "left_behind"])
        known = one.state == "committed"
        return {
            "owner": one.owner if known else None,
            "seq": one.seq if known else None,
            "loss": plain(self.losses.get(path)),
            "pinned": one.pinned,
            "quarantined": one.quarantined,
            "newest": path == self.newest,
            "left_behind": one.usable and not one.line,
        }

    def document(self) -> dict[str, Any]:
        """What --json has of the run."""
        owner = {**asdict(self.owner), "live": self.owner.live} if self.owner else None
        return {**asdict(self.info), "owner": owner}

    def title(self) -> str:
        """The run in one line."""
        info, origin = self.info, self.info.origin
        parts = [f"run {info.run}"]
        parts += [f"forked from {origin.run} at step {origin.step}"] if origin else []
        parts += [f"generation {info.generation}, since step {info.pivots[-1].step}"] if info.pivots else []
        if self.owner:
            state = "at work" if self.owner.live else "ended" if self.owner.ended else "dead"
            parts.append(f"owner {self.owner.epoch}: process {self.owner.pid} on {self.owner.host}, {state}")
        return "; ".join(parts)

    def marks(self, path: str) -> str:
        """The marks of a row, for people."""
        members = self.members(path)
        names = [name for name in ("newest", "pinned", "quarantined", "left_behind") if members[name]]
        return ", ".join(names).replace("_", " ")


def view(url: str) -> RunView | None:
    """What there is to say about a run; None where a place is none."""
    with Run(url, listener=remark) as run:
        info = run_info.read(run.store)
        if info is None:
            return None
        found = {one.name: one for one in run.checkpoints()}
        losses = run.losses()
        at = {one.name: losses[one.step] for one in found.values() if one.line and one.step in losses}
        newest = max((one for one in found.values() if one.usable), key=lambda one: one.order, default=None)
        return RunView(info, _owner(run), found, at, newest.name if newest else None)


def _owner(run: Run) -> OwnerRecord | None:
    try:
        return run.owner()
    except (Damaged, UnsupportedVersion) as error:
        complain(str(error))  # who writes there is not known, but the checkpoints are
        return None


def plain(value: float | None) -> float | str | None:
    """A value as JSON has it: nan and infinities are strings."""
    return value if value is None or math.isfinite(value) else str(value)


def cells(row: Any, seen: RunView) -> Sequence[object]:
    """The cells of a row, as COLUMNS names them."""
    loss = seen.losses.get(row.path)
    shown = (
        row.step, row.time and when(row.time), None if row.bytes is None else size(row.bytes),
        None if loss is None else f"{loss:.6g}", row.attempt,
    )  # fmt: skip
    return [*("-" if cell is None else cell for cell in shown), row.state, row.path, seen.marks(row.path)]


def judged(row: Any, seen: RunView) -> Any:
    """A row, whose state is what the run knows of it: `foreign`, or `damaged` under a wrong name."""
    one = seen.found.get(row.path)
    return dataclasses.replace(row, state=one.state) if one and row.state == "committed" else row
