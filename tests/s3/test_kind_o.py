"""Faults of object stores that people met: one test or more for each, at the store and through the public calls."""

from __future__ import annotations

import gc
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stamina
from aiobotocore.httpsession import AIOHTTPSession

import shardstore
from shardstore.check import plan_leftovers
from shardstore.errors import (
    CheckpointNotFound,
    Damaged,
    InvalidArgument,
    KeyMissing,
    ShardstoreError,
    StoreError,
    StoreUnavailable,
)  # fmt: skip
from shardstore.events import Event, Noticed, Progress, Retried, to_log
from shardstore.index import HF_NAME, NAME
from shardstore.storage import Bytes
from shardstore.storage.multipart import MAX_PART, MAX_PARTS, Settings
from shardstore.storage.s3 import S3Store
from tests.crash.states import BIG, number_of, state
from tests.kit.contract import Pieces
from tests.kit.mishaps import (
    Hold,
    access_denied,
    answering,
    cut,
    cut_hard,
    expired_token,
    failing_late,
    flipping_request,
    internal_error,
    losing,
    paged,
    reset_midway,
    signed_by,
    slow_down,
)  # fmt: skip
from tests.kit.proxy import FOREVER, Action, FaultProxy, Request
from tests.kit.s3 import MIB, Place, hasty
from tests.kit.weed import ACCESS_KEY, SECRET_KEY
from tests.s3.places import look, named, settled

