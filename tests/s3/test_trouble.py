"""Trouble on the way to the server, at every request of a save, an overwrite and a load.

Whatever happens: what is there afterwards loads exactly, or there is no index and the error says why; an index never
lacks a file; what was there before is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import shardstore
from shardstore.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CommitUnknown,
    Damaged,
    InvalidArgument,
    ShardstoreError,
    StoreError,
    StoreUnavailable,
)  # fmt: skip
from shardstore.events import to_log
from shardstore.index import HF_NAME, NAME
from shardstore.storage.s3 import S3Store
from tests.crash.states import BIG, number_of, state
from tests.kit.mishaps import (
    Hold,
    access_denied,
    answering,
    cut,
    cut_hard,
    failing_late,
    flipping_answer,
    ignoring_conditions,
    internal_error,
    losing,
    never,
    other_region,
    reset,
    reset_midway,
    short,
    slow_down,
    stalled,
)  # fmt: skip
from tests.kit.proxy import FOREVER, Action, FaultProxy, Request
from tests.kit.s3 import Place, hasty
from tests.s3.places import look, named, settled

pytestmark = pytest.mark.usefixtures("no_waits")
BEFORE, AFTER = BIG + 2, BIG + 3
MOST = 200
OVERWRITES = [pytest.param(False, id="save"), pytest.param(True, id="overwrite")]


@pytest.fixture
def options(proxy: FaultProxy) -> dict[str, Any]:
    """To the server through the proxy; gives up soon."""
    return hasty(proxy.url)


class Case:
    """One save under trouble."""

    def __init__(self, place: Place, options: dict[str, Any], *, overwrite: bool, number: int = AFTER) -> None:
        self.place, self.options, self.number = place, options, number
        self.overwrite = overwrite
        self.before = number - 1 if overwrite else None
        self.error: ShardstoreError | None = None
        if overwrite:
            shardstore.save(state(number - 1), place.url, step=number - 1, storage_options=place.options)
        self.old = named(place)

    def run(self) -> ShardstoreError | None:
        """Save; returns the error, if there is one."""
        try:
            shardstore.save(
                state(self.number), self.place.url, step=self.number, overwrite=self.overwrite, threads=1,
                storage_options=self.options,
            )  # fmt: skip
        except ShardstoreError as error:
            self.error = error
        return self.error

    def check(self, *, commit_called: bool = True) -> int | None:
        """What must hold whatever happened; returns the number that is there."""
        allowed = (
            {self.number} if self.error is None else {self.before, self.number} if commit_called else {self.before}
        )
        seen = settled(self.place, *allowed)
        assert self.old <= self.place.names()
        return seen


def places(place: Place) -> Iterator[tuple[int, Place]]:
    """Numbers from 1, each with a new place."""
    for nth in range(1, MOST):
        url = f"{place.url}-{nth}"
        yield nth, Place(url, S3Store(url, place.options, to_log), place.options)
    pytest.fail("no run ended without trouble")


def _committing(request: Request) -> bool:
    return request.op == "put_object" and request.key.endswith(f"/{NAME}")


# -- trouble that passes


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("action", [slow_down, reset, losing("reset")], ids=lambda action: action.__name__)
def test_one_hiccup_at_every_request_is_survived(
    place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action, overwrite: bool
):
    """One request that is refused, cut off, or done without the answer coming back, never fails a save."""
    number = AFTER if action is slow_down and not overwrite else 7  # once with the parts of a large file
    for nth, at in places(place):
        case = Case(at, options, overwrite=overwrite, number=number)
        proxy.clear()
        rule = proxy.on(".*", action, nth=nth)
        error = case.run()
        assert error is None, f"request {nth}, {proxy.log[nth - 1]}: {error}"
        assert case.check() == number
        assert at.uploads() == []
        if not rule.hits:
            assert nth > 10
            break


@pytest.mark.parametrize("action", [slow_down, cut, cut_hard], ids=lambda action: action.__name__)
@pytest.mark.parametrize("call", ["load", "into", "open", "verify"])
def test_one_hiccup_at_every_request_of_a_reader(
    place: Place, proxy: FaultProxy, options: dict[str, Any], call: str, action: Action
):
    """A request that is refused, or answered with half a body, is made again; what is read is exact."""
    shardstore.save(state(BEFORE), place.url, step=BEFORE, storage_options=place.options)
    for nth in range(1, MOST):
        proxy.clear()
        rule = proxy.on(".*", action, nth=nth)
        assert _read(call, place, options) == BEFORE
        if not rule.hits:
            assert nth > 5
            break


def _read(call: str, place: Place, options: dict[str, Any]) -> int:
    if call == "load":
        return number_of(shardstore.load(place.url, storage_options=options))
    if call == "into":
        return number_of(shardstore.load(place.url, into=state(BEFORE), storage_options=options))
    if call == "open":
        with shardstore.open(place.url, storage_options=options) as opened:
            return int(opened["model/table"].load()[-1])
    report = shardstore.verify(place.url, storage_options=options)
    assert report.ok, report
    return report.checkpoints[0].step or 0


@pytest.mark.parametrize("action", [slow_down, internal_error, reset], ids=lambda action: action.__name__)
def test_a_storm(place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action):
    """Every request fails two times, on all connections: the save and the load go through it."""
    tries: dict[tuple[Any, ...], int] = {}

    def twice(request: Request) -> bool:
        if request.header("if-none-match"):
            return False
        name = (request.op, request.key, request.part, request.header("range"))
        tries[name] = tries.get(name, 0) + 1
        return tries[name] <= 2

    proxy.on(".*", action, times=FOREVER, when=twice)
    shardstore.save(state(AFTER), place.url, step=AFTER, storage_options=options)
    assert settled(place, AFTER) == AFTER
    assert number_of(shardstore.load(place.url, storage_options=options)) == AFTER
    assert place.uploads() == []


@pytest.mark.parametrize("times", [1, 3])
def test_a_storm_at_the_commit(place: Place, proxy: FaultProxy, options: dict[str, Any], times: int):
    """The conditional PUT of the index is refused some times, and made again until it is definite."""
    rule = proxy.on("put_object", slow_down, key=f"/{NAME}$", times=times)
    shardstore.save(state(7), place.url, step=7, storage_options=options)
    assert rule.hits == times
    assert settled(place, 7) == 7


# -- trouble that stays


@pytest.mark.parametrize("overwrite", OVERWRITES)
@pytest.mark.parametrize("action", [slow_down, access_denied, losing("error")], ids=lambda action: action.__name__)
def test_a_server_that_is_gone_from_every_request_on(
    place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action, overwrite: bool
):
    """From the nth request on nothing works, not even cleaning up: whole, or no index; and the next save works."""
    for nth, at in places(place):
        case = Case(at, options, overwrite=overwrite, number=7)
        proxy.clear()
        rule = proxy.on(".*", action, nth=nth, times=FOREVER)
        case.run()
        assert case.error is None or isinstance(case.error, StoreError | CommitUnknown)
        called = any(map(_committing, proxy.log))
        seen = case.check(commit_called=called)
        shardstore.save(state(9), at.url, step=9, overwrite=seen is not None, storage_options=at.options)
        assert settled(at, 9) == 9
        if not rule.hits:
            assert case.error is None
            break


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (access_denied, "access is denied"), (other_region, "the bucket lies in another region: set client_kwargs="),
        (answering(400, "AuthorizationHeaderMalformed"), "the region is wrong"),
        (answering(403, "InvalidAccessKeyId"), "the access key is unknown"),
        (answering(403, "SignatureDoesNotMatch"), "the signature does not match: check the secret key"),
        (answering(403, "RequestTimeTooSkewed"), "the clock of this machine"),
        (answering(400, "ExpiredToken"), "the credentials have expired: renew them"),
        (answering(400, "WhateverElse", "some reason"), "WhateverElse some reason"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
@pytest.mark.parametrize("op", ["put_object", "upload_part"])
def test_permanent_errors_are_named_at_once(
    place: Place, proxy: FaultProxy, options: dict[str, Any], op: str, action: Action, says: str
):
    """What waiting can't mend is not tried again; the error says what to do; nothing stays behind."""
    proxy.on(op, action, key="safetensors", times=FOREVER)
    with pytest.raises(StoreError, match=says) as caught:
        shardstore.save(state(AFTER), place.url, threads=1, storage_options=options)
    assert not isinstance(caught.value, StoreUnavailable)
    tried = [(request.key, request.part) for request in proxy.log if request.fault]
    again = {"ExpiredToken", "PermanentRedirect"}  # with new credentials, in the region that the answer names
    assert max(Counter(tried).values()) == 1 + (action.__name__ in again)
    assert place.names() == set()
    assert place.uploads() == []


