"""Training payloads of the schema ckpt.v1, in one file and sharded: real files, from which training goes on."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardstore
from shardstore import formats
from shardstore.errors import CheckpointExists, Damaged, ShardstoreError, UnsupportedState, UnsupportedVersion
from shardstore.formats import Options
from shardstore.formats.plain import tensors_in
from shardstore.memory import load
from shardstore.training import Checkpointer
from tests.formats.weights import marker, mutations
from tests.kit.same import assert_same

LESSON = Path(__file__).parent / "data" / "lesson"
KINDS = ["plain-lists", "numpy-arrays"]


def built() -> dict[str, Any]:
    """The objects of the training that the files are of."""
    torch.manual_seed(1)
    layers = [nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
    }


def steps(state: dict[str, Any], count: int) -> list[float]:
    """Some steps on data from all three global generators; the losses."""
    losses = []
    for _ in range(count):
        inputs = torch.randn(8, 16) + random.random() + np.random.rand()  # noqa: NPY002
        state["optimizer"].zero_grad()
        loss = nn.functional.cross_entropy(state["model"](inputs), torch.randint(0, 4, (8,)))
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def by_hand(kind: str) -> tuple[list[float], dict[str, Any]]:
    """The losses of a training that was brought back with torch alone, and what it was brought back from."""
    payload = torch.load(LESSON / kind / "ckpt.pt", weights_only=False)
    state = built()
    for name, value in state.items():
        value.load_state_dict(payload[name])
    random.setstate(payload["rng"]["python"])
    np.random.set_state(payload["rng"]["numpy"])  # noqa: NPY002
    torch.set_rng_state(torch.tensor(payload["rng"]["torch_cpu"], dtype=torch.uint8))
    return steps(state, 10), payload


@pytest.mark.parametrize("form", ["ckpt.pt", "sharded"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointer_resumes_bit_equal(shm_path: Path, kind: str, form: str) -> None:
    """An import of either form, RNG as lists or arrays, goes on with the losses that a resume by hand gives."""
    wanted, payload = by_hand(kind)
    url = str(shm_path / "run")
    made = formats.convert(LESSON / kind / form, url, run=True, model=built()["model"] if form == "sharded" else None)
    assert (made.source, made.step) == ("ckpt.v1", 12)
    assert ["in the order of the model" in note for note in made.notes] == [True] * (form == "ckpt.pt")
    state = built()
    random.seed(5)
    with Checkpointer(url, state) as ckpt:
        assert (ckpt.resume(), ckpt.epoch) == (12, 2)
        assert steps(state, 10) == wanted
    with shardstore.Run(url) as run:
        assert list(run.losses().items()) == list(enumerate(payload["state"]["losses"], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_place_in_the_epoch(shm_path: Path, kind: str) -> None:
    """The batches that were used before the save are passed over, and the epoch goes on behind them."""
    formats.convert(LESSON / kind / "ckpt.pt", str(shm_path / "run"), run=True)
    with Checkpointer(str(shm_path / "run"), built()) as ckpt:
        ckpt.resume()
        assert list(ckpt.batches([10, 11, 12, 13, 14])) == [12, 13, 14]


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(shm_path: Path, kind: str) -> None:
    """A checkpoint goes to a payload of one file, equal to the original, and there again without loss."""
    formats.convert(LESSON / kind / "ckpt.pt", str(shm_path / "s"))
    formats.convert(str(shm_path / "s"), str(shm_path / "b.pt"), to_format="ckpt.v1")
    formats.convert(str(shm_path / "b.pt"), str(shm_path / "s2"))
    assert formats.diff(str(shm_path / "s"), str(shm_path / "s2")).same
    back = torch.load(shm_path / "b.pt", weights_only=True)
    original = torch.load(LESSON / "plain-lists" / "ckpt.pt", weights_only=True)
    assert back["optimizer"]["param_groups"][0].pop("param_names")
    assert_same(back, original)


def test_what_a_payload_has_no_place_for_goes_along(shm_path: Path) -> None:
    """The state of a Checkpointer, with its config and generators, comes back whole."""
    state = built()
    url = str(shm_path / "run")
    with Checkpointer(url, state, config={"lr": 1}, generators={"own": torch.Generator()}) as ckpt:
        ckpt.resume()
        steps(state, 2)
        ckpt.step(loss=1.0)
    formats.convert(f"{url}@latest", str(shm_path / "b.pt"), to_format="ckpt.v1")
    formats.convert(str(shm_path / "b.pt"), str(shm_path / "s"))
    before, after = shardstore.load(f"{url}@latest"), shardstore.load(str(shm_path / "s"))
    assert after.pop("payload")["state"] == {"losses": []}
    assert_same(after, before)


def test_states_that_are_no_training(shm_path: Path) -> None:
    """Without the section of a training, or with one more, there is no payload."""
    payload = formats.by_name("ckpt.v1")
    with pytest.raises(UnsupportedState, match="state of a training"):
        payload.write({"model": {"w": torch.ones(2)}, "x": 1}, str(shm_path / "a.pt"), Options())
    formats.convert(LESSON / "plain-lists" / "ckpt.pt", str(shm_path / "s"))
    more = {**shardstore.load(str(shm_path / "s")), "ema": {"w": torch.ones(2)}}
    with pytest.raises(UnsupportedState, match="ema"):
        payload.write(more, str(shm_path / "a.pt"), Options())
    assert not (shm_path / "a.pt").exists()


def test_order_of_parameters_is_never_guessed(shm_path: Path) -> None:
    """Shards don't tell the order of parameters: without a layout there is a note, and no run is made."""
    sharded = LESSON / "plain-lists" / "sharded"
    made = formats.convert(sharded, str(shm_path / "s"))
    assert "names can't be told" in made.notes[0]
    with pytest.raises(UnsupportedState, match="layout"):
        formats.convert(sharded, str(shm_path / "run"), run=True)
    assert not (shm_path / "run").exists() or not list((shm_path / "run").iterdir())


