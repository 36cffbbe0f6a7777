"""The contract of the store port as tests. A new store costs a subclass with one fixture, `make_store`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shardstore.errors
from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, StoreError
from shardstore.storage.port import Bytes, Store

MIB = 1 << 20
REPOSITORY = Path(shardstore.errors.__file__).parents[1]
RACERS = 8

BAD_KEYS = {
    "parent": "../x",
    "absolute": "/etc/hostname",
    "parent inside": "a/../../b",
    "drive": "C:\\x",
    "drive with slash": "C:/x",
    "nul": "a\0b",
    "empty": "",
    "dot": ".",
    "dot inside": "a/./b",
    "double slash": "a//b",
    "slash at the end": "a/",
    "backslash": "a\\b",
    "newline": "a\nb",
    "delete": "a\x7fb",
    "long part": "x" * 300,
    "long key": "/".join(["x" * 100] * 12),
    "lone surrogate": "a\ud800b",
}
GOOD_KEYS = [
    "a",
    ".hidden",
    "...",
    "a.b.c",
    "run[1]*?/x #2",
    "100%/%2F",
    "~",
    "-rf",
    "Ωλ/日本",
    "x" * 255,
    "a/b/c/d/e",
    "con",
    "model-00001-of-00004-3f9a2c10b7d4e6f1.safetensors",
]

_RACER = """
import sys
from shardstore.errors import CheckpointExists, StoreUnavailable
from shardstore.storage import Bytes, open_store
url, key, mark, match = sys.argv[1:]
store = open_store(url)
print("ready", flush=True)
sys.stdin.readline()
try:
    body = Bytes(mark.encode() * 50_000)
    store.put(key, body, if_absent=not match, if_match=match or None)
    print("won")
except CheckpointExists:
    print("lost")
except StoreUnavailable as error:
    print(error)
