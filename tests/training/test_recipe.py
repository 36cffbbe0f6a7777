"""The recipe in docs/: what its first step makes of the script runs, and goes on as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shardstore.run import Run
from tests.kit.same import assert_same

RECIPE = Path(__file__).parents[2] / "docs" / "recipe.md"


class Killed(Exception):
    """Stands for SIGKILL."""


def script(monkeypatch, folder, kill_at=0):
    """The script after its first step, in a folder; returns the model."""
    before, after, *_ = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    setup = before[: before.index("for epoch")].replace("num_workers=2", "num_workers=0")
    built = 0

    class Model(torch.nn.Linear):
        def forward(self, batch):
            nonlocal built
            built += 1
            if built == kill_at:
                raise Killed
            return super().forward(torch.nn.functional.dropout(batch, 0.2)).square().mean()

    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    torch.manual_seed(3)
    names = {"build_model": lambda: Model(4, 2), "data": list(torch.randn(96, 4))}
    exec(setup + after.replace("every_steps=500", "every_steps=4"), names)
    return names["model"]


def test_the_first_step_of_the_recipe(tmp_path, monkeypatch):
    """Ten epochs of three batches; interrupted in the fifth, and ended bit-equal by a second start."""
    whole = script(monkeypatch, tmp_path / "whole")
    with pytest.raises(Killed):
        script(monkeypatch, tmp_path / "killed", kill_at=15)
    again = script(monkeypatch, tmp_path / "killed")
    assert_same(dict(again.state_dict()), dict(whole.state_dict()))
    with Run(tmp_path / "whole" / "run") as one, Run(tmp_path / "killed" / "run") as two:
        assert len(one.losses()) == 30
        assert_same(dict(two.losses()), dict(one.losses()))
        assert [event.step for event in two.losses().events if event.kind == "resume"] == [12]
