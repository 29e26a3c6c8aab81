"""Computing on NVIDIA devices through torch: ``gpu.context``, ``perf.*``, ``mem.pattern``,
``deep.gemm_sustain``.

torch is imported once; then each device is used by a forked child of its own, so that a device that hangs or
breaks its context takes nothing else with it. Nothing starts CUDA before the fork: torch counts devices
through NVML (``PYTORCH_NVML_BASED_CUDA_CHECK``, set for every probe).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sanitycheck.errors import ToolMissingError
from sanitycheck.facts.forked import run_forked
from sanitycheck.facts.nvml import NO_DEVICE, Device, may_have_devices, pci_gpus
from sanitycheck.facts.request import Request
from sanitycheck.result import Level

__all__ = [
    "ContextDevice",
    "ContextFacts",
    "MeasuredDevice",
    "MeasuredFacts",
    "PairFacts",
    "PairsFacts",
    "PatternDevice",
    "PatternFacts",
    "collect_context",
    "collect_d2h",
    "collect_gemm",
    "collect_h2d",
    "collect_membw",
    "collect_p2p",
    "collect_pattern",
    "collect_sustained",
]

RESERVE_S = 6.0
CONTEXT_BYTES = 256 << 20
COPY_BYTES = 256 << 20
MEMORY_BYTES = 1 << 30
GEMM_SIZE = 8192
PASSES = 3
PASS_S = 0.4
PASS_MAX = 200
SUSTAIN_S = 180.0
SUSTAIN_SLICE_S = 5.0
PATTERN_PART_BYTES = 256 << 20
PATTERN_SHARE = 0.92
"""Of the free memory that is asked for: torch and the driver need the rest."""
PATTERN_ROUNDS_MAX = 250
PATTERNS = (0x00, 0xFF, 0xAA, 0x55)
PROBLEM_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextDevice(Device):
    """Outcome of the smallest real use of a device; ``problem`` is CUDA's own error."""

    problem: str = ""
    wrong_bytes: int = 0
    took_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFacts:
    """Smallest use of each device."""

    init_error: str = ""
    devices: tuple[ContextDevice, ...] = (ContextDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice(Device):
    """A rate, once per pass, in the unit of the facts' metric."""

    problem: str = ""
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFacts:
    """One metric of each device.

    Attributes:
        metric: ``gemm_tflops``, ``memory_gb_s``, ``h2d_gb_s``, ``d2h_gb_s`` or ``sustained_tflops``.
        dtype: Of the numbers multiplied; empty for copies.
    """

    metric: str = "gemm_tflops"
    dtype: str = "bf16"
    init_error: str = ""
    devices: tuple[MeasuredDevice, ...] = (MeasuredDevice(values=(790.0, 795.0, 792.0)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """A copy from one device to another; ``direct`` when no host memory lies between."""

    source: int
    target: int
    gb_s: float = 380.0
    direct: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsFacts:
    """Copies between all devices; ``name`` is their model."""

    init_error: str = ""
    name: str = "NVIDIA H100 80GB HBM3"
    count: int = 8
    pairs: tuple[PairFacts, ...] = (PairFacts(source=0, target=1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternDevice(Device):
    """Patterns written over a device's memory and read back."""

    problem: str = ""
    tested_bytes: int = 72 << 30
    free_bytes: int = 78 << 30
    wrong_bytes: int = 0
    rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternFacts:
    """Pattern test of each device."""

    init_error: str = ""
    devices: tuple[PatternDevice, ...] = (PatternDevice(),)


Work = Callable[[Any, int], dict[str, Any]]


def _torch(request: Request) -> tuple[Any, int]:
    """(torch, devices); no devices where the node has none.

    Raises:
        ToolMissingError: There are devices, but no torch that could use them.
    """
    if not may_have_devices():
        return None, 0
    request.tell("importing torch")
    try:
        import torch
    except ImportError as error:
        raise ToolMissingError("torch is not installed: nothing can compute on the devices") from error
    count = torch.cuda.device_count()
    if not count and pci_gpus():
        raise ToolMissingError(f"torch {torch.__version__} sees no device (built without CUDA, or hidden)")
    return torch, count


def _identity(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", "")
    return {"index": index, "uuid": f"GPU-{uuid}" if uuid else "", "name": properties.name}


def _guarded(torch: Any, work: Work, index: int) -> dict[str, Any]:
    """CUDA's errors are RuntimeErrors; they are what we came to find."""
    try:
        torch.cuda.set_device(index)
        return {**_identity(torch, index), **work(torch, index)}
    except RuntimeError as error:
        text = (str(error).splitlines() or ["no message"])[0]
        return {"index": index, "problem": text[:PROBLEM_CHARS_MAX]}


def _each(request: Request, device: type[Any], work: Work, *, together: bool) -> tuple[str, tuple[Any, ...]]:
    """(error, one record per device); a child without an answer gives a record that says so."""
    torch, count = _torch(request)
    if not count:
        return NO_DEVICE, ()
    limit_s = max(2.0, request.deadline_s - RESERVE_S)
    groups = [list(range(count))] if together else [[index] for index in range(count)]
    records = []
    ends = time.monotonic() + limit_s
    for group in groups:
        request.tell(
            f"computing on device {group[0]}" if len(group) == 1 else f"computing on {count} devices"
        )

        def one(place: int, members: list[int] = group) -> dict[str, Any]:
            return _guarded(torch, work, members[place])

        share_s = max(1.0, (ends - time.monotonic()) / (1 if together else max(1, count - group[0])))
        for index, answer in zip(group, run_forked(one, count=len(group), deadline_s=share_s), strict=True):
            answer = answer or {"index": index, "problem": f"no answer within {share_s:.0f} s"}
            records.append(device(**{"name": "", "uuid": "", **answer}))
    return "", tuple(records)


def collect_context(request: Request) -> ContextFacts:
    """Make a context, take 256 MiB, write and read them."""

    def work(torch: Any, index: int) -> dict[str, Any]:
        begin = time.perf_counter()
        block = torch.full((CONTEXT_BYTES,), 0xA5, dtype=torch.uint8, device="cuda")
        wrong = int((block != 0xA5).sum())
        torch.cuda.synchronize()
        return {"wrong_bytes": wrong, "took_s": round(time.perf_counter() - begin, 3)}

    error, devices = _each(request, ContextDevice, work, together=True)
    return ContextFacts(init_error=error, devices=devices)


def _passes(torch: Any, once: Callable[[], Any], amount: float) -> list[float]:
    """``amount`` per second over each pass, timed by the device's own events."""
    once()
    torch.cuda.synchronize()
    rates = []
    for _ in range(PASSES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started, count = time.perf_counter(), 0
        begin.record()
        while count < PASS_MAX and (count == 0 or time.perf_counter() - started < PASS_S):
            once()
            count += 1
            if count % 8 == 0:
                torch.cuda.synchronize()
        end.record()
        end.synchronize()
        rates.append(round(amount * count / (begin.elapsed_time(end) / 1e3), 3))
    return rates


def _product(torch: Any) -> tuple[Callable[[], Any], float]:
    """(one product, its TFLOP)."""
    kind = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=kind) for _ in range(2))
    out = torch.empty_like(left)
    return (lambda: torch.matmul(left, right, out=out)), 2.0 * GEMM_SIZE**3 / 1e12


def _measured(request: Request, metric: str, work: Work, *, together: bool, dtype: str = "") -> MeasuredFacts:
    error, devices = _each(request, MeasuredDevice, work, together=together)
    return MeasuredFacts(metric=metric, dtype=dtype, init_error=error, devices=devices)


def collect_gemm(request: Request) -> MeasuredFacts:
    """Large products on all devices at the same time, as in a training."""

    def work(torch: Any, index: int) -> dict[str, Any]:
        once, tflop = _product(torch)
        return {"values": _passes(torch, once, tflop)}

    return _measured(request, "gemm_tflops", work, together=True, dtype="bf16")


def collect_membw(request: Request) -> MeasuredFacts:
    """A large copy inside each device; every byte is read and written."""

    def work(torch: Any, index: int) -> dict[str, Any]:
        source = torch.empty(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return {"values": _passes(torch, lambda: target.copy_(source), 2 * MEMORY_BYTES / 1e9)}

    return _measured(request, "memory_gb_s", work, together=True)


def _copies(request: Request, metric: str, *, to_device: bool) -> MeasuredFacts:
    def work(torch: Any, index: int) -> dict[str, Any]:
        host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        target, source = (there, host) if to_device else (host, there)
        return {"values": _passes(torch, lambda: target.copy_(source, non_blocking=True), COPY_BYTES / 1e9)}

    # One after the other: devices behind one switch share its way to the host.
    return _measured(request, metric, work, together=False)


def collect_h2d(request: Request) -> MeasuredFacts:
    """Pinned copies to each device."""
    return _copies(request, "h2d_gb_s", to_device=True)


def collect_d2h(request: Request) -> MeasuredFacts:
    """Pinned copies from each device."""
    return _copies(request, "d2h_gb_s", to_device=False)


def collect_p2p(request: Request) -> PairsFacts:
    """Copies between all devices, one pair at a time."""
    torch, count = _torch(request)
    if not count:
        return PairsFacts(init_error=NO_DEVICE, pairs=(), count=0)

    def one(_: int) -> dict[str, Any]:
        rows = []
        for source in range(count):
            for target in range(count):
                if source != target:
                    rows.append(_pair(torch, source, target))
        return {"rows": rows, "name": torch.cuda.get_device_properties(0).name}

    request.tell("copying between devices")
    (answer,) = run_forked(one, count=1, deadline_s=max(2.0, request.deadline_s - RESERVE_S))
    if answer is None:
        raise ToolMissingError("copies between devices gave no answer in time")
    pairs = tuple(PairFacts(**row) for row in answer["rows"])
    return PairsFacts(pairs=pairs, count=count, name=answer["name"])


def _pair(torch: Any, source: int, target: int) -> dict[str, Any]:
    row = {"source": source, "target": target}
    try:
        torch.cuda.set_device(source)
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
        rates = _passes(torch, lambda: there.copy_(here, non_blocking=True), COPY_BYTES / 1e9)
        direct = bool(torch.cuda.can_device_access_peer(source, target))
        return {**row, "gb_s": max(rates), "direct": direct}
    except RuntimeError as error:
        return {**row, "gb_s": 0.0, "problem": str(error)[:PROBLEM_CHARS_MAX]}


def collect_pattern(request: Request) -> PatternFacts:
    """Write patterns over nearly all free memory, read them back; again and again at the level *deep*."""
    deep = request.level.includes(Level.DEEP)
    ends = time.monotonic() + (request.deadline_s - 3 * RESERVE_S if deep else 0.0)

    def work(torch: Any, index: int) -> dict[str, Any]:
        free, _ = torch.cuda.mem_get_info()
        parts, taken = [], 0
        while taken + PATTERN_PART_BYTES <= free * PATTERN_SHARE:
            parts.append(torch.empty(PATTERN_PART_BYTES, dtype=torch.uint8, device="cuda"))
            taken += PATTERN_PART_BYTES
        wrong = rounds = 0
        while rounds == 0 or (time.monotonic() < ends and rounds < PATTERN_ROUNDS_MAX and not wrong):
            for pattern in PATTERNS:
                for part in parts:
                    part.fill_(pattern)
                for part in parts:
                    wrong += int((part != pattern).sum())
            rounds += 1
        return {"tested_bytes": taken, "free_bytes": int(free), "wrong_bytes": wrong, "rounds": rounds}

    error, devices = _each(request, PatternDevice, work, together=True)
    return PatternFacts(init_error=error, devices=devices)


def collect_sustained(request: Request) -> MeasuredFacts:
    """Products for minutes; one rate per slice, so that a drop under heat shows."""
    lasts_s = min(SUSTAIN_S, max(5.0, request.deadline_s - 3 * RESERVE_S))

    def work(torch: Any, index: int) -> dict[str, Any]:
        once, tflop = _product(torch)
        once()
        torch.cuda.synchronize()
        values, ends = [], time.monotonic() + lasts_s
        while time.monotonic() < ends:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < SUSTAIN_SLICE_S:
                for _ in range(8):
                    once()
                torch.cuda.synchronize()
                count += 8
            values.append(round(tflop * count / (time.perf_counter() - began), 3))
        return {"values": values}

    return _measured(request, "sustained_tflops", work, together=True, dtype="bf16")
