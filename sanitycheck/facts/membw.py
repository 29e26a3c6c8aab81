"""How fast memory is copied on the processors: ``cpu.membw``."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.request import Request

__all__ = ["MembwFacts", "collect"]

BLOCK_BYTES = 64 << 20
"""Per thread and side; far larger than a cache."""
TOTAL_BYTES_MAX = 1 << 30
PASSES = 3
PASS_S = 0.4
COPIES_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MembwFacts:
    """Bytes read and written per second, all threads together, once per pass."""

    threads: int = 8
    gb_s: tuple[float, ...] = (20.0, 20.2, 19.9)
    correct: bool = True


def collect(request: Request) -> MembwFacts:
    """Copy between large arrays on every processor of the mask; NumPy lets go of the
    interpreter meanwhile."""
    request.tell("loading numpy")
    try:
        import numpy
    except ImportError as error:
        raise NotApplicableError("numpy is not installed here") from error
    threads = max(1, min(len(os.sched_getaffinity(0)), TOTAL_BYTES_MAX // (2 * BLOCK_BYTES)))
    sources = [numpy.full(BLOCK_BYTES // 8, place + 1.0) for place in range(threads)]
    targets = [numpy.zeros_like(source) for source in sources]
    copied = [0] * threads

    def work(place: int, ends: float) -> None:
        copied[place] = 0
        while copied[place] < COPIES_MAX and (copied[place] == 0 or time.perf_counter() < ends):
            numpy.copyto(targets[place], sources[place])
            copied[place] += 1

    request.tell("copying")
    rates = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        workers = [
            threading.Thread(target=work, args=(place, begin + PASS_S), daemon=True)
            for place in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rates.append(round(2 * BLOCK_BYTES * sum(copied) / (time.perf_counter() - begin) / 1e9, 3))
    correct = all(bool((target == source).all()) for source, target in zip(sources, targets, strict=True))
    return MembwFacts(threads=threads, gb_s=tuple(rates), correct=correct)
