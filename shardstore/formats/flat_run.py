"""The run folder of trainers that save flat files: `step_NNNNNN.bin`, and three small JSON files beside them.

`.loss.json` is a list with one entry a step, from step 1 on: a number, `[step, loss]`, or an object with `step` and
`loss`, of which the last one of a step counts; or an object of step to loss. `.samples.json` and `.state.json` are
whatever JSON the trainer keeps.
"""

from __future__ import annotations

import os
import re
from typing import Any

from shardstore import strictjson
from shardstore.errors import CheckpointNotFound, Damaged, InvalidArgument, UnsupportedState, brief, from_os_error
from shardstore.formats.files import ForeignFile
from shardstore.formats.flat import FlatFormat
from shardstore.formats.port import Foreign, Options, only_reads

SIDECARS = ("samples", "state")
_NAME = re.compile(r"step_([0-9]{1,10})\.bin")
_LIMIT = 16 * 1024 * 1024
_LOSS_LIMIT = 1024 * 1024 * 1024


class FlatRunFormat:
    """A folder of flat files. As one checkpoint it is its newest step."""

    name = "flat-run"

    def recognises(self, path: str) -> bool:
        """Whether there is a flat file in a folder."""
        try:
            return os.path.isdir(path) and any(_NAME.fullmatch(name) for name in os.listdir(path))
        except OSError:
            return False

    def claims(self, path: str) -> bool:  # noqa: ARG002 - the port
        """Never: it is only read."""
        return False

    def read(self, path: str, options: Options) -> Foreign:
        """Open the newest step, with the losses up to it and the sidecars."""
        return self.read_step(path, max(steps_in(path)), options)

    def read_step(self, path: str, step: int, options: Options) -> Foreign:
        """Open one step. Raises CheckpointNotFound where the folder has no file of it."""
        names = steps_in(path)
        if step not in names:
            have = ", ".join(map(str, sorted(names)[-5:]))
            raise CheckpointNotFound(f"{path!r} has no file of step {step}; it has {have}")
        found = FlatFormat().read(os.path.join(path, names[step]), options)
        try:
            found.format, found.url = self.name, path
            found.losses = {at: loss for at, loss in read_losses(path).items() if at <= step}
            found.sidecars = {name: value for name in SIDECARS if (value := _read(path, name, _LIMIT)) is not None}
        except BaseException:
            found.close()
            raise
        return found

    def write(self, state: Any, path: str, options: Options) -> None:  # noqa: ARG002 - the port
        """Raises UnsupportedState: single files are written."""
        raise only_reads("a folder of flat files", "write a single step_NNNNNN.bin")


def steps_in(folder: str) -> dict[int, str]:
    """Step to file name of the flat files in a folder. Raises CheckpointNotFound, Damaged for two of one step."""
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError as error:
        raise from_os_error(error, "listing", folder) from error
    found: dict[int, str] = {}
    for name in names:
        step = int(name[len("step_") : -len(".bin")])
        if step in found:
            raise Damaged(f"{folder}: {found[step]} and {name} are of the same step", file=name)
        found[step] = name
    if not found:
        raise CheckpointNotFound(f"{folder!r} has no step_NNNNNN.bin")
    return found


def chosen_steps(folder: str, steps: Any) -> list[int]:
    """The steps that are meant by `newest`, `all` or a list, in order. Raises InvalidArgument, CheckpointNotFound."""
    have = steps_in(folder)
    if steps in (None, "newest"):
        return [max(have)]
    if steps == "all":
        return sorted(have)
    if not isinstance(steps, list | tuple) or not steps or not all(type(step) is int for step in steps):
        raise InvalidArgument(f"steps must be 'newest', 'all' or a list of steps, not {brief(steps)}")
    missing = sorted(set(steps) - have.keys())
    if missing:
        raise CheckpointNotFound(f"{folder!r} has no file of step {missing[0]}")
    return sorted(set(steps))


def read_losses(folder: str) -> dict[int, float]:
    """Step to loss; empty where there is no `.loss.json`. Raises Damaged."""
    value = _read(folder, "loss", _LOSS_LIMIT)
    if value is None:
        return {}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = [(int(step) if step.isascii() and step.isdigit() else step, loss) for step, loss in value.items()]
    elif isinstance(value, list):
        pairs = [_pair(number, entry) for number, entry in enumerate(value, 1)]
    good = all(type(step) is int and 0 <= step < 2**63 and is_loss(loss) for step, loss in pairs)
    if not good or not isinstance(value, dict | list):
        raise Damaged(f"{folder}: .loss.json has not one loss a step", file=".loss.json")
    return dict(sorted({step: float(loss) for step, loss in pairs}.items()))


def is_loss(value: Any) -> bool:
    """Whether a value is a number, and not one beyond what a float holds."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1023)


def _pair(number: int, entry: Any) -> tuple[Any, Any]:
    if isinstance(entry, dict):
        return entry.get("step"), entry.get("loss")
    if isinstance(entry, list) and len(entry) == 2:  # noqa: PLR2004 - step and loss
        return entry[0], entry[1]
    return number, entry


def _read(folder: str, name: str, limit: int) -> Any:
    """A JSON file of the folder, `.loss.json` or `<anything>.loss.json`; None where there is none."""
    ending = f".{name}.json"
    found = sorted(one for one in os.listdir(folder) if one.endswith(ending))
    if not found:
        return None
    if len(found) > 1:
        raise UnsupportedState(f"{folder} has {', '.join(found)}: keep the one that belongs to the run", path=name)
    with ForeignFile(os.path.join(folder, found[0])) as file:
        if file.nbytes > limit:
            raise Damaged(f"{file.path} has {file.nbytes:,} bytes, {limit:,} at most are read", file=found[0])
        try:
            return strictjson.loads(file.read(0, file.nbytes), limit=limit)
        except strictjson.BadJson as error:
            raise Damaged(f"{file.path} is no JSON: {error}", file=found[0]) from None
