"""What is kept: policies, and what stands above them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import InvalidArgument
from shardstore.run import Facts, KeepBest, KeepEvery, KeepFor, KeepLast, RunCheckpoint, plan_retention
from shardstore.run.listing import arrange
from tests.kit.runs import Trainer, steps

NOW = dt.datetime(2026, 3, 2, tzinfo=dt.UTC).timestamp()


def _time(age: float) -> str:
    return dt.datetime.fromtimestamp(NOW - age, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def made(*found: int, owner: int = 1, **members) -> list[RunCheckpoint]:
    """Checkpoints of these steps, saved in this order, a minute apart, the last one now."""
    times = [_time(60.0 * n) for n in reversed(range(len(found)))]
    return arrange(
        RunCheckpoint("", "", step, f"{owner}-{step}", owner=owner, seq=n, time=times[n], **members)
        for n, step in enumerate(found)
    )


def kept(checkpoints, *policies, verified=None, values=None, **more) -> list[int]:
    """Steps of what stays, everything being verified unless said otherwise."""
    facts = Facts(NOW, values or {})
    verified = {one.attempt for one in checkpoints} if verified is None else verified
    plan = plan_retention(checkpoints, policies, verified=verified, facts=facts, **more)
    assert [decision.checkpoint for decision in plan] == list(checkpoints)
    assert all(decision.reasons for decision in plan)
    return [decision.checkpoint.step for decision in plan if decision.keep]


@pytest.mark.parametrize("value", [0, -1, None, 1.5, True, "3"])
def test_X18_zero_and_less_are_refused(value):
    """A count of 0, below, or of another kind is refused at construction: nothing ever means "remove all"."""
    for make in (KeepLast, KeepEvery, lambda n: KeepBest("loss", n)):
        with pytest.raises(InvalidArgument, match="from 1 on"):
            make(value)


@pytest.mark.parametrize("duration", [0, -1, math.nan, math.inf, dt.timedelta(0), "7d", True, None])
def test_durations_that_make_no_sense(duration):
    """A duration that is no span of time above 0 is refused at construction."""
    with pytest.raises(InvalidArgument):
        KeepFor(duration)


@pytest.mark.parametrize(("metric", "mode"), [("", "min"), (None, "min"), ("loss", "best"), ("loss", None)])
def test_metrics_that_make_no_sense(metric, mode):
    """A metric without a name, or a mode that is neither, is refused at construction."""
    with pytest.raises(InvalidArgument):
        KeepBest(metric, 1, mode)


@pytest.mark.parametrize("keep", [1, 3])
def test_X18_never_more_than_k(trainer, run, keep):
    """Six saves with retention after each: on disk there are never more than K committed ones afterwards."""
    for step in range(10, 70, 10):
        one = trainer.save(step)
        for decision in run.plan_retention([KeepLast(keep)], verified={one.attempt}):
            if not decision.keep:
                assert run.remove(decision.checkpoint) == []
        assert len(run.checkpoints()) == min(keep, step // 10)
    assert steps(run.checkpoints()) == list(range(70 - 10 * keep, 70, 10))


def test_X10_the_count_goes_on_after_a_restart(trainer, run):
    """Three saves, a new process, three more: three remain, since the store is counted, not what a process saved."""
    for _ in range(2):
        again = Trainer(run, owner=trainer.owner, seq=trainer.seq, parent=trainer.parent)
        for step in range(trainer.seq * 10 + 10, trainer.seq * 10 + 40, 10):
            again.save(step)
        trainer.seq, trainer.owner, trainer.parent = again.seq, again.owner + 1, again.parent
        newest = run.newest()
        for decision in run.plan_retention([KeepLast(3)], verified={newest.attempt}):
            if not decision.keep:
                run.remove(decision.checkpoint)
    assert steps(run.checkpoints()) == [40, 50, 60]


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("best", [None, 10, 50, 30])
def test_X07_last_and_best_together(keep, best):
    """K newest, and the best wherever it is: never zero, the oldest goes first."""
    checkpoints = made(10, 20, 30, 40, 50)
    values = {f"1-{step}": {"loss": 0.5 if step == best else 1.0 + step} for step in (10, 20, 30, 40, 50) if best}
    expected = {*(10, 20, 30, 40, 50)[-keep:], *([best] if best else [])}
    assert kept(checkpoints, KeepLast(keep), KeepBest("loss"), values=values) == sorted(expected)


def test_best_values():
    """The lowest, or with `max` the highest; nan and what has no value never; of equal ones the newer."""
    checkpoints = made(10, 20, 30, 40, 50)
    values = {"1-10": {"acc": 0.9}, "1-20": {"acc": 0.9}, "1-30": {"acc": math.nan}, "1-40": {"acc": 0.1}}
    assert kept(checkpoints, KeepBest("acc", 1, "max"), values=values) == [20, 50]
    assert kept(checkpoints, KeepBest("acc", 1), values=values) == [40, 50]
    assert kept(checkpoints, KeepBest("acc", 9), values=values) == [10, 20, 40, 50]
    assert kept(checkpoints, KeepBest("other", 9), values=values) == [50]


def test_every():
    """Exact multiples; where saves fall elsewhere, the first after each; nothing between 0 and the first."""
    assert kept(made(*range(100, 1100, 100)), KeepEvery(300)) == [300, 600, 900, 1000]
    assert kept(made(0, 90, 130, 180, 210, 333, 390), KeepEvery(100)) == [0, 130, 210, 333, 390]


def test_every_prefers_the_line_that_goes_on():
    """Of two checkpoints at the same step the one that was left behind goes."""
    old, new = made(50, 100, 150), made(100, 120, owner=2)
    checkpoints = arrange([*old, *(dataclasses.replace(one, parent="1-50") for one in new[:1]), new[1]])
    plan = plan_retention(checkpoints, [KeepEvery(100)], verified={"2-120"}, facts=Facts(NOW))
    assert [decision.checkpoint.attempt for decision in plan if decision.keep] == ["2-100", "2-120"]


def test_last_prefers_the_line_that_goes_on():
    """After going on from step 50 the two last are those of the new line, not higher steps that were left behind."""
    new = [dataclasses.replace(one, parent="1-50") for one in made(60, owner=2)]
    checkpoints = arrange([*made(50, 60, 70, 80, 90, 100), *new])
    plan = plan_retention(checkpoints, [KeepLast(2)], verified={"2-60"}, facts=Facts(NOW))
    assert [decision.checkpoint.attempt for decision in plan if decision.keep] == ["1-50", "2-60"]


def test_for():
    """What is younger than the duration, as seconds or timedelta; a time that can't be read keeps."""
    checkpoints = made(10, 20, 30, 40, 50)  # 240, 180, 120, 60, 0 seconds old
    assert kept(checkpoints, KeepFor(121)) == [30, 40, 50]
    assert kept(checkpoints, KeepFor(dt.timedelta(minutes=3, seconds=1))) == [20, 30, 40, 50]
    odd = [dataclasses.replace(one, time="yesterday") for one in checkpoints[:1]]
    assert kept([*odd, *checkpoints[1:]], KeepFor(1)) == [10, 50]