@pytest.mark.parametrize(
    ("action", "says"),
    [(other_region, "region"), (access_denied, "denied"), (answering(400, "ExpiredToken"), "expired")],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_permanent_errors_of_a_load(
    place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action, says: str
):
    """Named at once; never damage, never "not found", never a part of the state."""
    shardstore.save(state(7), place.url, step=7, storage_options=place.options)
    for key in (NAME, "meta", "model"):
        proxy.clear()
        proxy.on("get_object", action, key=key, times=FOREVER)
        with pytest.raises(StoreError, match=says) as caught:
            shardstore.load(place.url, storage_options=options)
        assert not isinstance(caught.value, CheckpointNotFound | Damaged | StoreUnavailable)


# -- answers that do not come


@pytest.mark.parametrize(
    ("op", "key"), [("put_object", "attempt"), ("create_multipart_upload", ""), ("upload_part", ""),
                    ("complete_multipart_upload", ""), ("put_object", f"/{NAME}$"), ("head_object", "meta")],
)  # fmt: skip
@pytest.mark.parametrize("action", [never, losing("silence")], ids=lambda action: action.__name__)
def test_one_answer_that_never_comes(
    place: Place, proxy: FaultProxy, options: dict[str, Any], op: str, key: str, action: Action
):
    """The client gives up after its time-out, and asks again."""
    rule = proxy.on(op, action, key=key)
    shardstore.save(state(AFTER), place.url, step=AFTER, storage_options=options)
    assert rule.hits == 1
    assert settled(place, AFTER) == AFTER


@pytest.mark.parametrize("action", [never, stalled], ids=lambda action: action.__name__)
def test_a_read_that_is_never_answered_in_full(
    place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action
):
    """Silence, at once or after half of a body, ends with the time-out, and the block is asked for again."""
    shardstore.save(state(BEFORE), place.url, step=BEFORE, storage_options=place.options)
    rule = proxy.on("get_object", action, key="model")
    assert number_of(shardstore.load(place.url, storage_options=options)) == BEFORE
    assert rule.hits == 1


def test_a_server_that_never_answers(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """An end, with an error that says so, though nothing ever comes."""
    proxy.on(".*", never, times=FOREVER)
    with pytest.raises(StoreUnavailable, match=r"(?i)time"):
        shardstore.load(place.url, storage_options={**options, "attempts": 2})
    assert len(proxy.log) == 2


# -- the held PUT


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_the_held_index_lands_after_the_client_gave_up(
    place: Place, proxy: FaultProxy, options: dict[str, Any], overwrite: bool
):
    """The PUT of the index is held back, all after it fails: CommitUnknown, no shard deleted; it lands: it loads."""
    case = Case(place, options, overwrite=overwrite)
    hold = Hold()
    proxy.on("put_object", hold, key=f"/{NAME}$")
    proxy.on("get_object|put_object", slow_down, key=f"/{NAME}$", nth=1 + overwrite, times=FOREVER)
    assert isinstance(case.run(), CommitUnknown)
    assert case.check() == case.before
    assert not [r for r in proxy.requests("delete_object") if "/.probe" not in r.key]
    files = place.names()
    assert hold.release() == 200
    assert place.names() >= files
    assert case.check() == AFTER


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_the_held_index_lands_after_another_try_succeeded(
    place: Place, proxy: FaultProxy, options: dict[str, Any], overwrite: bool
):
    """The client asks again and commits; what was held back comes too late, and is refused by its condition."""
    case = Case(place, options, overwrite=overwrite)
    hold = Hold()
    proxy.on("put_object", hold, key=f"/{NAME}$")
    assert case.run() is None
    assert case.check() == AFTER
    index = place.read(NAME)
    assert hold.release() == 412
    assert place.read(NAME) == index
    assert case.check() == AFTER


def test_the_held_index_of_a_zombie_meets_another_checkpoint(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """The client gives up, another save takes the place; the held PUT lands: the other's checkpoint is untouched."""
    case = Case(place, options, overwrite=False)
    hold = Hold()
    proxy.on("put_object", hold, key=f"/{NAME}$")
    proxy.on("get_object|put_object", slow_down, key=f"/{NAME}$", times=FOREVER)
    assert isinstance(case.run(), CommitUnknown)
    shardstore.save(state(8), place.url, step=8, storage_options=place.options)
    assert hold.release() == 412
    assert settled(place, 8) == 8


@pytest.mark.parametrize("key", ["model-", "state/0", "meta"])
def test_a_held_shard_lands_after_the_save_failed(place: Place, proxy: FaultProxy, options: dict[str, Any], key: str):
    """A late packet of a save that has failed and cleaned up makes no checkpoint, and harms none."""
    case = Case(place, {**options, "attempts": 1}, overwrite=True, number=7)
    hold = Hold()
    proxy.on("put_object", hold, key=key)
    assert isinstance(case.run(), StoreUnavailable)
    assert case.check(commit_called=False) == 6
    assert hold.release() == 200
    assert case.check(commit_called=False) == 6


# -- parts and bodies


@pytest.mark.parametrize(
    "action", [answering(400, "InvalidPart", "a part was not found"), failing_late], ids=lambda action: action.__name__
)
def test_a_part_that_the_server_has_lost(place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action):
    """A server that drops a part says so at the end: an error, no index, no parts."""
    proxy.on("complete_multipart_upload", action, times=FOREVER)
    case = Case(place, options, overwrite=False)
    assert isinstance(case.run(), StoreError)
    assert case.check(commit_called=False) is None
    assert place.uploads() == []


def test_a_part_that_never_reaches_the_server(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """The proxy says that it was stored: the server refuses to make an object of the rest, or its size is wrong."""

    def lie(exchange) -> None:
        exchange.take_body()
        exchange.reply(200, [("Content-Length", "0"), ("ETag", '"d41d8cd98f00b204e9800998ecf8427e"')])

    proxy.on("upload_part", lie, part=1, times=FOREVER)
    case = Case(place, options, overwrite=False)
    assert isinstance(case.run(), StoreError)
    assert case.check(commit_called=False) is None
    assert place.uploads() == []


@pytest.mark.parametrize("action", [reset_midway, cut, losing("error")], ids=lambda action: action.__name__)
def test_parts_that_are_cut_off(place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action):
    """Each part is cut off once in the middle; all arrive, whole."""
    seen: set[int] = set()

    def first(request: Request) -> bool:
        return request.part not in seen and not seen.add(request.part)

    rule = proxy.on("upload_part", action, times=FOREVER, when=first)
    case = Case(place, options, overwrite=False)
    assert case.run() is None
    assert rule.hits == 2
    assert case.check() == AFTER


@pytest.mark.parametrize("action", [short, flipping_answer], ids=lambda action: action.__name__)
@pytest.mark.parametrize("key", [NAME, "meta", "model-", "state/0"])
def test_answers_that_lie(place: Place, proxy: FaultProxy, options: dict[str, Any], key: str, action: Action):
    """Half a body that says it is all, or a flipped bit, always: an error, never a wrong state."""
    shardstore.save(state(BEFORE), place.url, step=BEFORE, storage_options=place.options)
    proxy.on("get_object", action, key=key, times=FOREVER)
    with pytest.raises(Damaged if action is flipping_answer or key == NAME else StoreError):
        shardstore.load(place.url, storage_options=options)
    assert not shardstore.verify(place.url, storage_options=options).ok


def test_a_listing_that_says_there_is_more_but_not_where(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """A server that gives the same token again is an error, and not a loop."""
    xml = (
        b'<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated>'
        b"<NextContinuationToken>again</NextContinuationToken></ListBucketResult>"
    )

    def again(exchange) -> None:
        exchange.reply(200, [("Content-Type", "application/xml"), ("Content-Length", str(len(xml)))], xml)

    proxy.on("list_objects_v2", again, times=FOREVER)
    with pytest.raises(StoreError, match="more, but not where"):
        shardstore.verify(place.url, storage_options=options)
    assert len(proxy.log) == 2


# -- conditions


@pytest.mark.parametrize(
    "action", [ignoring_conditions, answering(501, "NotImplemented", "A header implies functionality")],
    ids=["ignored", "not implemented"],
)  # fmt: skip
def test_a_server_without_conditions(place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action):
    """The probe finds it out, and a save is refused before it writes anything: it could overwrite another one."""

    def conditional(request: Request) -> bool:
        return bool(request.header("if-none-match") or request.header("if-match"))

    proxy.on(".*", action, times=FOREVER, when=conditional)
    with pytest.raises(InvalidArgument, match="single_writer=True"):
        shardstore.save(state(7), place.url, storage_options=options)
    assert place.names() == set()
    assert NAME not in " ".join(request.key for request in proxy.log if request.op == "put_object")


def test_a_server_that_knows_one_condition_only(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """If-Match is probed by itself: without it nothing can be overwritten safely, but a new place can be taken."""
    proxy.on(".*", ignoring_conditions, times=FOREVER, when=lambda request: bool(request.header("if-match")))
    shardstore.save(state(6), place.url, step=6, storage_options=options)
    with pytest.raises(InvalidArgument, match="single_writer=True"):
        shardstore.save(state(7), place.url, overwrite=True, storage_options=options)
    assert settled(place, 6) == 6


def test_two_saves_at_once(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """Both write all their files, one commits first: the other is told, and nothing of the winner is touched."""
    options["config_kwargs"]["read_timeout"] = 60
    hold = Hold()
    proxy.on("put_object", hold, key=f"/{NAME}$")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(shardstore.save, state(6), place.url, step=6, storage_options=options)
        hold.wait_until_reached()
        shardstore.save(state(7), place.url, step=7, storage_options=place.options)
        assert hold.release() == 412
        with pytest.raises(CheckpointExists):
            late.result()
    assert settled(place, 7) == 7
    assert place.names() == {*named(place), HF_NAME}


# -- what it costs


def test_requests_of_a_save_and_a_load(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """No listing on either; each file is sent once; each block is fetched once."""
    shardstore.save(state(7), place.url, storage_options=options)
    assert "list_objects_v2" not in proxy.ops()
    puts = [r.key for r in proxy.requests("put_object") if "/.probe" not in r.key]
    assert len(puts) == len(set(puts)) == 6
    proxy.clear()
    assert look(place) == 7
    shardstore.load(place.url, storage_options=options)
    assert set(proxy.ops()) <= {"get_object", "head_object"}
    gets = [(r.key, r.header("range")) for r in proxy.requests("get_object")]
    assert len(gets) == len(set(gets)) == 4
