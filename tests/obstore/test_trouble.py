"""Trouble on the way to the server, through obstore: what it repeats, what it must not, and whose memory it reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import shardstore
from shardstore.errors import CheckpointExists, Damaged, InvalidArgument, StoreError, StoreUnavailable
from shardstore.events import to_log
from shardstore.index import NAME
from shardstore.storage import Bytes, obstore_store
from shardstore.storage.obstore_store import ObstoreStore
from tests.crash.states import number_of, state
from tests.kit import azurite as az
from tests.kit.contract import REPOSITORY, Pieces
from tests.kit.gcs import Bucket
from tests.kit.mishaps import (
    Hold,
    access_denied,
    answering,
    cut,
    cut_hard,
    failing_late,
    flipping_answer,
    ignoring_conditions,
    losing,
    other_region,
    reset,
    short,
    slow_down,
)  # fmt: skip
from tests.kit.proxy import FOREVER, Action, FaultProxy, Request
from tests.kit.s3 import MIB, Place, hasty
from tests.s3.places import named, settled
from tests.s3.test_trouble import AFTER, BEFORE, OVERWRITES, Case, places

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("no_waits")]


@pytest.fixture
def options(proxy: FaultProxy) -> dict[str, Any]:
    """To the server through the proxy and obstore; gives up soon."""
    return hasty(proxy.url, engine="obstore")


def opened(place: Place, proxy: FaultProxy, **more: Any) -> ObstoreStore:
    """A store behind the proxy that makes each request once."""
    return ObstoreStore(place.url, {**hasty(proxy.url), "attempts": 1, **more}, to_log)


# -- saves and loads


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_round_trip(place: Place, proxy: FaultProxy, options: dict[str, Any], overwrite: bool):
    """What is saved through obstore loads by both engines; s3fs sends nothing; it goes in parts, the commit in one."""
    case = Case(place, options, overwrite=overwrite)
    assert case.run() is None
    assert case.check() == AFTER
    assert number_of(shardstore.load(place.url, storage_options=options)) == AFTER
    assert number_of(shardstore.load(place.url, into=state(AFTER), storage_options=options)) == AFTER
    assert shardstore.verify(place.url, storage_options=options).ok
    assert [
        r for r in proxy.requests("put_object", f"/{NAME}$") if r.header("if-match" if overwrite else "if-none-match")
    ]
    assert proxy.requests("upload_part")
    assert not [request for request in proxy.log if "boto" in request.header("user-agent").lower()]


@pytest.mark.parametrize("action", [slow_down, reset, losing("reset")], ids=lambda action: action.__name__)
def test_one_hiccup_at_every_request_is_survived(
    place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action
):
    """One request that is refused, cut off, or done without the answer coming back, never fails an overwrite."""
    number = AFTER if action is not reset else 7  # with the parts of a large file
    for nth, at in places(place):
        case = Case(at, options, overwrite=True, number=number)
        proxy.clear()
        rule = proxy.on(".*", action, nth=nth)
        error = case.run()
        assert error is None, f"request {nth}, {proxy.log[nth - 1]}: {error}"
        assert case.check() == number
        if not rule.hits:
            assert nth > 10
            break


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_a_lost_answer_to_the_commit(place: Place, proxy: FaultProxy, options: dict[str, Any], overwrite: bool):
    """The index is put once; that its answer is lost is found out by reading it, not by putting it again."""
    case = Case(place, options, overwrite=overwrite, number=7)
    proxy.clear()
    rule = proxy.on("put_object", losing("reset"), key=f"/{NAME}$")
    assert case.run() is None
    assert rule.hits == 1
    assert len(proxy.requests("put_object", f"/{NAME}$")) == 1
    assert case.check() == 7


@pytest.mark.parametrize("words", ["credential", "certificate token request", "received redirect, status code: 412"])
def test_words_in_a_name_do_not_make_an_answer_definite(place: Place, proxy: FaultProxy, words: str):
    """Errors are told by their text, in which names stand: a cut connection stays unclear, whatever they say."""
    store = ObstoreStore(f"{place.url}/{words}", {**hasty(proxy.url), "attempts": 1}, to_log)
    store.prepare()
    rule = proxy.on("put_object", losing("reset"), times=2)
    for condition in (True, False):
        with pytest.raises(StoreUnavailable):
            store.put("k", Bytes(b"x"), if_absent=condition)
    assert rule.hits == 2


@pytest.mark.parametrize(
    "action", [slow_down, answering(409, "ConditionalRequestConflict"), reset], ids=["503", "409", "cut"]
)
def test_an_unclear_answer_to_the_commit(place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action):
    """The server took nothing: the identical conditional request is made again, by us, until it is definite."""
    rule = proxy.on("put_object", action, key=f"/{NAME}$", times=2)
    shardstore.save(state(7), place.url, step=7, storage_options=options)
    assert rule.hits == 2
    assert all(request.header("if-none-match") == "*" for request in proxy.requests("put_object", f"/{NAME}$"))
    assert settled(place, 7) == 7


@pytest.mark.parametrize("mode", ["if_absent", "if_match"])
@pytest.mark.parametrize("action", [slow_down, reset, losing("reset")], ids=lambda action: action.__name__)
def test_a_conditional_put_is_sent_once(place: Place, proxy: FaultProxy, mode: str, action: Action):
    """Whatever the settings for other requests are: its lost answer is StoreUnavailable."""
    store = opened(place, proxy, attempts=8)
    store.put("k", Bytes(b"old"))
    version = store.get("k", limit=9).version
    key, condition = ("new", {"if_absent": True}) if mode == "if_absent" else ("k", {"if_match": version})
    for each in ("k", "new"):  # so that the probes are done
        with pytest.raises((CheckpointExists, StoreError)):
            store.put(each, Bytes(b"x"), if_match="0" * 32)
    store.prepare()
    proxy.clear()
    proxy.on("put_object", action, times=FOREVER)
    with pytest.raises(StoreUnavailable):
        store.put(key, Bytes(b"more"), **condition)
    assert len(proxy.requests("put_object")) == 1


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
    assert named(place) <= place.names()


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


def test_a_server_that_knows_one_condition_only(place: Place, proxy: FaultProxy, options: dict[str, Any]):
    """If-Match is probed by itself: without it nothing can be overwritten safely, but a new place can be taken."""
    proxy.on(".*", ignoring_conditions, times=FOREVER, when=lambda request: bool(request.header("if-match")))
    shardstore.save(state(6), place.url, step=6, storage_options=options)
    with pytest.raises(InvalidArgument, match="single_writer=True"):
        shardstore.save(state(7), place.url, overwrite=True, storage_options=options)
    assert settled(place, 6) == 6


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (access_denied, "access is denied"), (other_region, "the bucket lies in another region: set client_kwargs="),
        (answering(403, "InvalidAccessKeyId"), "the access key is unknown"),
        (answering(403, "SignatureDoesNotMatch"), "the signature does not match: check the secret key"),
        (answering(400, "ExpiredToken"), "the credentials have expired: renew them"),
        (answering(404, "NoSuchBucket"), "the bucket does not exist: make it"),
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
    assert set(Counter((request.key, request.part) for request in proxy.log if request.fault).values()) == {1}
    assert place.names() == set()
    assert place.uploads() == []


def test_credentials_that_are_not_there(place: Place, monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy):
    """Said at once, before any request; they are looked for where s3fs looks for them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(StoreError, match="there are no credentials") as caught:
        ObstoreStore(place.url, {"endpoint_url": proxy.url}, to_log).stat("k")
    assert not isinstance(caught.value, StoreUnavailable)
    assert proxy.log == []