def test_without_policies_all_stay():
    """The default keeps everything."""
    assert kept(made(10, 20, 30)) == [10, 20, 30]


def test_X06_nothing_goes_before_a_newer_one_is_verified():
    """K = 1 and a newest that nobody has verified: the older one stays; verified, it goes."""
    checkpoints = made(10, 20, 30)
    assert kept(checkpoints, KeepLast(1), verified=set()) == [10, 20, 30]
    assert kept(checkpoints, KeepLast(1), verified={"1-10"}) == [10, 20, 30]
    assert kept(checkpoints, KeepLast(1), verified={"1-20"}) == [20, 30]
    assert kept(checkpoints, KeepLast(1), verified={"1-30"}) == [30]


def test_X06_a_newest_that_is_damaged_saves_the_older_one():
    """A newest in quarantine neither counts as one of the last nor lets an older one go."""
    checkpoints = arrange([*made(10, 20), *made(30, owner=2, quarantined=True)])
    assert kept(checkpoints, KeepLast(1), verified={"1-20"}) == [20, 30]
    assert kept(checkpoints, KeepLast(1), verified={"2-30"}) == [10, 20, 30]
    later = arrange([*checkpoints, *made(40, owner=3)])
    assert kept(later, KeepLast(1), verified={"3-40"}, quarantined=True) == [40]