def test_a_run_is_never_overwritten(shm_path: Path) -> None:
    """A second import into the same run is refused, and the first stays."""
    source, url = LESSON / "plain-lists" / "ckpt.pt", str(shm_path / "run")
    formats.convert(source, url, run=True)
    with pytest.raises(CheckpointExists):
        formats.convert(source, url, run=True)
    with shardstore.Run(url) as run:
        assert [one.step for one in run.checkpoints()] == [12]


# -- hostile and damaged folders


@pytest.fixture
def folder(shm_path: Path) -> Path:
    """A copy of a sharded payload."""
    shutil.copytree(LESSON / "plain-lists" / "sharded", shm_path / "sharded")
    return shm_path / "sharded"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    ["../sharded/model.shard-000.pt", "/etc/hostname", "a/../b", "", ".", "..", "x\0y", "C:\\x", "x" * 300, 3, None],
)
def test_Z01_names_that_leave_the_folder(folder: Path, name: Any) -> None:
    """A path in the index that is no plain name is refused before any file is opened."""
    edit(folder, lambda index: index["shards"][1].update(path=name))
    with pytest.raises(Damaged, match=r"no name of a file|index\.json"):
        formats.read(str(folder))


def _row(**members: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["shards"][0].update(members)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "count": lambda index: index.update(num_shards=4),
    "one less": lambda index: index["shards"].pop(),
    "numbers": _row(shard=1),
    "tensors": _row(num_params=3),
    "no digest": _row(sha256=None),
    "empty digest": _row(sha256=""),
    "other digest": _row(sha256="0" * 64),
    "no meta digest": lambda index: index.pop("meta_sha256"),
    "other meta digest": lambda index: index.update(meta_sha256="0" * 64),
    "twice": _row(path="model.shard-001.pt"),
    "rows": lambda index: index.update(shards=[1, 2, 3]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_Z11_an_index_that_does_not_fit(folder: Path, name: str) -> None:
    """Missing and wrong digests, counts and names are damage; nothing passes for want of evidence."""
    edit(folder, CHANGES[name])
    with pytest.raises(Damaged):
        formats.read(str(folder), "ckpt.v1")


@pytest.mark.parametrize("file", ["model.shard-001.pt", "meta.pt"])
def test_Z03_shards_are_checked_before_they_are_opened(folder: Path, file: str) -> None:
    """A shard that was exchanged is refused by its hash, and by what it wants if the hash was exchanged, too."""
    planted, evil = marker(folder)
    torch.save({"schema": "ckpt-shard.v1", "tensors": evil, "keys": []}, folder / file)
    with pytest.raises(Damaged, match="sha256"):
        formats.read(str(folder))
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    member = {"meta_sha256": digest} if file == "meta.pt" else {}
    edit(folder, lambda index: index.update(member))
    edit(folder, lambda index: member or index["shards"][1].update(sha256=digest))
    with pytest.raises(UnsupportedState, match=r"builtins\.exec"):
        formats.read(str(folder))
    assert not planted.exists()


@pytest.mark.parametrize("file", ["model.shard-002.pt", "meta.pt"])
def test_a_missing_file(folder: Path, file: str) -> None:
    """A file that the index names and that is not there is an error that names it."""
    (folder / file).unlink()
    with pytest.raises(ShardstoreError, match=file):
        formats.read(str(folder))


@pytest.mark.parametrize("schema", ["ckpt.v2", "", None, 1])
def test_Z16_schemas_of_others(shm_path: Path, schema: Any) -> None:
    """A schema that is not known is never guessed at."""
    payload = torch.load(LESSON / "plain-lists" / "ckpt.pt", weights_only=True)
    torch.save({**payload, "schema": schema}, shm_path / "a.pt")
    with pytest.raises(UnsupportedVersion):
        formats.read(str(shm_path / "a.pt"), "ckpt.v1")


PLACES: dict[str, dict[str, Any]] = {
    "no state": {"state": None},
    "step": {"state": {"step": -1, "epoch": 0, "batch_in_epoch": 0, "losses": []}},
    "float": {"state": {"step": 1.0, "epoch": 0, "batch_in_epoch": 0, "losses": []}},
    "losses": {"state": {"step": 1, "epoch": 0, "batch_in_epoch": 0, "losses": ["x"]}},
    "no rng": {"rng": None},
    "short rng": {"rng": {"python": (3, (1, 2), None), "numpy": ("MT19937", [1], 0, 0, 0.0), "torch_cpu": [1, 2]}},
    "model": {"model": [1]},
}


@pytest.mark.parametrize("name", PLACES)
def test_payloads_that_make_no_sense(shm_path: Path, name: str) -> None:
    """States that no generator takes, and places that are no counts, are found at the import, not at the resume."""
    payload = torch.load(LESSON / "plain-lists" / "ckpt.pt", weights_only=True)
    torch.save({**payload, **PLACES[name]}, shm_path / "a.pt")
    with pytest.raises(Damaged):
        formats.read(str(shm_path / "a.pt"), "ckpt.v1")


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_is_in_the_index(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A mutated index is read or refused by an error of ours."""
    folder = tmp_path_factory.getbasetemp() / "mutated"
    if not folder.exists():
        shutil.copytree(LESSON / "plain-lists" / "sharded", folder)
    original = (LESSON / "plain-lists" / "sharded" / "index.json").read_bytes()
    (folder / "index.json").write_bytes(data.draw(mutations(original)))
    try:
        with formats.read(str(folder), "ckpt.v1") as found:
            for _, tensor in tensors_in(found.state):
                load(tensor)
    except ShardstoreError:
        pass
