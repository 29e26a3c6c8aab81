"""A body that is put together from several sources: the plan, as data. Pure.

An *assembly* says, for each source, which of its bytes go to which place of which target buffer. A source
is a stored body, named by the rank that saved it. Where a source's bytes really come from (a slot here, a
peer's memory, a file, and the next of these when one fails) is the business of who carries the assembly
out: `easyckpt.saver.gather`. Whoever can say "these bytes of my body are those bytes of that body" can use
it: a load into another layout (`easyckpt.catalog`), and a body of which only a part was stored.

Sources are read in intervals: whole hash chunks of a file, since only a whole one can be proved, or merged
ranges for a transfer. `cut` says which takes an interval serves, so that each byte is fetched once, whatever
the number of targets that want it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from easyckpt.layout import ALIGNMENT, SMALL_ALIGNMENT, ChunkSpec

__all__ = ["Assembly", "Interval", "Take", "cut", "merged", "place", "scatter", "touched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Bytes of a source that go to one place of one target."""

    source_begin: int
    """Counted from the start of the source's body."""
    target: int
    """Number of the target buffer."""
    target_begin: int
    length: int


Assembly = dict[int, list[Take]]
"""Saved rank → takes, by rising ``source_begin``."""

Interval = tuple[int, int]
"""First byte, and the byte after the last."""


def place(wanted: Sequence[ChunkSpec]) -> tuple[list[int], int]:
    """Where each wanted chunk begins in a buffer for all of them, and the buffer's length."""
    begins = []
    cursor = 0
    for spec in wanted:
        alignment = ALIGNMENT if spec.byte_count >= ALIGNMENT else SMALL_ALIGNMENT
        cursor += -cursor % alignment
        begins.append(cursor)
        cursor += spec.byte_count
    return begins, cursor


def touched(takes: Iterable[Take], *, chunk_bytes: int) -> list[int]:
    """Numbers of the hash chunks that takes touch, rising."""
    found: set[int] = set()
    for take in takes:
        last = (take.source_begin + take.length - 1) // chunk_bytes
        found.update(range(take.source_begin // chunk_bytes, last + 1))
    return sorted(found)


def merged(takes: Iterable[Take], *, length_max: int) -> list[Interval]:
    """Disjoint intervals that cover the takes of one source and nothing else, none longer than a limit."""
    joined: list[Interval] = []
    for take in sorted(takes, key=lambda item: item.source_begin):
        end = take.source_begin + take.length
        if joined and take.source_begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((take.source_begin, end))
    return [(at, min(at + length_max, end)) for begin, end in joined for at in range(begin, end, length_max)]


def cut(takes: Iterable[Take], intervals: Sequence[Interval]) -> list[list[Take]]:
    """What each interval serves: the takes' parts within it, their ``source_begin`` counted from its begin.

    Args:
        takes: of one source.
        intervals: rising and disjoint; together they cover the takes.
    """
    starts = [interval[0] for interval in intervals]
    parts: list[list[Take]] = [[] for _ in intervals]
    for take in takes:
        at, end = take.source_begin, take.source_begin + take.length
        number = bisect.bisect_right(starts, at) - 1
        while at < end:
            begin, stop = intervals[number]
            length = min(stop, end) - at
            parts[number].append(
                Take(
                    source_begin=at - begin,
                    target=take.target,
                    target_begin=take.target_begin + at - take.source_begin,
                    length=length,
                )
            )
            at += length
            number += 1
    return parts


def scatter(source: memoryview, takes: Iterable[Take], *, targets: Sequence[memoryview]) -> None:
    """Copy what takes say."""
    for take in takes:
        begin = take.target_begin
        targets[take.target][begin : begin + take.length] = source[
            take.source_begin : take.source_begin + take.length
        ]