def test_credentials_of_a_profile(place: Place, monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy, tmp_path):
    """Files and profiles count, as with s3fs; regions in them, too."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(
        f"[mine]\naws_access_key_id = {place.options['key']}\naws_secret_access_key = {place.options['secret']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    place.store.put("k", Bytes(b"abc"))
    config = tmp_path / "config"
    config.write_text("[profile mine]\nregion = eu-west-9\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    store = ObstoreStore(place.url, {"endpoint_url": proxy.url, "profile": "mine"}, to_log)
    assert store.get("k", limit=9).data == b"abc"
    assert "/eu-west-9/s3/" in proxy.log[0].header("authorization")
    with pytest.raises(InvalidArgument, match="yours"):
        ObstoreStore(place.url, {"endpoint_url": proxy.url, "profile": "yours"}, to_log)


# -- uploads in parts


@pytest.mark.parametrize("action", [losing("reset"), losing("error")], ids=lambda action: action.__name__)
def test_a_lost_answer_to_the_end_of_an_upload(place: Place, proxy: FaultProxy, action: Action):
    """The object is there, with its size: the upload has worked."""
    proxy.on("complete_multipart_upload", action, times=FOREVER)
    opened(place, proxy).put("k", Bytes(bytes(11 * MIB)))
    assert place.store.stat("k").nbytes == 11 * MIB


@pytest.mark.parametrize(
    "action", [slow_down, failing_late, answering(400, "InvalidPart")], ids=lambda action: action.__name__
)
def test_an_upload_that_can_not_be_ended(place: Place, proxy: FaultProxy, action: Action):
    """Nothing is published, and the parts are given up."""
    proxy.on("complete_multipart_upload", action, times=FOREVER)
    with pytest.raises(StoreError):
        opened(place, proxy).put("k", Bytes(bytes(11 * MIB)))
    assert place.names() == set()
    assert place.uploads() == []


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("mine"), KeyboardInterrupt(), OSError(5, "mine"), KeyError("mine")]
)
def test_an_error_of_the_body_ends_the_upload(place: Place, proxy: FaultProxy, error: BaseException):
    """It comes out as it is; nothing is published, the parts are given up, and nobody holds on to the memory."""
    memory = bytearray(12 * MIB)

    class Broken(Pieces):
        def __iter__(self) -> Iterator[memoryview]:
            yield memoryview(memory)
            raise error

    with pytest.raises(type(error)) as caught:
        opened(place, proxy).put("k", Broken(nbytes=20 * MIB))
    assert caught.value is error
    assert place.names() == set()
    assert place.uploads() == []
    caught.value.__traceback__ = None
    del caught
    memory.clear()  # BufferError while anybody may read it


def test_memory_is_left_alone_after_an_interrupt(place: Place, proxy: FaultProxy):
    """Ctrl-C in an upload: when the exception comes out nobody reads the tensors any more, though a part is held."""
    hold = Hold()
    proxy.on("upload_part", hold)
    memory = bytearray(16 * MIB)
    store = opened(place, proxy, in_flight=1)

    def interrupt() -> None:
        hold.wait_until_reached()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        hold.release()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        store.put("k", Bytes(memory))
    thread.join()
    assert place.names() == set()
    assert place.uploads() == []
    caught.value.__traceback__ = None
    del caught
    memory.clear()  # BufferError while anybody may read it


def test_memory_of_uploads_is_bounded(place: Place, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch):
    """Of all uploads through one store together, no more than `in_flight` parts are copied at once."""
    alive = most = 0
    lock = threading.Lock()

    class Counted(obstore_store._Part):
        def __init__(self, size: int) -> None:
            nonlocal alive, most
            super().__init__(size)
            with lock:
                alive += 1
                most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    monkeypatch.setattr(obstore_store, "_Part", Counted)
    store = opened(place, proxy, in_flight=2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: store.put(f"{number}", Bytes(bytes(26 * MIB))), range(3)))
    assert [entry.nbytes for entry in place.store.list()] == [26 * MIB] * 3
    assert 1 <= most <= 3  # one more for the moment between its last use and its end
    assert alive == 0


def test_a_body_that_says_it_is_empty(place: Place, proxy: FaultProxy):
    """And is not: an error of the call, before anything is sent."""
    with pytest.raises(InvalidArgument, match="says 0 bytes"):
        opened(place, proxy).put("k", Pieces(b"abcd", nbytes=0))
    assert proxy.log == []


def test_a_background_save_ends_after_the_main_thread(place: Place, proxy: FaultProxy):
    """A program that ends right after it began to save in parts: all of them go out, and it commits."""
    options = {**hasty(proxy.url, engine="obstore"), "in_flight": 1}
    program = (
        "import sys, json, shardstore; from tests.crash.states import state\n"
        "shardstore.save_async(state(int(sys.argv[2])), sys.argv[1], step=int(sys.argv[2]), "
        "storage_options=json.loads(sys.argv[3]))\n"
    )
    command = [sys.executable, "-c", program, place.url, str(AFTER), json.dumps(options)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    assert proxy.requests("upload_part")
    assert settled(place, AFTER) == AFTER


def test_parts_are_equal(place: Place, proxy: FaultProxy):
    """As with s3fs."""
    opened(place, proxy, part_bytes=8 * MIB).put("k", Bytes(bytes(21 * MIB)))
    assert [int(request.header("content-length")) / MIB for request in proxy.requests("upload_part")] == [7, 7, 7]


# -- reads


@pytest.mark.parametrize("action", [cut, cut_hard, short, slow_down, reset], ids=lambda action: action.__name__)
def test_reads_that_break_off(place: Place, proxy: FaultProxy, action: Action):
    """An error, and nothing is written into the buffers; the next request is answered in full."""
    data = bytes(range(256)) * 4096
    store = opened(place, proxy)
    place.store.put("k", Bytes(data))
    proxy.on("get_object", action)
    buffer = bytearray(len(data))
    with pytest.raises(StoreUnavailable, match="k"):
        store.read_into("k", 0, [memoryview(buffer)])
    assert not any(buffer)
    store.read_into("k", 0, [memoryview(buffer)])
    assert buffer == data


@pytest.mark.parametrize("action", [slow_down, cut], ids=lambda action: action.__name__)
def test_one_hiccup_at_every_request_of_a_load(
    place: Place, proxy: FaultProxy, options: dict[str, Any], action: Action
):
    """A request that is refused, or answered with half a body, is made again; what is read is exact."""
    shardstore.save(state(BEFORE), place.url, step=BEFORE, storage_options=place.options)
    for nth in range(1, 99):
        proxy.clear()
        rule = proxy.on(".*", action, nth=nth)
        assert number_of(shardstore.load(place.url, storage_options=options)) == BEFORE
        if not rule.hits:
            assert nth > 5
            break


@pytest.mark.parametrize("key", [NAME, "meta", "model-"])
def test_flipped_bits_are_found(place: Place, proxy: FaultProxy, options: dict[str, Any], key: str):
    """Always wrong, in any file: Damaged, never a wrong state."""
    shardstore.save(state(BEFORE), place.url, step=BEFORE, storage_options=place.options)
    proxy.on("get_object", flipping_answer, key=key, times=FOREVER)
    with pytest.raises(Damaged):
        shardstore.load(place.url, storage_options=options)


def test_what_reads_cost(place: Place, proxy: FaultProxy):
    """One request for each range, nothing before it."""
    store = opened(place, proxy)
    place.store.put("k", Bytes(bytes(3 * MIB)))
    for at in range(3):
        store.read_into("k", at * MIB, [memoryview(bytearray(MIB))])
    assert proxy.ops() == ["get_object"] * 3


# -- processes and clocks


def test_a_forked_child_is_told(place: Place, proxy: FaultProxy):
    """The threads of obstore are not there: an error at once, that says what to do, and no wait for ever."""
    store = opened(place, proxy)
    store.put("k", Bytes(b"1"))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.stat("k")
        except StoreError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "'spawn'" in answer.read()


def test_the_clock_of_the_server(place: Place, proxy: FaultProxy):
    """By an object that is put and removed, which no listing shows."""
    store = opened(place, proxy)
    proxy.on("put_object", ignoring_conditions)
    store.now()
    assert proxy.ops() == ["put_object", "head_object", "delete_object"]
    assert place.names() == set()


# -- the other services


def test_azure(azurite: str, container: str):
    """Save, overwrite, a race that is lost, load and verify on Azure's emulator, in blocks."""
    options = az.options_for(azurite, part_bytes=5 * MIB)
    saved(container, options)


