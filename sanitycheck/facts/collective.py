"""Collectives between two processes of this node over gloo: ``coll.intra``.

Values are whole numbers small enough for float32 to hold every sum exactly, so that "correct" means equal.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sanitycheck.errors import ChildFailedError, NotApplicableError, ToolMissingError
from sanitycheck.facts.forked import run_forked
from sanitycheck.facts.request import Request

__all__ = ["CollectiveFacts", "collect"]

RANKS = 2
SIZES_BYTES = (64, 64 << 10, 1 << 20, 16 << 20)
LARGE_BYTES = (64 << 20, 256 << 20)
"""Only at the level *standard* and deeper, and only while there is time: on two busy processors they take
tens of seconds, and a node under load is no broken node."""
LARGE_FACTOR = 6.0
"""Times the last size, that one four times as large may take."""
REPEATS = 2
RESERVE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFacts:
    """Outcome over all ranks and sizes.

    Attributes:
        largest_bytes: The largest payload that was exchanged.
        wrong: ``operation at size: k of n values wrong on rank r``, one per wrong result.
        mb_s: Payload over time of the fastest repeat of the largest size, by operation, slowest rank.
        problem: The library's own error, when the group could not be used.
    """

    backend: str = "gloo"
    ranks: int = RANKS
    interface: str = "lo"
    largest_bytes: int = SIZES_BYTES[-1]
    wrong: tuple[str, ...] = ()
    mb_s: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


def _expected(torch: Any, count: int, rank: int) -> Any:
    """What a rank gives: a pattern that differs by rank and by place."""
    return torch.arange(count, dtype=torch.float32).remainder(1009) + 10_000 * rank


def _all_reduce(torch: Any, count: int, rank: int) -> tuple[float, int]:
    mine = _expected(torch, count, rank)
    begin = time.perf_counter()
    torch.distributed.all_reduce(mine)
    took = time.perf_counter() - begin
    want = sum(_expected(torch, count, r) for r in range(RANKS))
    return took, int((mine != want).sum())


def _all_gather(torch: Any, count: int, rank: int) -> tuple[float, int]:
    parts = [torch.empty(count) for _ in range(RANKS)]
    mine = _expected(torch, count, rank)
    begin = time.perf_counter()
    torch.distributed.all_gather(parts, mine)
    took = time.perf_counter() - begin
    return took, sum(int((part != _expected(torch, count, r)).sum()) for r, part in enumerate(parts))


def _all_to_all(torch: Any, count: int, rank: int) -> tuple[float, int]:
    """Every rank gives each other one its share of the pattern."""
    part = max(1, count // RANKS)
    mine = _expected(torch, part * RANKS, rank)
    got = torch.empty_like(mine)
    begin = time.perf_counter()
    torch.distributed.all_to_all_single(got, mine)
    took = time.perf_counter() - begin
    begin_of_mine = slice(rank * part, (rank + 1) * part)
    want = torch.cat([_expected(torch, part * RANKS, r)[begin_of_mine] for r in range(RANKS)])
    return took, int((got != want).sum())


OPERATIONS = (("all_reduce", _all_reduce), ("all_gather", _all_gather), ("all_to_all", _all_to_all))


def _time_for_more(torch: Any, last_s: float, spent_s: float, *, deadline_s: float) -> bool:
    """Whether all ranks agree that a size four times as large still fits."""
    times = torch.tensor([last_s, spent_s])
    torch.distributed.all_reduce(times, op=torch.distributed.ReduceOp.MAX)
    slowest_s, spent_s = times.tolist()
    return bool(LARGE_FACTOR * slowest_s < deadline_s - spent_s)


def _rank(torch: Any, rank: int, folder: str, *, sizes: tuple[int, ...], deadline_s: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist = torch.distributed
    wrong: list[str] = []
    mb_s: dict[str, float] = {}
    largest, last_s, begun = 0, 0.0, time.monotonic()
    try:
        store = dist.FileStore(os.path.join(folder, "store"), RANKS)
        timeout = timedelta(seconds=deadline_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
        for size in sizes:
            large, begun_size = size in LARGE_BYTES, time.monotonic()
            if large and not _time_for_more(torch, last_s, begun_size - begun, deadline_s=deadline_s):
                break
            for name, operation in OPERATIONS:
                runs = [operation(torch, size // 4, rank) for _ in range(1 if large else REPEATS)]
                bad = max(bad for _, bad in runs)
                if bad:
                    wrong.append(f"{name} of {size} bytes: {bad} values wrong on rank {rank}")
                mb_s[name] = round(size / min(took for took, _ in runs) / 1e6, 1)
            largest, last_s = size, time.monotonic() - begun_size
    except RuntimeError as error:  # what torch.distributed raises for everything that fails below it
        return {"problem": (str(error).splitlines() or ["no message"])[0][:300]}
    return {"wrong": wrong, "mb_s": mb_s, "largest": largest}


def collect(request: Request) -> CollectiveFacts:
    """Fork two ranks, compare what they got with what must come out."""
    request.tell("importing torch")
    try:
        import torch
        import torch.distributed
    except ModuleNotFoundError as error:
        raise NotApplicableError("torch is not installed here") from error
    except (ImportError, OSError) as error:
        raise ToolMissingError(f"torch cannot be imported: {error}") from error
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise NotApplicableError("this torch has no gloo")
    # Only this node is judged here, so name resolution of the host must not matter, unless the user chose.
    interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline_s = max(2.0, request.deadline_s - RESERVE_S)
    sizes = SIZES_BYTES + (LARGE_BYTES if request.long else ())
    request.tell("exchanging values")
    with tempfile.TemporaryDirectory(prefix="sanitycheck-") as folder:
        answers = run_forked(
            lambda rank: _rank(torch, rank, str(Path(folder)), sizes=sizes, deadline_s=deadline_s),
            count=RANKS,
            deadline_s=deadline_s,
        )
    problems = [str(answer["problem"]) for answer in answers if answer and "problem" in answer]
    lost = [f"rank {rank} gave no answer" for rank, answer in enumerate(answers) if answer is None]
    good = [answer for answer in answers if answer and "wrong" in answer]
    wrong = tuple(line for answer in good for line in answer["wrong"])
    if lost and not problems and not wrong:
        # Silence is no proof: a node under load is slow, and what is broken says so.
        raise ChildFailedError("; ".join(lost))
    speeds = [answer["mb_s"] for answer in good]
    return CollectiveFacts(
        interface=interface,
        largest_bytes=min((int(answer["largest"]) for answer in good), default=0),
        wrong=wrong,
        mb_s={name: min(speed[name] for speed in speeds) for name in speeds[0]} if speeds else {},
        problem="; ".join(problems + lost),
    )
