"""Older schemas load as they are; `migrate` rewrites index and meta, and nothing else, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore import schemas
from shardstore.errors import Damaged, StoreError, Superseded, UnsupportedVersion
from shardstore.index import NAME, mark_name, parse, rewritten, schema_of
from shardstore.run import Run, migrate, plan_migration
from shardstore.storage import LocalStore
from tests.golden import make, states
from tests.kit import runs
from tests.kit.damage import files_of, index_of, meta_of, shards_of, sign, write_index
from tests.kit.faults import Fault, FaultyStore, FlippingStore, Wrapper
from tests.kit.inject import injected
from tests.kit.same import assert_same
from tests.migrate.conftest import NOTE

Start = Callable[..., None]


def moved(folder: Path, store: Any = None) -> str:
    """Migrate the checkpoint in a folder; the new digest."""
    stores = [store or LocalStore(str(folder))]
    return migrate(stores, plan_migration(stores))


def meta_document(folder: Path) -> dict[str, Any]:
    """The meta as plain JSON."""
    return json.loads((folder / meta_of(folder)).read_bytes())


# ------------------------------------------------------------------------------------------------ the chain


def test_every_golden_checkpoint_of_version_1_loads_as_it_is(golden: Path, version_2: Start):
    """A version that writes 2 reads 1 exactly as version 1 did, verifies it, opens it, and changes no byte."""
    with make.registered():
        wanted = shardstore.load(golden)
        before = files_of(golden)
        version_2()
        found = shardstore.load(golden)
    if golden.name != "values":  # a type of the user's, which has no equality
        assert_same(found, wanted)
    assert shardstore.verify(golden).ok
    with shardstore.open(golden) as ckpt:
        assert list(ckpt) == index_of(golden)["tensors"]["path"]
    assert files_of(golden) == before


def test_steps_follow_each_other(version_2: Start, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """From version 1 over 2 to 3, by two steps that know nothing of each other."""
    version_2(structure=False)
    steps = {
        **schemas.INDEX.steps,
        "shardstore/2": lambda old: {**old, "schema": "shardstore/3", "note": old["note"] * 2},
    }
    monkeypatch.setattr(schemas.INDEX, "steps", steps)
    monkeypatch.setattr(schemas.INDEX, "current", "shardstore/3")
    data = rewritten((checkpoint / NAME).read_bytes())
    assert schema_of(data) == "shardstore/3"
    assert json.loads(data)["note"] == NOTE * 2
    assert parse(data) == parse((checkpoint / NAME).read_bytes())


@pytest.mark.parametrize(
    "schema", ["shardstore/999", "shardstore/0", "1", 1, 1.0, None, True, ["shardstore/1"]], ids=repr
)
def test_Z16_an_unknown_schema_is_refused_and_nothing_is_touched(checkpoint: Path, version_2: Start, schema: Any):
    """Z16: newer, missing or odd schemas are refused by load and migrate, with both schemas known and unknown."""
    write_index(checkpoint, {**index_of(checkpoint), "schema": schema})
    before = files_of(checkpoint)
    version_2()
    for attempt in (shardstore.load, lambda place: plan_migration([LocalStore(str(place))])):
        with pytest.raises(UnsupportedVersion, match="use a newer one"):
            attempt(checkpoint)
    assert files_of(checkpoint) == before


def test_a_step_that_meets_nonsense_says_damaged(checkpoint: Path, version_2: Start, monkeypatch: pytest.MonkeyPatch):
    """A signed index that is not what its schema says can't raise a KeyError out of a step; nor does a step loop."""
    version_2()
    monkeypatch.setattr(schemas.INDEX, "steps", {"shardstore/1": lambda old: {"schema": old["nothing"]}})
    with pytest.raises(Damaged, match="not what its schema 'shardstore/1' says"):
        shardstore.load(checkpoint)
    monkeypatch.setattr(schemas.INDEX, "steps", {"shardstore/1": lambda old: old})
    with pytest.raises(UnsupportedVersion):
        shardstore.load(checkpoint)


# ------------------------------------------------------------------------------------------------ rewriting