def test_google(gcs: Bucket):
    """The same on a server that speaks like Google's: conditions are generations."""
    saved("gs://bucket/run/step-7", {"endpoint_url": gcs.url, "part_bytes": 5 * MIB})
    commits = [wanted for method, name, wanted in gcs.log if method == "PUT" and name.endswith(f"/{NAME}")]
    assert commits[0] == "0"
    assert int(commits[-1]) >= 1000
    assert gcs.uploads == {}


def saved(url: str, options: dict[str, Any]) -> None:
    """What a save promises, at a place."""
    shardstore.save(state(BEFORE), url, step=1, storage_options=options)
    with pytest.raises(CheckpointExists):
        shardstore.save(state(7), url, storage_options=options)
    assert number_of(shardstore.load(url, storage_options=options)) == BEFORE
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(shardstore.save, state(n), url, overwrite=True, storage_options=options) for n in (6, 7)]
        errors = [one.exception() for one in tries]
    assert all(error is None or isinstance(error, CheckpointExists) for error in errors)
    won = {number for number, error in zip((6, 7), errors, strict=True) if error is None}
    assert number_of(shardstore.load(url, into=None, storage_options=options)) in won
    shardstore.save(state(AFTER), url, overwrite=True, storage_options=options)
    assert number_of(shardstore.load(url, storage_options=options)) == AFTER
    assert shardstore.verify(url, storage_options=options).ok