_STATES = st.sampled_from(["committed"] * 6 + ["unfinished", "damaged", "foreign", "unsupported"])
_POLICIES = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 6)),
        st.builds(KeepEvery, st.integers(1, 6)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
        st.builds(KeepFor, st.integers(1, 400)),
    ),
    max_size=3,
)


@st.composite
def _runs(draw):
    found = [
        RunCheckpoint(
            "", "", draw(st.integers(0, 20)), str(n), draw(_STATES), draw(st.integers(1, 3)), n,
            _time(draw(st.integers(-50, 500))), parent=str(draw(st.integers(0, 14))),
            pinned=draw(st.booleans()), quarantined=draw(st.integers(0, 4)) == 0,
        )
        for n in range(draw(st.integers(0, 14)))
    ]  # fmt: skip
    values = {str(n): {"loss": draw(st.floats(allow_infinity=False))} for n in range(0, 14, 2)}
    verified = draw(st.sets(st.sampled_from([str(n) for n in range(14)])))
    return arrange(found), values, verified


@given(_runs(), _POLICIES, st.booleans())
def test_what_no_policy_can_let_go(state, policies, quarantined):
    """The newest, pins, what is no checkpoint of ours, and all that no newer verified one replaces always stay."""
    checkpoints, values, verified = state
    plan = plan_retention(
        checkpoints, policies, verified=verified, facts=Facts(NOW, values), quarantined=quarantined
    )  # fmt: skip
    usable = [one for one in checkpoints if one.usable]
    gone = [decision.checkpoint for decision in plan if not decision.keep]
    for one in gone:
        assert policies
        assert one.state == "committed"
        assert not one.pinned
        assert quarantined or not one.quarantined
        assert any(other.order > one.order for other in usable if other.attempt in verified)
        assert one.order != max(other.order for other in usable)
    if usable:
        assert len(gone) < len(checkpoints)


@given(_runs(), _POLICIES, _POLICIES)
def test_policies_add_up(state, some, more):
    """What is kept under several policies is what any of them keeps."""
    checkpoints, values, verified = state

    def keeps(policies):
        plan = plan_retention(checkpoints, policies, verified=verified, facts=Facts(NOW, values))
        return {decision.checkpoint.attempt for decision in plan if decision.keep}

    if some and more:
        assert keeps([*some, *more]) == keeps(some) | keeps(more)


@given(_runs(), _POLICIES)
def test_planning_again_finds_nothing_more(state, policies):
    """Once what may go has gone, the same policies let nothing else go."""
    checkpoints, values, verified = state
    facts = Facts(NOW, values)
    left = [d.checkpoint for d in plan_retention(checkpoints, policies, verified=verified, facts=facts) if d.keep]
    again = plan_retention(left, policies, verified=verified, facts=facts)
    assert all(decision.keep for decision in again)


@given(st.lists(st.integers(0, 50), unique=True, max_size=30), st.integers(1, 10))
def test_last_keeps_exactly_n(found, n):
    """Of N or more on one line exactly the N newest stay."""
    checkpoints = made(*sorted(found))
    assert kept(checkpoints, KeepLast(n)) == sorted(found)[-n:]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_every_keeps_exact_multiples(count, stride, multiple):
    """With saves at every `stride` steps, KeepEvery of a multiple of it keeps exactly the multiples, and the newest."""
    checkpoints = made(*range(stride, stride * (count + 1), stride))
    every = stride * multiple
    wanted = {*range(every, stride * count + 1, every), stride * count}
    assert kept(checkpoints, KeepEvery(every)) == sorted(wanted)