pytestmark = pytest.mark.usefixtures("no_waits")
SIX_MIB = b"0123456789abcdef" * (6 * MIB // 16)


@pytest.fixture
def options(proxy: FaultProxy) -> dict[str, Any]:
    """To the server through the proxy; gives up soon."""
    return hasty(proxy.url)


@pytest.fixture
def store(place: Place, options: dict[str, Any]) -> S3Store:
    """The place through the proxy."""
    return S3Store(place.url, options, to_log)


def save(place: Place, options: dict[str, Any], number: int = BIG, **more: Any) -> shardstore.Saved:
    """Save the state of a number."""
    return shardstore.save(state(number), place.url, step=number, storage_options=options, **more)


def load(place: Place, options: dict[str, Any]) -> int:
    """The number of the state that is loaded."""
    return number_of(shardstore.load(place.url, storage_options=options))


# -- O01


def test_O01_no_answer_comes_from_a_cache(place: Place, store: S3Store):
    """What another client has put or deleted is seen at once by one that has looked, and listed, before."""
    for data in (b"one", b"three"):
        assert list(store.list()) == []
        with pytest.raises(KeyMissing):
            store.stat("a/k")
        place.store.put("a/k", Bytes(data))
        assert store.stat("a/k").nbytes == len(data)
        assert store.get("a/k", limit=9).data == data
        assert [entry.key for entry in store.list()] == ["a/k"]
        place.store.delete("a/k")
        with pytest.raises(KeyMissing):
            store.get("a/k", limit=9)


def test_O01_load_sees_what_was_committed_a_moment_ago(place: Place, options: dict[str, Any]):
    """Not there, there, replaced: three looks through connections that stay open, each right."""
    with pytest.raises(CheckpointNotFound):
        load(place, options)
    save(place, place.options, 3)
    assert load(place, options) == 3
    save(place, place.options, 4, overwrite=True)
    assert load(place, options) == 4


# -- O02


@pytest.mark.parametrize("head", [b"short", SIX_MIB], ids=["one request", "parts"])
def test_O02_an_error_of_the_body_publishes_nothing(place: Place, store: S3Store, head: bytes):
    """The source breaks off half-way: no object, no parts, now or when garbage is collected; the error comes out."""
    with pytest.raises(ZeroDivisionError):
        store.put("k", Pieces(head, nbytes=2 * len(head), error=ZeroDivisionError()))
    gc.collect()
    assert place.names() == set()
    assert place.uploads() == []


def test_O02_a_save_that_breaks_off(place: Place, options: dict[str, Any]):
    """An error in the middle of the bytes of a shard: nothing is there, and nothing stays."""

    def listener(event: Event) -> None:
        if isinstance(event, Progress) and event.nbytes > MIB:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(place, options, listener=listener)
    assert settled(place, None) is None
    assert not [key for key in place.names() if "safetensors" in key]
    assert place.uploads() == []


# -- O04


def test_O04_slow_down_is_waited_out(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """503 for the first three PUTs, when parts begin, at a part and at their end: the save succeeds."""
    proxy.on("put_object", slow_down, key="attempt", times=3)
    for op in ("create_multipart_upload", "upload_part", "complete_multipart_upload"):
        proxy.on(op, slow_down, times=2)
    events: list[Event] = []
    save(place, options, listener=events.append)
    retried = [event for event in events if isinstance(event, Retried)]
    assert len(retried) == 9
    assert all("SlowDown" in event.error for event in retried)
    assert settled(place, BIG) == BIG


def test_O04_waits_grow_with_jitter_up_to_a_bound(place: Place, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch):
    """The waits double up to a bound, and are never twice the same: a prefix under load is left in peace by all."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("stamina._core._smart_sleep", sleep)
    events: list[Any] = []
    store = S3Store(place.url, {**hasty(proxy.url), "attempts": 12}, events.append)
    proxy.on("head_object", slow_down, times=FOREVER)
    with stamina.set_testing(False), pytest.raises(StoreUnavailable, match="503"):
        store.stat("k")
    least = [event.wait for event in events]
    assert len(proxy.log) == 12
    assert least[0] > 0
    assert least[3] == pytest.approx(8 * least[0])
    assert all(one <= two <= 20 for one, two in itertools.pairwise(least))
    assert all(wait <= seconds <= 21 for wait, seconds in zip(least, slept, strict=True))
    assert len(set(slept[:6])) == 6


@pytest.mark.parametrize("op", ["put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_O04_slow_down_for_ever(place: Place, proxy: FaultProxy, options: dict[str, Any], op: str):
    """It ends after the attempts that were allowed, with an error that says so; no index, no parts."""
    proxy.on(op, slow_down, key=r"(safetensors|meta-\w+\.json)$", times=FOREVER)
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        save(place, options)
    assert settled(place, None) is None
    assert place.uploads() == []
    assert (
        max(Counter(request.key + str(request.part) for request in proxy.requests(op)).values()) == options["attempts"]
    )


# -- O05


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 65}, {"attempts": 0}, {"attempts": -1}, {"attempts": 10**9}, {"attempts": True}, {"timeout_s": 0},
        {"timeout_s": float("nan")}, {"timeout_s": 1e9}, {"part_bytes": 1}, {"part_bytes": 6 * 1024**3},
        {"part_bytes": 1e7}, {"in_flight": 0}, {"in_flight": 10**6}, {"config_kwargs": {"read_timeout": 0}},
        {"config_kwargs": {"connect_timeout": "soon"}},
    ],
    ids=str,
)  # fmt: skip
def test_O05_extreme_settings(place: Place, proxy: FaultProxy, options: dict[str, Any], wrong: dict[str, Any]):
    """A ValueError that names the setting, when the store is made, before any request."""
    name = next(iter(wrong.get("config_kwargs", wrong)))
    with pytest.raises(ValueError, match=name) as caught:
        S3Store(place.url, {**options, **wrong}, to_log)
    assert isinstance(caught.value, InvalidArgument)
    with pytest.raises(ValueError, match=name):
        save(place, {**options, **wrong})
    assert proxy.log == []


@pytest.mark.parametrize("most", [{"attempts": 64}, {"attempts": 1}, {"in_flight": 1}, {"in_flight": 1024}], ids=str)
def test_O05_extreme_settings_that_are_honoured(place: Place, options: dict[str, Any], most: dict[str, Any]):
    """The limits themselves work."""
    save(place, {**options, **most})
    assert settled(place, BIG) == BIG


# -- O06


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Writes the file of credentials, for one access key; there are no others in the environment."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def write(key: str) -> None:
        secret = SECRET_KEY if key == ACCESS_KEY else "old"
        new = tmp_path / f"credentials-{secrets.token_hex(4)}"  # a reader must not meet a file half written
        new.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        new.replace(file)

    write("OLD")
    return write


def _old(request: Request) -> bool:
    return request.access_key == "OLD"


@pytest.fixture
def from_file(options: dict[str, Any]) -> dict[str, Any]:
    """Options without credentials."""
    return {name: value for name, value in options.items() if name not in {"key", "secret"}}


@pytest.mark.parametrize(
    ("op", "key"),
    [
        ("upload_part", "safetensors"), ("complete_multipart_upload", "safetensors"), ("put_object", "meta"),
        ("put_object", f"{NAME}$"), ("head_object", "safetensors"), ("get_object", NAME),
    ],
)  # fmt: skip
def test_O06_credentials_that_expire_are_read_anew(
    place: Place, proxy: FaultProxy, credentials: Callable[[str], None], from_file: dict[str, Any], op: str, key: str
):
    """The token expires in the middle of a save: new credentials are read once, and the save goes on."""

    def expire(exchange) -> None:
        credentials(ACCESS_KEY)
        expired_token(exchange)

    ended: list[int] = []

    def after(request: Request) -> bool:
        """From the first such request on the old credentials are worth nothing."""
        if request.op == op and key in request.key + "$":
            ended.append(request.began)
        return _old(request) and bool(ended)

    proxy.on(".*", expire, times=FOREVER, when=after)
    proxy.on(".*", signed_by(ACCESS_KEY), times=FOREVER, when=_old)
    save(place, from_file)
    assert proxy.requests(op, key)[0].access_key == "OLD"
    assert settled(place, BIG) == BIG
    assert place.uploads() == []


def test_O06_credentials_that_stay_expired(
    place: Place, proxy: FaultProxy, credentials: Callable[[str], None], from_file: dict[str, Any]
):
    """They are read once more, then an error says what to do; the upload is aborted, and what was there stays."""
    save(place, place.options, 3)
    before = place.names()
    proxy.on("upload_part", expired_token, times=FOREVER)
    proxy.on(".*", signed_by(ACCESS_KEY), times=FOREVER, when=_old)
    with pytest.raises(StoreError, match="credentials have expired: renew them") as caught:
        save(place, from_file, overwrite=True)
    assert not isinstance(caught.value, StoreUnavailable)
    assert len(proxy.requests("upload_part")) <= 4
    assert place.uploads() == []
    assert place.names() == before
    assert settled(place, 3) == 3


def test_O06_no_credentials_at_all(
    place: Place, proxy: FaultProxy, credentials: Callable[[str], None], from_file: dict[str, Any], tmp_path: Path
):
    """An error that says what to set, at once."""
    (tmp_path / "credentials").unlink()
    with pytest.raises(StoreError, match="there are no credentials: set AWS_ACCESS_KEY_ID") as caught:
        save(place, from_file)
    assert not isinstance(caught.value, StoreUnavailable)
    assert proxy.log == []


# -- O08


def test_O08_objects_over_the_limit_of_a_put_go_in_parts(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """A server that takes no PUT over 5 MiB and knows no copies: parts within its limits, and no copy or rename."""
    too_large = answering(400, "EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")
    proxy.on(
        "put_object|upload_part", too_large, times=FOREVER, when=lambda r: int(r.header("content-length")) > 5 * MIB
    )
    save(place, options)
    assert settled(place, BIG) == BIG
    assert [request.part for request in proxy.requests("upload_part")] in ([1, 2], [2, 1])
    assert not any(request.header("x-amz-copy-source") for request in proxy.log)
    assert not [request for request in proxy.log if request.fault]


@pytest.mark.parametrize("nbytes", [1, 10**9, 48 * 1024**3, 156 * 1024**3, 5 * 1024**4, MAX_PART * MAX_PARTS])
def test_O08_never_more_than_10000_parts(nbytes: int):
    """Parts grow with the object, and stay within 5 MiB to 5 GiB."""
    part = Settings(16 * MIB, 16).part_for(nbytes)
    assert 5 * MIB <= part <= MAX_PART
    assert -(-nbytes // part) <= MAX_PARTS


def test_O08_an_object_over_every_limit():
    """An error that says what to do."""
    with pytest.raises(InvalidArgument, match="use more shards"):
        Settings(16 * MIB, 16).part_for(MAX_PART * MAX_PARTS + 1)


# -- O09


def test_O09_all_pages_of_a_listing(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """Ten shards, seven steps, three keys a page: every file and every checkpoint is found."""
    for step in range(7):
        shardstore.save(
            {"model": {f"w{n}": state(3)["model"]["bias"] for n in range(10)}}, f"{place.url}/step-{step}",
            storage_options=place.options, shards=10, step=step,
        )  # fmt: skip
    proxy.on("list_objects_v2", paged(3), times=FOREVER)
    store = S3Store(place.url, options, to_log)
    assert {entry.key for entry in store.list()} == place.names()
    assert len(place.names()) > 7 * 12
    report = shardstore.verify(place.url, storage_options=options)
    assert [found.step for found in report.checkpoints] == list(range(7))
    assert report.ok


@pytest.mark.parametrize("action", [access_denied, slow_down, cut], ids=lambda action: action.__name__)
def test_O09_a_page_that_fails(place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action):
    """An error, never a part of a listing; so nothing is taken for gone, and nothing is planned to be removed."""
    save(place, place.options)
    proxy.on("list_objects_v2", action, times=FOREVER, when=lambda r: "continuation-token" in r.query)
    proxy.on("list_objects_v2", paged(2), times=FOREVER)
    store = S3Store(place.url, options, to_log)
    for call in (store.list, lambda: plan_leftovers(store)):
        with pytest.raises(StoreError):
            call()
    with pytest.raises(StoreError):
        shardstore.verify(place.url, storage_options=options)
    assert "delete_object" not in proxy.ops()


def test_O09_a_page_that_fails_once(place: Place, proxy: FaultProxy, store: S3Store):
    """A hiccup at a page does not spoil the listing."""
    save(place, place.options)
    proxy.on("list_objects_v2", slow_down, nth=2)
    proxy.on("list_objects_v2", paged(2), times=FOREVER)
    assert {entry.key for entry in store.list()} == place.names()


# -- O11


@pytest.fixture
def unlisted(proxy: FaultProxy, place: Place) -> FaultProxy:
    """Credentials without the right to list: 403 for listings, and for what is not there."""
    proxy.on("list_objects_v2|list_multipart_uploads", access_denied, times=FOREVER)
    there = {place.prefix + key for key in place.names()}
    proxy.on("head_object|get_object", access_denied, times=FOREVER, when=lambda request: request.key not in there)
    return proxy


@pytest.fixture
def saved(place: Place) -> Place:
    """A place with a checkpoint."""
    save(place, place.options)
    return place


def test_O11_a_load_needs_no_right_to_list(saved: Place, unlisted: FaultProxy, options: dict[str, Any]):
    """A checkpoint whose place is known loads, by objects alone."""
    assert load(saved, options) == BIG
    with shardstore.open(saved.url, storage_options=options) as opened:
        assert opened["model/bias"].load().sum() > 0
    assert "list_objects_v2" not in unlisted.ops()


def test_O11_missing_or_forbidden(place: Place, unlisted: FaultProxy, options: dict[str, Any]):
    """403 for what is not there: the error says that it can't tell, it is not retried, and no bucket is made."""
    for call in (lambda: load(place, options), lambda: save(place, options)):
        with pytest.raises(StoreError, match=r"denied, or it does not exist: .*s3:ListBucket") as caught:
            call()
        assert not isinstance(caught.value, StoreUnavailable | KeyMissing)
    assert [r.op for r in unlisted.log if "/.probe" not in r.key] == ["get_object", "head_object"]


def test_O11_a_bucket_that_does_not_exist(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """Named as such; never made."""
    proxy.on(".*", answering(404, "NoSuchBucket", "The specified bucket does not exist"), times=FOREVER)
    for call in (lambda: load(place, options), lambda: save(place, options)):
        with pytest.raises(StoreError, match=r"bucket does not exist: make it, .* never makes one") as caught:
            call()
        assert not isinstance(caught.value, KeyMissing | StoreUnavailable)
    assert not [request for request in proxy.log if request.op == "create_bucket"]


# -- O13


def _summed(request: Request) -> bool:
    return any(name.lower().startswith("x-amz-checksum") for name, _ in request.headers)


@pytest.mark.parametrize("code", [(400, "InvalidRequest"), (501, "NotImplemented"), (400, "InvalidArgument")], ids=str)
@pytest.mark.parametrize("ops", [".*", "put_object", "create_multipart_upload", "upload_part"])
def test_O13_a_server_that_refuses_checksums(
    place: Place, proxy: FaultProxy, options: dict[str, Any], ops: str, code: tuple[int, str]
):
    """The same requests are made without, which is told once; the checkpoint is whole."""
    proxy.on(ops, answering(*code, "x-amz-checksum-crc32 is not supported"), times=FOREVER, when=_summed)
    events: list[Event] = []
    save(place, options, listener=events.append)
    assert settled(place, BIG) == BIG
    assert place.uploads() == []
    told = [event.what for event in events if isinstance(event, Noticed)]
    assert len(told) == 1
    assert "takes no checksums" in told[0]
    assert code[1] in told[0]


def test_O13_our_own_hashes_are_checked_where_the_server_checks_nothing(
    place: Place, proxy: FaultProxy, options: dict[str, Any]
):
    """A bit flips on the way up, which a server without checksums takes: found by `load` and `verify`, and named."""
    proxy.on(".*", answering(400, "InvalidRequest"), times=FOREVER, when=_summed)
    proxy.on("upload_part", flipping_request, part=2)
    save(place, options)
    with pytest.raises(Damaged, match="safetensors") as caught:
        load(place, options)
    assert caught.value.tensors
    assert not shardstore.verify(place.url, storage_options=place.options).ok


@pytest.mark.parametrize(("op", "key"), [("upload_part", "model"), ("put_object", "meta"), ("put_object", f"{NAME}$")])
def test_O13_the_server_checks_where_it_can(
    place: Place, proxy: FaultProxy, options: dict[str, Any], op: str, key: str
):
    """A bit that flips on the way up is found by the server's checksum, and the bytes are sent again."""
    rule = proxy.on(op, flipping_request, key=key)
    save(place, options)
    assert rule.hits == 1
    assert settled(place, BIG) == BIG


# -- O14


@pytest.mark.parametrize("action", [cut, cut_hard], ids=lambda action: action.__name__)
@pytest.mark.parametrize("key", [NAME, "meta", "model-", "state/0"])
def test_O14_a_body_that_ends_early_is_asked_for_again(
    saved: Place, proxy: FaultProxy, options: dict[str, Any], key: str, action: Action
):
    """Half a body, then a whole one: the state is exact."""
    rule = proxy.on("get_object", action, key=key, times=2)
    assert load(saved, options) == BIG
    assert rule.hits == 2


@pytest.mark.parametrize("session", [{}, {"http_session_cls": AIOHTTPSession}], ids=["threads", "event loop"])
def test_O14_what_came_is_not_asked_for_again(
    place: Place, proxy: FaultProxy, options: dict[str, Any], session: dict[str, Any]
):
    """After a body that broke off, the next request is for the rest alone."""
    options["config_kwargs"] |= session
    place.store.put("k", Bytes(b"-" + SIX_MIB))
    proxy.on("get_object", cut, times=2)
    buffers = [memoryview(bytearray(size)) for size in (1000, len(SIX_MIB) - 1000)]
    S3Store(place.url, options, to_log).read_into("k", 1, buffers)
    assert b"".join(buffers) == SIX_MIB
    asked = [request.header("range") for request in proxy.requests("get_object")]
    (first, last), *later = [tuple(map(int, one.removeprefix("bytes=").split("-"))) for one in asked]
    assert [end for _, end in later] == [last] * 2
    assert first == 1 < later[0][0] < later[1][0]


@pytest.mark.parametrize("key", [NAME, "meta", "model-", "state/0"])
def test_O14_a_body_that_always_ends_early(saved: Place, proxy: FaultProxy, options: dict[str, Any], key: str):
    """An error of the store, and no short tensor; it is not called damage, since nothing is known of the bytes."""
    proxy.on("get_object", cut, key=key, times=FOREVER)
    with pytest.raises(StoreUnavailable):
        load(saved, options)
    into = state(BIG)
    with pytest.raises(StoreUnavailable):
        shardstore.load(saved.url, into=into, storage_options=options)
    if key != NAME:
        report = shardstore.verify(saved.url, storage_options=options)
        assert {problem.kind for found in report.checkpoints for problem in found.problems} == {"unreadable"}


# -- O15


@pytest.mark.parametrize(
    ("op", "action", "times"),
    [
        ("upload_part", access_denied, FOREVER), ("upload_part", slow_down, FOREVER),
        ("upload_part", reset_midway, FOREVER), ("upload_part", answering(404, "NoSuchUpload"), 1),
        ("complete_multipart_upload", access_denied, FOREVER),
        ("complete_multipart_upload", failing_late, FOREVER), ("complete_multipart_upload", internal_error, FOREVER),
        ("complete_multipart_upload", answering(400, "InvalidPart", "One or more of the parts could not be found"), 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_O15_no_parts_stay_behind(
    place: Place, proxy: FaultProxy, options: dict[str, Any], op: str, action: Action, times: int
):
    """Whatever fails, at whatever part: the upload is aborted, nothing is published, and the error is the first one."""
    proxy.on(op, action, times=times)
    with pytest.raises(StoreError) as caught:
        save(place, options)
    assert not isinstance(caught.value, KeyMissing)
    assert "abort_multipart_upload" in proxy.ops()
    assert place.uploads() == []
    assert settled(place, None) is None


def test_O15_an_upload_that_can_not_begin(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """There is nothing to abort."""
    proxy.on("create_multipart_upload", access_denied)
    with pytest.raises(StoreError, match="access is denied"):
        save(place, options)
    assert place.uploads() == []
    assert settled(place, None) is None


@pytest.mark.parametrize("session", [{}, {"http_session_cls": AIOHTTPSession}], ids=["threads", "event loop"])
def test_O15_an_interrupt_in_the_midst_of_parts(
    place: Place, proxy: FaultProxy, options: dict[str, Any], session: dict[str, Any]
):
    """Ctrl-C while parts are on their way: they are broken off, and the upload is aborted."""
    options["config_kwargs"] |= session
    hold = Hold()

    def body() -> Iterator[memoryview]:
        yield memoryview(SIX_MIB)
        hold.wait_until_reached()
        raise KeyboardInterrupt

    proxy.on("upload_part", hold)
    store = S3Store(place.url, options, to_log)
    with pytest.raises(KeyboardInterrupt):
        store.put("k", _Body(4 * len(SIX_MIB), body))
    assert place.uploads() == []
    assert place.names() == set()
    assert hold.release() == 404
    assert place.names() == set()


class _Body:
    def __init__(self, nbytes: int, chunks: Callable[[], Iterator[memoryview]]) -> None:
        self.nbytes = nbytes
        self._chunks = chunks

    def __iter__(self) -> Iterator[memoryview]:
        return self._chunks()


def test_O15_a_lost_answer_to_complete(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """The object is published, the answer lost, and the second try finds no upload any more: that is success."""
    rule = proxy.on("complete_multipart_upload", losing("reset"))
    save(place, options)
    assert rule.hits == 1
    assert settled(place, BIG) == BIG


def test_O15_room_for_parts_is_given_back(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """After uploads that failed, or were broken off with parts on their way, there is as much room as before."""
    store = S3Store(place.url, {**options, "in_flight": 2, "attempts": 1}, to_log)
    proxy.on("upload_part", slow_down, times=20)
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            store.put("k", Bytes(SIX_MIB, SIX_MIB, SIX_MIB))
        with pytest.raises((ZeroDivisionError, StoreUnavailable)):
            store.put("k", Pieces(SIX_MIB, SIX_MIB, nbytes=4 * len(SIX_MIB), error=ZeroDivisionError()))
    room = [store._uploads._room.acquire(blocking=False) for _ in range(3)]
    assert room == [True, True, False]
    assert place.uploads() == []


# -- O17


@pytest.mark.parametrize(("op", "key"), [("put_object", "state/0"), ("put_object", "meta"), ("upload_part", "model-")])
def test_O17_the_index_goes_last(place: Place, proxy: FaultProxy, options: dict[str, Any], op: str, key: str):
    """While one file is held back nothing is committed, whatever the others do; all of them come before the index."""
    options["config_kwargs"]["read_timeout"] = 60
    hold = Hold()
    proxy.on(op, hold, key=key)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, place, options, threads=3)
        hold.wait_until_reached()
        proxy.wait_for(lambda: sum(r.status == 200 for r in proxy.requests("put_object")) >= 2)
        assert look(place) is None
        assert not saving.done()
        hold.release()
        saving.result()
    data = [
        r
        for r in proxy.log
        if r.op in {"put_object", "upload_part", "complete_multipart_upload"} and "/.probe" not in r.key
    ]
    (index,) = [r for r in data if r.key == place.prefix + NAME]
    files = {place.prefix + key for key in named(place)} - {index.key}
    before = {r.key for r in data if r.answered < index.began and r.status == 200}
    assert files <= before
    assert {r.key for r in data if r.began > index.answered} == {place.prefix + HF_NAME}
    checked = {r.key for r in proxy.requests("head_object") if r.answered < index.began and r.status == 200}
    assert files <= checked


def test_O17_files_that_are_not_there_after_all(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """A server that says 200 and has no object: that is found before the commit."""

    def lie(exchange) -> None:
        exchange.take_body()
        exchange.reply(200, [("Content-Length", "0"), ("ETag", '"0"')])

    proxy.on("put_object", lie, key="meta")
    with pytest.raises(ShardstoreError, match="meta"):
        save(place, options)
    assert settled(place, None) is None