@pytest.mark.parametrize("which", [{}, {"structure": False}, {"index": False}], ids=["both", "index", "meta"])
def test_migrate_rewrites_index_and_meta_alone(golden: Path, version_2: Start, which: dict[str, bool]):
    """Index and meta are of version 2, with the added member; all else is byte-equal; it verifies and loads."""
    with make.registered():
        wanted, before = shardstore.load(golden), files_of(golden)
        old = parse(before[NAME])
        version_2(**which)
        digest = moved(golden)
        found = shardstore.load(golden)
    after = files_of(golden)
    assert digest == sha256(after[NAME]).hexdigest()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    metas = {meta_of(golden), f"state/meta-{make.ATTEMPT}.json"} if which.get("structure", True) else set()
    assert changed == {NAME, *metas}
    assert index_of(golden).get("note") == (NOTE if which.get("index", True) else None)
    assert meta_document(golden).get("note") == (NOTE if which.get("structure", True) else None)
    new = parse(after[NAME])
    assert (new.attempt, new.time, new.paths, new.aliases, new.parts) == (
        old.attempt, old.time, old.paths, old.aliases, old.parts,
    )  # fmt: skip
    report = shardstore.verify(golden).checkpoints[0]
    assert (report.ok, report.leftovers, report.foreign) == (True, [], [])
    if golden.name != "values":
        assert_same(found, wanted)


def test_migrating_twice_does_nothing(checkpoint: Path, version_2: Start):
    """The second time there is nothing to do, and no byte changes."""
    version_2()
    digest = moved(checkpoint)
    before = files_of(checkpoint)
    assert not plan_migration([LocalStore(str(checkpoint))]).needed
    assert moved(checkpoint) == digest
    assert files_of(checkpoint) == before


def test_a_striped_checkpoint_needs_all_its_roots(shm_path: Path, version_2: Start):
    """Only its first root changes; one root alone is refused; its marks stay."""
    roots = [str(shm_path / name) for name in ("a", "b")]
    shardstore.save({"model": dict(states.flat()), "n": 1}, roots, shards=4)
    before = files_of(shm_path / "b")
    version_2()
    with pytest.raises(shardstore.InvalidArgument, match="2 roots, 1 given"):
        plan_migration([LocalStore(roots[0])])
    stores = [LocalStore(root) for root in reversed(roots)]
    migrate(stores, plan_migration(stores))
    assert files_of(shm_path / "b") == before
    assert shardstore.load(roots)["n"] == 1
    assert index_of(shm_path / "a")["schema"] == "shardstore/2"


def test_an_expected_digest_is_told_anew(shm_path: Path, version_2: Start):
    """`expect=` names the new index afterwards; the plan tells the digest that was valid before."""
    saved = shardstore.save({"model": dict(states.flat())}, shm_path / "c", hash="sha256")
    version_2()
    store = LocalStore(str(shm_path / "c"))
    plan = plan_migration([store])
    assert plan.digest == saved.digest
    digest = migrate([store], plan)
    shardstore.load(shm_path / "c", expect=digest)
    with pytest.raises(Damaged):
        shardstore.load(shm_path / "c", expect=saved.digest)


# ------------------------------------------------------------------------------------------------ trouble


def test_another_save_in_between_is_not_overwritten(checkpoint: Path, version_2: Start):
    """What was planned for one index never replaces a later one; what was written for it goes again."""
    stores = [LocalStore(str(checkpoint))]
    version_2()
    plan = plan_migration(stores)
    shardstore.save({"model": dict(states.flat())}, checkpoint, overwrite=True)
    before = files_of(checkpoint)
    with pytest.raises(Superseded):
        migrate(stores, plan)
    mark = mark_name(make.ATTEMPT)  # the overwrite has one there, which the migration takes away
    assert {**files_of(checkpoint), mark: b""} == {**before, mark: b""}


