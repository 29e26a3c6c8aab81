"""What every store has to do, as cases that run without a test framework.

A case gets a function that opens the store; called again, it opens the same place again, as another process
would. It raises AssertionError when a promise is broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from easyckpt.errors import Misuse, StorageConflict, StorageMissing
from easyckpt.storage.base import BytesSource, Parts, Storage

__all__ = ["ConformanceCase", "conformance_cases"]

Open = Callable[[], Storage]

WRITERS = 8
LONG_BYTES = (1 << 20) + 12_345
"""Longer than what goes through the page cache, and no multiple of any block."""

BAD_PATHS = (
    "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/./b", "a//b", "a/", "a\\b", "a\0b", "a\nb", "~/x",
    ".hidden", "a/.hidden/b", "ä", "x" * 201, "/".join("y" * 100 for _ in range(20)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCase:
    """One promise."""

    name: str
    run: Callable[[Open], None]


def conformance_cases() -> tuple[ConformanceCase, ...]:
    """All promises of `easyckpt.storage.base`."""
    return tuple(
        ConformanceCase(name=run.__name__.lstrip("_"), run=run)
        for run in (
            _what_is_written_is_read,
            _every_kind_of_bytes,
            _writing_again_replaces,
            _create_only_if_absent,
            _exactly_one_creates,
            _parts_are_proved_on_the_way,
            _readers_see_whole_objects,
            _ranges,
            _missing,
            _listing,
            _deleting,
            _paths_stay_inside,
            _free_space,
        )
    )


def _raises(kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def _pattern(length: int, seed: int = 0) -> bytes:
    return (bytes((seed + number) % 251 for number in range(251)) * (length // 251 + 1))[:length]


def _what_is_written_is_read(open_store: Open) -> None:
    for number, length in enumerate((0, 1, 4095, 4096, 4097, LONG_BYTES, 3 << 20)):
        path = f"a/b/object{number}.bin"
        open_store().write_durable(path, _pattern(length))
        assert open_store().read(path) == _pattern(length), length
        found = open_store().stat(path)
        assert found is not None
        assert found.bytes == length
        assert found.path == path
        assert open_store().exists(path)


def _every_kind_of_bytes(open_store: Open) -> None:
    store = open_store()
    data = _pattern(LONG_BYTES)
    sources: tuple[BytesSource, ...] = (data, bytearray(data), memoryview(data), memoryview(b"x" + data)[1:])
    for number, source in enumerate(sources):
        store.write_durable(f"kind{number}", source)
        assert store.read(f"kind{number}") == data
    words = memoryview(bytearray(_pattern(4096))).cast("I")
    store.write_durable("words", words)
    assert store.read("words") == _pattern(4096)
    _raises(Misuse, lambda: store.write_durable("gaps", memoryview(data)[::2]))
    assert not store.exists("gaps")


def _writing_again_replaces(open_store: Open) -> None:
    store = open_store()
    for data in (b"first", _pattern(LONG_BYTES), b"", b"last"):
        store.write_durable("again", data)
        assert store.read("again") == data


def _create_only_if_absent(open_store: Open) -> None:
    store = open_store()
    store.write_durable("one/two", b"mine", if_absent=True)
    error = _raises(StorageConflict, lambda: open_store().write_durable("one/two", b"yours", if_absent=True))
    assert store.where("one/two") in str(error)
    assert store.read("one/two") == b"mine"
    store.delete("one/two")
    store.write_durable("one/two", b"yours", if_absent=True)
    assert store.read("one/two") == b"yours"
    assert [entry.path for entry in store.list()] == ["one/two"]


def _exactly_one_creates(open_store: Open) -> None:
    if not open_store().properties.conditional_create:
        return
    for turn in range(10):
        won: list[int] = []
        barrier = threading.Barrier(WRITERS)

        def race(
            writer: int, *, turn: int = turn, won: list[int] = won, barrier: threading.Barrier = barrier
        ) -> None:
            store = open_store()
            barrier.wait(timeout=60)
            try:
                store.write_durable(f"race/{turn}", f"writer {writer}".encode() * 1000, if_absent=True)
            except StorageConflict:
                return
            won.append(writer)

        _in_threads(race)
        assert len(won) == 1, won
        assert open_store().read(f"race/{turn}") == f"writer {won[0]}".encode() * 1000


def _parts_are_proved_on_the_way(open_store: Open) -> None:
    store, size = open_store(), 1 << 20
    for length in (0, 1, size - 1, size, size + 1, 5 * size, 5 * size + 4097):
        data = _pattern(length, seed=length % 7)
        seen: list[tuple[int, bytes]] = []
        parts = Parts(bytes=size, check=lambda begin, part, seen=seen: seen.append((begin, bytes(part))))  # type: ignore[misc]
        store.write_durable("parts", data, parts=parts)
        assert sorted(seen) == [(at, data[at : at + size]) for at in range(0, length, size)], length
        assert store.read("parts") == data
    for bad in range(5):
        refusing = Parts(bytes=size, check=partial(_refuse, bad * size))
        for if_absent in (False, True):
            path = "never" if if_absent else "parts"
            _raises(
                Misuse,
                partial(store.write_durable, path, bytes(5 * size), if_absent=if_absent, parts=refusing),
            )
    assert store.read("parts") == data
    assert not store.exists("never")
    assert store.unfinished() == ()


def _refuse(bad: int, begin: int, part: memoryview) -> None:
    if begin == bad:
        raise Misuse("this part is not what it was")


def _in_threads(target: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=target, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()


def _readers_see_whole_objects(open_store: Open) -> None:
    versions = [_pattern(100_000, seed=seed) for seed in range(3)]
    open_store().write_durable("turn", versions[0])
    done = threading.Event()
    torn: list[int] = []

    def read() -> None:
        store = open_store()
        while not done.is_set():
            seen = store.read("turn")
            if seen not in versions:
                torn.append(len(seen))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(60):
            open_store().write_durable("turn", versions[number % 3])
    finally:
        done.set()
        reader.join(timeout=120)
    assert not torn


def _ranges(open_store: Open) -> None:
    store = open_store()
    data = _pattern(10_000)
    store.write_durable("ranges", data)
    assert store.read("ranges", 10) == data[10:]
    assert store.read("ranges", 10, 20) == data[10:20]
    assert store.read("ranges", 9_990, 20_000) == data[9_990:]
    assert store.read("ranges", 20_000, 30_000) == b""
    assert store.read("ranges", 5, 5) == b""
    buffer = memoryview(bytearray(100))
    assert store.read_into("ranges", buffer, 50) == 100
    assert buffer == data[50:150]
    assert store.read_into("ranges", buffer, 9_950) == 50
    assert buffer[:50] == data[9_950:]
    assert store.read_into("ranges", memoryview(bytearray())) == 0


def _missing(open_store: Open) -> None:
    store = open_store()
    assert store.stat("not/there") is None
    assert not store.exists("not/there")
    for call in (
        lambda: store.read("not/there"),
        lambda: store.read("not/there", 0, 10),
        lambda: store.read_into("not/there", memoryview(bytearray(1))),
    ):
        error = _raises(StorageMissing, call)
        assert store.where("not/there") in str(error)
    store.write_durable("folder/inside", b"x")
    assert not store.exists("folder")
    assert store.stat("folder") is None


def _listing(open_store: Open) -> None:
    store = open_store()
    assert store.list() == ()
    assert store.list("a/") == ()
    for path in ("b", "a/c/d", "a/b", "ab/x", "a/c/a"):
        store.write_durable(path, path.encode())
    assert [entry.path for entry in store.list()] == ["a/b", "a/c/a", "a/c/d", "ab/x", "b"]
    assert [entry.path for entry in store.list("a/")] == ["a/b", "a/c/a", "a/c/d"]
    assert [(entry.path, entry.bytes) for entry in store.list("a/c/")] == [("a/c/a", 5), ("a/c/d", 5)]
    assert store.list("b/") == ()
    assert all(entry.mtime_s > 0 for entry in store.list())
    assert store.unfinished() == ()


def _deleting(open_store: Open) -> None:
    store = open_store()
    store.write_durable("x/y/z", b"1")
    store.write_durable("x/w", b"2")
    store.delete("x/y/z")
    store.delete("x/y/z")
    store.delete("never/was")
    assert [entry.path for entry in store.list()] == ["x/w"]
    store.write_durable("x/y/z", b"3")
    assert store.read("x/y/z") == b"3"


def _paths_stay_inside(open_store: Open) -> None:
    store = open_store()
    for path in BAD_PATHS:
        _raises(Misuse, partial(store.write_durable, path, b"x"))
        _raises(Misuse, partial(store.read, path))
        _raises(Misuse, partial(store.stat, path))
        _raises(Misuse, partial(store.exists, path))
        _raises(Misuse, partial(store.read_into, path, memoryview(bytearray(1))))
    for path in ("..", "../x", "/", "a/../../b"):
        _raises(Misuse, partial(store.delete, path))
        _raises(Misuse, partial(store.list, path + "/"))
    _raises(Misuse, lambda: store.list("no/slash"))
    assert store.list() == ()


def _free_space(open_store: Open) -> None:
    free = open_store().free_bytes()
    assert free is None or free > 0
