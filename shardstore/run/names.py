"""Names in a run folder and its checkpoints. Only what has exactly the form in which it is written is ours."""

from __future__ import annotations

import re

from shardstore.errors import InvalidArgument, brief

SECTION = "shardstore"
"""The section of a training's state that tells where it stands."""
SCHEMA = "shardstore-training/1"
"""What that section says of itself."""
STEP_DIGITS = 8
MAX_STEP = 2**63 - 1
ATTEMPT = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"step-([0-9]{8,19})-([0-9a-f]{16})")


def folder_name(step: int, attempt: str) -> str:
    """The folder of a checkpoint: `step-00112700-3f9a2c10b7d4e6f1`."""
    if type(step) is not int or not 0 <= step <= MAX_STEP or not ATTEMPT.fullmatch(attempt):
        raise InvalidArgument(f"no checkpoint has the step {brief(step)} and the attempt {brief(attempt)}")
    return f"step-{step:0{STEP_DIGITS}}-{attempt}"


def parse_folder(name: str) -> tuple[int, str] | None:
    """Step and attempt of a folder name; None for any other name, such as `step-7`, `step-abc`, `step-12.tmp`."""
    found = _FOLDER.fullmatch(name)
    if found is None or int(found[1]) > MAX_STEP or folder_name(int(found[1]), found[2]) != name:
        return None
    return int(found[1]), found[2]
