"""`python -O` takes every assert away: what is refused with it must be refused without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardstore

ROOT = Path(shardstore.__file__).parents[1]

_SCRIPT = r"""
import json, sys
from pathlib import Path
import torch
import shardstore
from tests.kit.damage import edit_index, edit_meta, files_of, flip, index_of, meta_of, shards_of

root, answers = Path(sys.argv[1]), {}
state = {"model": {"w": torch.arange(1000.0), "t": torch.ones(3, 4).t()}, "optimizer": {"m": torch.ones(5)}, "n": 3}
place = root / "c"
shardstore.save(state, place, step=7, shards=3)
whole = files_of(place)

def outcome(name, work):
    try:
        made = work()
        answers[name] = "fine" if made is None or isinstance(made, dict) else str(made)
    except BaseException as error:
        answers[name] = type(error).__name__

def restore():
    for name, data in whole.items():
        (place / name).write_bytes(data)

def readers(name):
    target = {"model": {"w": torch.zeros(1000), "t": torch.zeros(4, 3)}, "optimizer": {"m": torch.zeros(5)}, "n": 0}
    outcome(f"{name}: load", lambda: shardstore.load(place))
    outcome(f"{name}: map", lambda: shardstore.load(place, mode="map"))
    outcome(f"{name}: into", lambda: shardstore.load(place, into=target))
    outcome(f"{name}: verify", lambda: shardstore.verify(place).exit_code)
    restore()

readers("whole")
for file in [*shards_of(place), meta_of(place), "shardstore.json"]:
    for byte in (0, 9, len(whole[file]) // 2, len(whole[file]) - 1):
        flip(place / file, byte)
        readers(f"flip {'meta' if 'meta' in file else file[:5]} {byte}")
    (place / file).write_bytes(whole[file][:-1])
    readers(f"cut {file[:5]}")
    if file != "shardstore.json":
        (place / file).unlink()
        readers(f"missing {file[:5]}")
edits = {
    "path": lambda d: d["files"][0].update(path="../x"), "digest": lambda d: d["files"][0].update(digest=""),
    "blocks": lambda d: d["files"][0].update(blocks=""), "kind": lambda d: d["tensors"]["kind"].__setitem__(0, 99),
    "alias": lambda d: d["tensors"]["aliases"].append([0, 0]), "schema": lambda d: d.update(schema="shardstore/9"),
    "hash": lambda d: d.update(hash="md5"), "bytes": lambda d: d["files"][0].update(bytes=1),
    "step": lambda d: d.update(step=-1), "extra": lambda d: d.update(extra=1), "meta": lambda d: d.update(meta=0),
    "part": lambda d: d["tensors"]["parts"].append([0, [0]]), "start": lambda d: d["files"][0].update(start=64),
    "shape": lambda d: d["tensors"]["kinds"][0].__setitem__(1, [10**6]),
    "pieces": lambda d: d["files"][0].update(pieces=[]),
}
for name, edit in edits.items():
    edit_index(place, lambda d: edit(d) and None)
    readers(f"index {name}")
for name, node in {"tag": {"$": "x"}, "tensor": {"$t": 99}, "key": {"$b": 1}}.items():
    edit_meta(place, lambda m: m["state"].update(n=node))
    readers(f"meta {name}")
targets = {"shape": torch.zeros(4), "dtype": torch.zeros(1000).double(), "kind": torch.nn.Linear(1, 1)}
for name, wrong in targets.items():
    outcome(f"target {name}", lambda: shardstore.load(place, into={"model": {"w": wrong, "t": torch.zeros(4, 3)}}))
cyclic = {}
cyclic["x"] = cyclic
bad_states = {"object": object(), "meta": torch.empty(1, device="meta"), "cycle": cyclic, "key": {object(): 1}}
for name, bad in bad_states.items():
    outcome(f"state {name}", lambda: shardstore.save({"x": bad}, root / "never"))
for options in ({"step": -1}, {"shards": 0}, {"hash": "md5"}, {"threads": 0}):
    outcome(f"argument {options}", lambda: shardstore.save(state, root / "never", **options))
outcome("exists", lambda: shardstore.save(state, place))
outcome("nothing", lambda: shardstore.load(root / "nowhere"))
outcome("slice", lambda: shardstore.open(place)["model/w"][::-1])
outcome("expect", lambda: shardstore.load(place, expect="0" * 64))
answers["never"] = (root / "never").exists()
print(json.dumps({"optimise": sys.flags.optimize, "answers": answers}))
"""


@pytest.fixture
def outcomes(tmp_path: Path):
    """What the script answers under a flag of Python's."""

    def run(*flags: str) -> dict[str, object]:
        folder = tmp_path / f"run{len(flags)}"
        folder.mkdir()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        made = subprocess.run(
            [sys.executable, *flags, "-c", _SCRIPT, str(folder)], capture_output=True, text=True, check=False, env=env,
            timeout=200,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout.splitlines()[-1])

    return run


def test_without_asserts_the_same_is_refused(outcomes):
    """Damage, hostile indexes, mismatches, bad states and arguments end in the same typed errors under `python -O`."""
    plain, optimised = outcomes(), outcomes("-O")
    assert (plain["optimise"], optimised["optimise"]) == (0, 1)
    assert optimised["answers"] == plain["answers"]
    answers = plain["answers"]
    assert answers.pop("never") is False
    whole = {name: answer for name, answer in answers.items() if name.startswith("whole")}
    assert set(whole.values()) == {"fine", "0"}
    refused = {name: answer for name, answer in answers.items() if name not in whole}
    passed = {name for name, answer in refused.items() if answer in {"fine", "0"}}
    assert passed == {"meta tag: verify", "meta tensor: verify", "meta key: verify"}  # what torch alone can judge
    assert len(refused) > 150
    assert set(refused.values()) <= {
        "Damaged", "Missing", "UnsupportedVersion", "Mismatch", "UnsupportedState", "InvalidArgument",
        "CheckpointExists",
        "CheckpointNotFound", "3", "7", "0",
    }  # fmt: skip