"""

MakeStore = Callable[[], Store]


class Pieces:
    """A body of several buffers that counts how often it was iterated, and may break off or lie about its size."""

    def __init__(self, *pieces: bytes, nbytes: int | None = None, error: Exception | None = None) -> None:
        self.pieces = pieces
        self.nbytes = sum(map(len, pieces)) if nbytes is None else nbytes
        self.error = error
        self.iterations = 0

    def __iter__(self) -> Iterator[memoryview]:
        self.iterations += 1
        yield from map(memoryview, self.pieces)
        if self.error is not None:
            raise self.error


def read(store: Store, key: str, limit: int = 64 * MIB) -> bytes:
    """The content of a key."""
    return store.get(key, limit=limit).data


def keys(store: Store, prefix: str = "") -> list[str]:
    """The keys that a listing shows."""
    return [entry.key for entry in store.list(prefix)]


def together(count: int, work: Callable[[int], object]) -> list[object]:
    """What `work(0)`, `work(1)`, ... return or raise, when they start at the same moment on threads of their own."""
    start = threading.Barrier(count)

    def one(number: int) -> object:
        start.wait()
        try:
            return work(number)
        except Exception as error:  # noqa: BLE001 the test looks at it
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class StoreContract:
    """What every store must keep. `make_store` gives a fresh handle on one and the same empty place at each call."""

    lists_what_is_being_replaced: bool = True

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Iterator[Store]:
        made = make_store()
        yield made
        made.close()

    # -- put and get

    def test_round_trip(self, store: Store):
        """What was put comes back, whatever the cut into buffers was."""
        store.put("k", Pieces(b"ab", b"", b"cdef" * 1000, b"g"))
        assert read(store, "k") == b"ab" + b"cdef" * 1000 + b"g"

    def test_empty_file(self, store: Store):
        """A file of no bytes is a file."""
        store.put("k", Bytes())
        assert read(store, "k") == b""
        assert store.stat("k").nbytes == 0
        store.read_into("k", 0, [])

    def test_put_takes_any_contiguous_buffer(self, store: Store):
        """Buffers of other item types and shapes are written as their bytes."""
        words = memoryview(bytearray(range(32))).cast("I")
        grid = memoryview(bytearray(range(32))).cast("B", (4, 8))
        store.put("k", Bytes(words, grid))
        assert read(store, "k") == bytes(range(32)) * 2

    def test_put_replaces(self, store: Store):
        """Without a condition an existing file is replaced as a whole, also by a shorter one."""
        store.put("k", Bytes(b"long" * 1000))
        store.put("k", Bytes(b"short"))
        assert read(store, "k") == b"short"
        assert store.stat("k").nbytes == 5

    @pytest.mark.parametrize("said", [3, 5], ids=["gives more", "gives less"])
    @pytest.mark.parametrize("conditional", [False, True])
    def test_body_of_another_size_is_refused(self, store: Store, said: int, conditional: bool):
        """A body that gives more or fewer bytes than it says leaves nothing behind."""
        with pytest.raises(InvalidArgument, match="says"):
            store.put("k", Pieces(b"abcd", nbytes=said), if_absent=conditional)
        assert keys(store) == []

    @pytest.mark.parametrize("conditional", [False, True])
    def test_error_of_the_body_leaves_the_old_file(self, store: Store, conditional: bool):
        """An error while the bytes are made comes out as it is, and the old content stays."""
        store.put("k", Bytes(b"old"))
        version = store.get("k", limit=9).version if conditional else None
        with pytest.raises(ZeroDivisionError):
            store.put("k", Pieces(b"new", error=ZeroDivisionError()), if_match=version)
        assert read(store, "k") == b"old"
        assert keys(store) == ["k"]

    def test_body_may_be_iterated_again(self, store: Store):
        """The same body can be put twice."""
        body = Pieces(b"abc", b"def")
        store.put("one", body)
        store.put("two", body)
        assert read(store, "one") == read(store, "two") == b"abcdef"
        assert body.iterations == 2

    def test_get_limit(self, store: Store):
        """A file over the limit is refused, one of exactly the limit is not."""
        store.put("k", Bytes(b"x" * 100))
        assert len(read(store, "k", 100)) == 100
        with pytest.raises(StoreError, match="100"):
            store.get("k", limit=99)

    def test_versions(self, store: Store):
        """Equal content has equal versions, other content another."""
        versions = []
        for key, data in [("a", b"1"), ("b", b"1"), ("a", b"2"), ("a", b"")]:
            store.put(key, Bytes(data))
            versions.append(store.get(key, limit=9).version)
        assert versions[0] == versions[1]
        assert len(set(versions)) == 3

    def test_missing(self, store: Store):
        """What is not there is KeyMissing, which is a FileNotFoundError, with the name in it; deleting it is fine."""
        for call in (
            lambda: store.get("no/such", limit=9),
            lambda: store.stat("no/such"),
            lambda: store.read_into("no/such", 0, [memoryview(bytearray(1))]),
        ):
            with pytest.raises(KeyMissing, match="no/such") as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError)
        store.delete("no/such")
        assert keys(store) == []

    # -- reads

    def test_read_into_scatters(self, store: Store):
        """Buffers are filled in order from the offset on, empty ones among them, and of any item type."""
        store.put("k", Bytes(bytes(range(100))))
        buffers = [memoryview(bytearray(n)) for n in (0, 3, 0, 1, 8, 0)]
        store.read_into("k", 50, [*buffers[:4], buffers[4].cast("I"), buffers[5]])
        assert b"".join(buffers) == bytes(range(50, 62))

    def test_read_into_thousands_of_buffers(self, store: Store):
        """More buffers than one system call takes."""
        data = bytes(i % 251 for i in range(6000))
        store.put("k", Bytes(data))
        buffers = [memoryview(bytearray(2)) for _ in range(2500)]
        store.read_into("k", 7, buffers)
        assert b"".join(buffers) == data[7:5007]

    @pytest.mark.parametrize("offset", [0, 6, 10, 11, 1 << 40])
    def test_read_past_the_end_is_an_error(self, store: Store, offset: int):
        """All of it or an error: a file that ends too early is never filled up with anything."""
        store.put("k", Bytes(b"0123456789"))
        with pytest.raises(StoreError, match="k"):
            store.read_into("k", offset, [memoryview(bytearray(11 if offset == 0 else 5))])

    def test_read_into_needs_room_to_write(self, store: Store):
        """Read-only buffers and negative offsets are errors of the call."""
        store.put("k", Bytes(b"0123456789"))
        with pytest.raises(InvalidArgument):
            store.read_into("k", 0, [memoryview(b"1234")])
        with pytest.raises(InvalidArgument):
            store.read_into("k", -1, [memoryview(bytearray(2))])

    def test_read_into_sees_what_this_store_put_and_deleted(self, store: Store):
        """No read comes from a file that was replaced or removed through the same store."""
        buffer = bytearray(3)
        store.put("k", Bytes(b"one"))
        store.read_into("k", 0, [memoryview(buffer)])
        store.put("k", Bytes(b"two"))
        store.read_into("k", 0, [memoryview(buffer)])
        assert buffer == b"two"
        store.delete("k")
        with pytest.raises(KeyMissing):
            store.read_into("k", 0, [memoryview(buffer)])

    def test_get_and_stat_see_what_others_put(self, store: Store, make_store: MakeStore):
        """`get`, `stat` and `list` look freshly, also after they have found nothing."""
        other = make_store()
        with pytest.raises(KeyMissing):
            store.get("k", limit=9)
        for data in (b"one", b"three"):
            other.put("k", Bytes(data))
            assert read(store, "k") == data
            assert store.stat("k").nbytes == len(data)
            assert keys(store) == ["k"]
        other.delete("k")
        assert keys(store) == []
        other.close()

    def test_parallel_reads(self, store: Store):
        """Threads that read different parts of one file get their parts."""
        data = bytes(i % 253 for i in range(MIB))
        store.put("k", Bytes(data))

        def one(number: int) -> bool:
            step = MIB // RACERS
            buffer = bytearray(step)
            for _ in range(20):
                store.read_into("k", number * step, [memoryview(buffer)])
            return bytes(buffer) == data[number * step : (number + 1) * step]

        assert together(RACERS, one) == [True] * RACERS

    def test_map(self, store: Store):
        """A map shows the content, may be written to, and what is written stays private; else `why` says why not."""
        store.put("k", Bytes(b"content"))
        store.put("empty", Bytes())
        if not store.capabilities.mappable:
            assert store.capabilities.why
            with pytest.raises(StoreError, match="mapped"):
                store.map("k")
            return
        view = store.map("k")
        assert bytes(view) == b"content"
        view[:3] = b"dis"
        assert bytes(view) == b"distent"
        assert read(store, "k") == b"content"
        assert store.map("empty").nbytes == 0
        with pytest.raises(KeyMissing):
            store.map("no")

    # -- keys

    @pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS)
    def test_Z01_keys_that_leave_the_root_are_refused(self, store: Store, key: str):
        """A key that may mean anything but a plain file below the root is refused by every call, before any effect."""
        for call in (
            lambda: store.put(key, Bytes(b"x")),
            lambda: store.put(key, Bytes(b"x"), if_absent=True),
            lambda: store.get(key, limit=9),
            lambda: store.read_into(key, 0, []),
            lambda: store.stat(key),
            lambda: store.delete(key),
        ):
            with pytest.raises(InvalidArgument):
                call()
        assert keys(store) == []

    @pytest.mark.parametrize("key", GOOD_KEYS)
    def test_K12_odd_keys_are_taken_as_they_are(self, store: Store, key: str):
        """Brackets, stars, dots, per cent signs, blanks and other scripts mean only themselves."""
        store.put(key, Bytes(b"x"))
        store.put(key + "2" if len(key) < 200 else "y", Bytes(b"other"))
        assert read(store, key) == b"x"
        assert key in keys(store)
        version = store.get(key, limit=9).version
        store.put(key, Bytes(b"y"), if_match=version)
        store.delete(key)
        assert key not in keys(store)
        assert len(keys(store)) == 1

    # -- listing

    def test_list_is_sorted_and_deep(self, store: Store):
        """Every key at any depth, in order, with its size; prefixes need not end at a slash."""
        names = ["b", "a/c", "a/b/x", "a.b", "ab", "z/" + "d/" * 20 + "e"]
        for name in names:
            store.put(name, Bytes(name.encode()))
        assert keys(store) == sorted(names)
        assert keys(store, "a") == ["a.b", "a/b/x", "a/c", "ab"]
        assert keys(store, "a/") == ["a/b/x", "a/c"]
        assert keys(store, "a/b") == ["a/b/x"]
        assert keys(store, "nothing/there") == []
        assert {e.key: e.nbytes for e in store.list()} == {name: len(name) for name in names}
        assert all(e.kind == "file" for e in store.list())

    def test_list_of_nothing(self, store: Store):
        """A root that is not there has no entries."""
        assert keys(store) == []

    def test_folders(self, store: Store):
        """The names of what lies directly below the root and holds files, in order; not the workings of the store."""
        assert list(store.folders()) == []
        for key in ("b/x", "a/y/z", "c", "a.b/q"):
            store.put(key, Bytes(b"1"))
        assert list(store.folders()) == ["a", "a.b", "b"]

    def test_list_hides_the_workings(self, store: Store):
        """Conditional puts leave nothing that a listing shows."""
        store.put("k", Bytes(b"1"), if_absent=True)
        store.put("k", Bytes(b"2"), if_match=store.get("k", limit=9).version)
        assert keys(store) == ["k"]

    def test_times(self, store: Store):
        """`modified` and `now` are of one clock, to the second."""
        before = store.now()
        store.put("k", Bytes(b"x"))
        after = store.now()
        assert before - 2 <= store.stat("k").modified <= after + 2
        assert store.stat("k") == next(iter(store.list()))

    # -- conditions

    def test_if_absent(self, store: Store):
        """The first creator wins, the second changes nothing; after a delete the name is free again, at once."""
        for data in (b"one", b"two", b"three"):
            store.put("k", Bytes(data), if_absent=True)
            with pytest.raises(CheckpointExists, match="k") as caught:
                store.put("k", Bytes(b"no"), if_absent=True)
            assert isinstance(caught.value, FileExistsError)
            assert read(store, "k") == data
            store.delete("k")

    def test_if_match(self, store: Store):
        """Only the content that was seen is replaced."""
        store.put("k", Bytes(b"one"))
        first = store.get("k", limit=9).version
        store.put("k", Bytes(b"two"), if_match=first)
        with pytest.raises(CheckpointExists, match="k"):
            store.put("k", Bytes(b"three"), if_match=first)
        assert read(store, "k") == b"two"
        for nonsense in ("", "absent", "../../x"):
            with pytest.raises(CheckpointExists):
                store.put("k", Bytes(b"four"), if_match=nonsense)

    def test_if_match_on_nothing(self, store: Store):
        """There is nothing to be replaced: KeyMissing, and nothing is made."""
        with pytest.raises(KeyMissing, match="k"):
            store.put("k", Bytes(b"x"), if_match="0" * 32)
        assert keys(store) == []

    def test_if_match_back_and_forth(self, store: Store):
        """A content that comes back is a state like any other: it can be replaced again, at once."""
        store.put("k", Bytes(b"0"))
        for turn in range(6):
            store.put("k", Bytes(b"%d" % ((turn + 1) % 2)), if_match=store.get("k", limit=9).version)
        assert read(store, "k") == b"0"

    def test_two_conditions_are_refused(self, store: Store):
        """Both conditions at once can't hold."""
        with pytest.raises(InvalidArgument):
            store.put("k", Bytes(b"x"), if_absent=True, if_match="0" * 32)

    @pytest.mark.parametrize("turn", range(5))
    def test_L11_racing_threads(self, make_store: MakeStore, turn: int):
        """Of creators on many threads exactly one wins, with its content; so too with replacers of one version."""
        stores = [make_store() for _ in range(RACERS)]
        match: str | None = None
        for mark in (b"a", b"b"):

            def one(n: int, mark: bytes = mark, match: str | None = match) -> None:
                stores[n].put("d/k", Bytes((mark + b"%d" % n) * 9999), if_absent=match is None, if_match=match)

            results = together(RACERS, one)
            winners = [n for n, result in enumerate(results) if result is None]
            assert len(winners) == 1
            assert all(isinstance(r, CheckpointExists) for r in results if r is not None), results
            blob = stores[0].get("d/k", limit=MIB)
            assert blob.data == (mark + b"%d" % winners[0]) * 9999
            match = blob.version
        for each in stores:
            each.close()

    # -- atomicity

    @pytest.mark.parametrize("conditional", [False, True])
    def test_readers_see_whole_versions(self, make_store: MakeStore, conditional: bool):
        """While a file is replaced over and over, readers see only whole contents, and never none."""
        writer = make_store()
        size = 200_000
        writer.put("k", Bytes(b"a" * size))
        done = threading.Event()

        def reader(_: int) -> set[int]:
            store, kinds = make_store(), set()
            while not done.is_set():
                kinds.add(len(set(read(store, "k"))))
                assert [e.nbytes for e in store.list()] == [size] or not self.lists_what_is_being_replaced
            store.close()
            return kinds

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(reader, n) for n in range(2)]
            try:
                for turn in range(60):
                    version = writer.get("k", limit=size).version if conditional else None
                    writer.put("k", Bytes(bytes([turn]) * (size // 2), bytes([turn]) * (size // 2)), if_match=version)
            finally:
                done.set()
            assert [r.result() for r in readers] == [{1}, {1}]
        writer.close()

    def test_parallel_puts_and_deletes_in_one_folder(self, make_store: MakeStore):
        """A folder that empties and fills again under many writers never fails a put."""
        store = make_store()

        def one(number: int) -> None:
            for _ in range(20):
                store.put(f"d/e/{number}", Bytes(b"x" * number))
                assert store.stat(f"d/e/{number}").nbytes == number
                store.delete(f"d/e/{number}")

        results = together(4, one)
        assert results == [None] * 4, results
        assert keys(store) == []
        store.close()

    def test_capabilities_give_reasons(self, store: Store):
        """Where a store can't promise something, it says why."""
        can = store.capabilities
        assert can.why or (can.exclusive and can.durable and can.mappable)


class SharedStoreContract(StoreContract):
    """For stores that other processes can open by their `url`."""

    def test_L11_racing_processes(self, store: Store):
        """Two and more processes that commit one key: one wins, the others are told; the content is wholly from one."""
        match = ""
        for turn in range(3):
            outcomes = race([store.url] * 3, ["d/k"] * 3, [f"{turn}{n}" for n in range(3)], match)
            assert sorted(outcomes.values()) == ["lost", "lost", "won"]
            blob = store.get("d/k", limit=MIB)
            winner = next(mark for mark, outcome in outcomes.items() if outcome == "won")
            assert blob.data == winner.encode() * 50_000
            match = blob.version

    def test_L08_racing_processes_on_one_new_root(self, store: Store):
        """Processes that all find no root and no folder, and make them, do not trip over each other."""
        names = [f"d/{n}" for n in range(4)]
        assert set(race([store.url] * 4, names, names).values()) == {"won"}
        assert keys(store) == names


def race(urls: list[str], names: list[str], marks: list[str], match: str = "") -> dict[str, str]:
    """What happens to processes that put `marks` at the same moment, by mark: "won", "lost", or why it is not clear."""
    racers = {
        mark: subprocess.Popen(
            [sys.executable, "-c", _RACER, url, name, mark, match],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for url, name, mark in zip(urls, names, marks, strict=True)
    }
    for racer in racers.values():
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = {mark: racer.communicate(timeout=60)[0].strip() for mark, racer in racers.items()}
    assert [racer.returncode for racer in racers.values()] == [0] * len(racers)
    return outcomes
