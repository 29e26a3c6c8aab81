"""Last lines kept, and the way of lines to a console that several workers share."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from aimaster.agent.lane import PREFIXED_LINE_BYTES_MAX, Lane
from aimaster.agent.sink import MEMORY_BYTES_MAX, Sink
from aimaster.agent.tails import LINE_BYTES_MAX, LINES_MAX, Tail, file_tail

IDLE_S = 20.0


def test_a_tail_keeps_the_last_lines_however_they_are_cut() -> None:
    text = b"".join(b"line %d\n" % n for n in range(1000)) + b"unfinished"
    for size in (1, 7, 4096, len(text)):
        tail = Tail()
        for begin in range(0, len(text), size):
            tail.feed(text[begin : begin + size])
        lines = tail.text().split("\n")
        assert lines[-1] == "unfinished"
        assert lines[:-1] == [f"line {n}" for n in range(1000 - LINES_MAX, 1000)]


def test_a_progress_bar_counts_as_its_last_state() -> None:
    tail = Tail()
    for percent in range(101):
        tail.feed(b"\r%3d%% done" % percent)
    tail.feed(b"\r\nnext\r\n")
    assert tail.text() == "100% done\nnext"


def test_an_endless_line_is_bounded() -> None:
    tail = Tail()
    for _ in range(100):
        tail.feed(b"x" * 64 * 1024)
    assert len(tail.text()) <= 2 * LINE_BYTES_MAX


def test_bytes_that_are_no_text() -> None:
    tail = Tail()
    tail.feed(b"\xff\xfe\x00ok\n")
    assert tail.text().endswith("ok")


def test_tail_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n" * 100_000 + b"new\n")
    assert file_tail(path).endswith("old\nnew")
    assert file_tail(tmp_path / "none") == ""


async def _through(tmp_path: Path, feed: list[list[bytes]], **options: object) -> bytes:
    """What comes out of a pipe when each list goes through a lane of its own, turn by turn."""
    ours, theirs = os.pipe()
    sink = Sink("test", spill_dir=tmp_path)
    lanes = [Lane(sink, theirs, **options) for _ in feed]  # type: ignore[arg-type]
    for turn in range(max(map(len, feed))):
        for lane, pieces in zip(lanes, feed, strict=True):
            if turn < len(pieces):
                lane.feed(pieces[turn])
    for lane in lanes:
        lane.end()
    assert await sink.close(IDLE_S)
    os.close(theirs)
    out = b""
    while data := os.read(ours, 65536):
        out += data
    os.close(ours)
    return out


def test_lines_of_several_workers_do_not_cut_each_other(tmp_path: Path) -> None:
    feed = [[b"aaa", b"aaa\n"], [b"bbb", b"bbb\nb"]]
    out = asyncio.run(_through(tmp_path, feed))
    assert out == b"aaaaaa\nbbbbbb\nb"


def test_a_lone_worker_passes_as_it_comes(tmp_path: Path) -> None:
    out = asyncio.run(_through(tmp_path, [[b"\r10%", b"\r20%", b"\xff\n"]], alone=True))
    assert out == b"\r10%\r20%\xff\n"


def test_prefixes(tmp_path: Path) -> None:
    feed = [[b"one\ntw", b"o\n", b"x" * (PREFIXED_LINE_BYTES_MAX + 1)]]
    out = asyncio.run(_through(tmp_path, feed, prefix=b"[rank3]:"))
    lines = out.split(b"\n")
    assert lines[:2] == [b"[rank3]:one", b"[rank3]:two"]
    assert [len(line) for line in lines[2:]] == [8 + PREFIXED_LINE_BYTES_MAX, 9, 0]


def test_a_prompt_appears_without_a_newline(tmp_path: Path) -> None:
    async def prompt() -> bytes:
        ours, theirs = os.pipe()
        sink = Sink("test", spill_dir=tmp_path)
        Lane(sink, theirs).feed(b"(Pdb) ")
        data = await asyncio.wait_for(asyncio.to_thread(os.read, ours, 100), IDLE_S)
        await sink.close(IDLE_S)
        os.close(ours)
        os.close(theirs)
        return data

    assert asyncio.run(prompt()) == b"(Pdb) "


def test_a_reader_that_stalls_loses_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    total = 3 * MEMORY_BYTES_MAX

    async def stalled() -> bytes:
        ours, theirs = os.pipe()
        sink = Sink("test", spill_dir=tmp_path)
        block = bytes(range(256)) * 1024
        for _ in range(total // len(block)):
            sink.write(theirs, block)  # nobody reads, and this returns
        assert not sink.full
        reading = asyncio.ensure_future(asyncio.to_thread(_read, ours, total))
        assert await sink.close(IDLE_S)
        data = await reading
        os.close(ours)
        os.close(theirs)
        return data

    assert asyncio.run(stalled()) == bytes(range(256)) * (total // 256)


def test_a_full_sink_says_so_and_tells_when_there_is_room(tmp_path: Path) -> None:
    async def full() -> None:
        ours, theirs = os.pipe()
        sink = Sink("test", spill_dir=tmp_path / "not there")
        queued = 0
        while not sink.full:
            sink.write(theirs, b"x" * 65536)
            queued += 65536
        room = asyncio.Event()
        sink.when_room(room.set)
        reading = asyncio.ensure_future(asyncio.to_thread(_read, ours, queued))
        await asyncio.wait_for(room.wait(), IDLE_S)
        assert not sink.full
        assert await sink.close(IDLE_S)
        await reading
        os.close(ours)
        os.close(theirs)

    asyncio.run(full())


def test_a_reader_that_has_gone_costs_its_stream_alone(tmp_path: Path) -> None:
    async def gone() -> str | None:
        ours, theirs = os.pipe()
        os.close(ours)
        sink = Sink("test", spill_dir=tmp_path)
        for _ in range(100):
            sink.write(theirs, b"x" * 65536)
        assert not await sink.close(IDLE_S)
        os.close(theirs)
        return sink.broken

    assert asyncio.run(gone()) == "Broken pipe"


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += os.read(fd, 1024 * 1024)
    return data


@pytest.mark.parametrize("size", [0, 1])
def test_an_unread_sink_is_given_up_after_a_while(tmp_path: Path, size: int) -> None:
    async def unread() -> bool:
        ours, theirs = os.pipe()
        sink = Sink("test", spill_dir=tmp_path)
        sink.write(theirs, b"x" * size * 1024 * 1024)
        whole = await sink.close(0.2)
        os.close(ours)  # lets its thread end
        os.close(theirs)
        return whole

    assert asyncio.run(unread()) is (size == 0)