def test_another_save_right_after_is_not_replaced_by_the_old_index(checkpoint: Path, version_2: Start):
    """A save that replaces the migrated checkpoint before it is verified stays: no older index goes in its place."""
    version_2()
    saved = []

    class Raced(Wrapper):
        def put(self, key: str, body: Any, **conditions: Any) -> None:
            self.inner.put(key, body, **conditions)
            if key == NAME and not saved:
                saved.append(shardstore.save({"model": dict(states.flat())}, checkpoint, overwrite=True))

    with pytest.raises(Superseded, match="was saved last"):
        moved(checkpoint, Raced(LocalStore(str(checkpoint))))
    assert sha256((checkpoint / NAME).read_bytes()).hexdigest() == saved[0].digest
    assert shardstore.verify(checkpoint).ok
    assert not list(checkpoint.glob("state/index-*"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_at_every_operation_leaves_a_whole_checkpoint(shm_path: Path, version_2: Start, when: str):
    """Whichever call of the store fails, or loses its answer: it is of version 1 or 2, it is whole, and it loads.

    What is left over lies under the mark, and migrating again finishes the work.
    """
    wanted = shardstore.load(make.HERE / "module")
    version_2()
    for nth in range(1, 60):
        folder = Path(shutil.copytree(make.HERE / "module", shm_path / f"{when}-{nth}"))
        plan = plan_migration([LocalStore(str(folder))])
        store = FaultyStore(LocalStore(str(folder)), Fault(nth, when=when))
        try:
            migrate([store], plan)
        except (StoreError, Damaged):
            assert store.fired
        if not store.fired:
            break
        report = shardstore.verify(folder)
        assert report.ok, (nth, store.fired, report.checkpoints[0].problems)
        assert_same(shardstore.load(folder), wanted)
        moved(folder)
        assert index_of(folder)["schema"] == "shardstore/2"
        assert_same(shardstore.load(folder), wanted)
    assert nth > 10
    assert not store.fired


def test_a_new_index_that_does_not_verify_is_replaced_by_the_old_one(checkpoint: Path, version_2: Start):
    """A meta that is damaged on its way is found when it is read back; the old index stands again, byte by byte."""
    before = files_of(checkpoint)
    version_2()

    class Flipping(Wrapper):
        def put(self, key: str, body: Any, **conditions: Any) -> None:
            flipped = key.startswith("state/meta-")
            (FlippingStore(self.inner, key, 99) if flipped else self.inner).put(key, body, **conditions)

    with pytest.raises(Damaged, match="the old index was put back"):
        moved(checkpoint, Flipping(LocalStore(str(checkpoint))))
    assert files_of(checkpoint) == before
    assert shardstore.verify(checkpoint).ok


def test_an_index_that_would_say_something_else_is_not_written(
    checkpoint: Path, version_2: Start, monkeypatch: pytest.MonkeyPatch
):
    """Before anything is replaced, the new index is parsed and compared with the old one."""
    before = files_of(checkpoint)
    version_2()

    def wrong(data: bytes, *entry: Any) -> bytes:
        document = json.loads(rewritten(data, *entry))
        document["step"] = 12345
        return sign(json.dumps({k: v for k, v in document.items() if k != "sha256"})[:-1].encode() + b",")

    monkeypatch.setattr("shardstore.run.migrating.rewritten", wrong)
    with pytest.raises(Damaged, match="something else"):
        moved(checkpoint)
    assert files_of(checkpoint) == before


def test_a_shard_that_is_missing_stops_it(checkpoint: Path, version_2: Start):
    """The new index must find all files; the old one is put back, so that nothing looks better than it is."""
    (checkpoint / shards_of(checkpoint)[0]).unlink()
    before = files_of(checkpoint)
    version_2()
    with pytest.raises(Damaged, match="is missing"):
        moved(checkpoint)
    assert files_of(checkpoint) == before


def test_the_old_index_is_kept_until_the_new_one_is_verified(checkpoint: Path, version_2: Start):
    """While the new index is being read back the old one lies beside it, byte by byte."""
    old = (checkpoint / NAME).read_bytes()
    version_2()
    seen = []

    class Watching(Wrapper):
        def stat(self, key: str) -> Any:
            if index_of(checkpoint)["schema"] == "shardstore/2":
                seen.extend(path.read_bytes() for path in checkpoint.glob("state/index-*.json"))
            return self.inner.stat(key)

    moved(checkpoint, Watching(LocalStore(str(checkpoint))))
    assert len(seen) == len(index_of(checkpoint)["files"]) + 1
    assert set(seen) == {old}
    assert not list(checkpoint.glob("state/index-*.json"))


def test_what_a_dead_migration_leaves_can_be_pruned(checkpoint: Path, version_2: Start):
    """A copy and a meta that nothing names are leftovers under the mark, once that is a day old; the rest stays."""
    version_2()
    store = FaultyStore(LocalStore(str(checkpoint)), Fault(1, calls=frozenset({"delete"}), times=9))
    moved(checkpoint, store)
    assert store.fired
    (left,) = [one for one in shardstore.verify(checkpoint).checkpoints[0].leftovers if not one.removable]
    assert {key.partition("-")[0] for key in left.keys} == {"state/meta", "state/index", "attempt"}
    from shardstore.check import plan_leftovers, remove

    stores = [LocalStore(str(checkpoint))]
    (old,) = plan_leftovers(*stores, old=0)
    assert remove(old, *stores, old=0) == []
    report = shardstore.verify(checkpoint).checkpoints[0]
    assert (report.ok, report.leftovers, report.foreign) == (True, [], [])


def test_a_lost_answer_to_the_commit_is_found_out(checkpoint: Path, version_2: Start):
    """The index was replaced and the answer lost: reading it tells, and the work goes on to its end."""
    version_2()
    store = FaultyStore(LocalStore(str(checkpoint)), Fault(1, calls=frozenset({"put"}), key=NAME, when="after"))
    moved(checkpoint, store)
    assert store.fired == [("put", NAME)]
    assert shardstore.verify(checkpoint).ok


def test_a_reader_at_the_same_time_starts_over(checkpoint: Path, version_2: Start):
    """Who has read the old index, and finds its meta gone, reads the new one; verify does, too."""
    wanted = shardstore.load(checkpoint)
    version_2()
    state = {"done": False}

    class Between(Wrapper):
        def stat(self, key: str) -> Any:
            if not state["done"]:
                state["done"] = True
                moved(checkpoint)
            return self.inner.stat(key)

    with injected(Between):
        found = shardstore.load(checkpoint)
    assert_same(found, wanted)
    assert state["done"]


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def run_of_two(shm_path: Path) -> Path:
    """A run with two checkpoints, of which one is pinned, and a save that died."""
    with Run(shm_path / "run") as run:
        trainer = runs.Trainer(run)
        trainer.save(100)
        trainer.save(200)
        run.pin(100)
        trainer.begin(300)
    return shm_path / "run"


def test_the_command_tells_first_and_acts_with_yes(run_of_two: Path, version_2: Start, call: Any, call_json: Any):
    """A dry run changes nothing; --yes migrates each checkpoint of the run; pins, order and newest stay."""
    before = files_of(run_of_two)
    version_2()
    result = call("migrate", run_of_two)
    assert result.exit_code == 0
    assert "to migrate: 2 checkpoints of 2; nothing was changed, --yes does it" in result.stdout
    assert files_of(run_of_two) == before
    code, document = call_json("migrate", run_of_two, "--yes")
    assert (code, [row["migrated"] for row in document["checkpoints"]]) == (0, [True, True])
    assert document["checkpoints"][0]["index"] == {"before": "shardstore/1", "after": "shardstore/2"}
    after = files_of(run_of_two)
    assert {key for key in before if before[key] != after.get(key)} == {
        key for key in before if key.endswith(NAME) or ("/state/meta-" in key)
    }
    with Run(run_of_two) as run:
        found = {one.step: one for one in run.checkpoints() if one.state == "committed"}
        assert sorted(found) == [100, 200]
        assert found[100].pinned
        assert run.newest() == found[200]
        assert run.verify(200).ok
    result = call("migrate", run_of_two, "--yes")
    assert (result.exit_code, result.stdout) == (0, "migrated: 0 checkpoints of 2\n")


def test_the_command_takes_one_checkpoint_of_a_run(run_of_two: Path, version_2: Start, call: Any):
    """RUN@STEP migrates that one alone."""
    version_2()
    assert call("migrate", f"{run_of_two}@100", "--yes").exit_code == 0
    schemas_now = [json.loads(data)["schema"] for key, data in files_of(run_of_two).items() if key.endswith(NAME)]
    assert sorted(schemas_now) == ["shardstore/1", "shardstore/2"]
    with Run(run_of_two) as run:  # a run may hold both, and lists both
        assert [one.step for one in run.checkpoints() if one.usable and one.line] == [100, 200]
        assert run.candidates()[0].step == 200


def test_the_command_refuses_a_run_that_is_at_work(run_of_two: Path, version_2: Start, call: Any):
    """A living owner, who could not read the new schema, is not surprised by it."""
    version_2()
    with Run(run_of_two) as run:
        run.take_owner()
        before = files_of(run_of_two)
        for url in (run_of_two, run_of_two.parent, f"{run_of_two}@100", next(run_of_two.glob("step-*100-*"))):
            result = call("migrate", url, "--yes")
            assert result.exit_code == 1
            assert "end it before you migrate" in result.stderr
        assert files_of(run_of_two) == before


def test_the_command_leaves_alone_what_it_cannot_read(run_of_two: Path, version_2: Start, call: Any, call_json: Any):
    """A damaged index is told, with its exit code, and the other checkpoint is migrated nevertheless."""
    version_2()
    bad = next(run_of_two.glob(f"step-*100-*/{NAME}"))
    bad.write_bytes(bad.read_bytes()[:-5])
    code, document = call_json("migrate", run_of_two, "--yes")
    assert code == 3
    assert [row["migrated"] for row in document["checkpoints"]] == [True]
    assert [row["path"] for row in document["skipped"]] == [bad.parent.name]
    assert call("migrate", run_of_two / "nothing").exit_code == 5


def test_nothing_to_migrate_today(checkpoint: Path, call: Any):
    """This version writes what it reads: a dry run says so, and so does --yes."""
    result = call("migrate", checkpoint)
    assert (result.exit_code, result.stdout) == (0, "to migrate: nothing; 1 checkpoint up to date\n")
