"""The commands on a checkpoint that `shardstore.save` wrote."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardstore


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with a tie, its optimizer, and a scheduler whose function can't be stored."""
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 300, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": 12}
    return shardstore.save(state, tmp_path_factory.mktemp("cli") / "saved", step=3, shards=2)


def test_ls_and_verify(call_json, saved):
    """The listing tells what save returned; verify finds it whole."""
    _, listed = call_json("ls", saved.url)
    (row,) = listed["checkpoints"]
    assert (row["state"], row["step"], row["bytes"], row["shards"]) == ("committed", 3, saved.nbytes, 2)
    code, found = call_json("verify", saved.url)
    assert (code, found["ok"], found["checkpoints"][0]["foreign"]) == (0, True, [])


def test_show(call, call_json, saved):
    """The details are the digest that save returned, the tie, and the function that was left to the user."""
    code, document = call_json("show", saved.url)
    assert (code, document["digest"], document["bytes"]) == (0, saved.digest, saved.nbytes)
    tensors = {tensor["path"]: tensor for tensor in document["tensors"]}
    assert tensors["model/1.weight"]["tied_to"] == "model/0.weight"
    assert tensors["model/0.weight"]["shape"] == [300, 64]
    assert [path.split("/")[0] for path in document["left"]] == ["scheduler"]
    assert "= model/0.weight" in call("show", saved.url, "--only", "model").stdout
