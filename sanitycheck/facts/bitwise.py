"""The same seeded work on two processors gives the same bits: ``num.bitwise``.

A silent fault of one core (not a crash, a wrong number) shows as two digests. The work is what a training
step does: products, a normalisation, an exponential, a backward pass. One thread each, so that no order of
summation can vary, and every child is pinned to a processor of its own where the mask has two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sanitycheck.errors import ChildFailedError, NotApplicableError
from sanitycheck.facts.forked import run_forked
from sanitycheck.facts.nvml import may_have_devices
from sanitycheck.facts.request import Request

__all__ = ["BitwiseFacts", "DigestDevice", "collect"]

SEED = 20240229
ROUNDS = 3
CHILDREN = 2
RESERVE_S = 3.0
"""Of the probe's deadline, kept for imports before and tidying after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestDevice:
    """The same work on a device, twice; ``problem`` is the error where it could not be done."""

    index: int = 0
    name: str = ""
    digest: str = "0"
    again: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BitwiseFacts:
    """Digests of each child's rounds, and the processor each was pinned to (-1: not pinned).

    ``devices`` holds those of NVIDIA devices; only devices of one model are compared with each other.
    """

    library: str = "torch"
    digests: tuple[str, ...] = ("0", "0")
    repeats_equal: tuple[bool, ...] = (True, True)
    processors: tuple[int, ...] = (0, 1)
    devices: tuple[DigestDevice, ...] = ()


def _torch_work(torch: Any, device: str = "cpu") -> bytes:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(64, 256, generator=generator).to(device)
    weights = [
        (torch.randn(256, 256, generator=generator) / 16).to(device).requires_grad_() for _ in range(4)
    ]
    hasher = hashlib.sha256()
    for _ in range(ROUNDS):
        hidden = inputs
        for weight in weights:
            hidden = torch.nn.functional.layer_norm(hidden @ weight, (256,)).exp().clamp(max=8.0).tanh()
        loss = hidden.softmax(-1).square().sum()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.1 * gradient
                here = weight.detach().cpu()
                hasher.update(here.numpy().tobytes() if _has_numpy() else bytes(here.untyped_storage()))
    return hasher.digest()


def _has_numpy() -> bool:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True


def _numpy_work(numpy: Any) -> bytes:
    rng = numpy.random.default_rng(SEED)
    hidden = rng.standard_normal((64, 256), dtype=numpy.float32)
    weights = [rng.standard_normal((256, 256), dtype=numpy.float32) / 16 for _ in range(4)]
    hasher = hashlib.sha256()
    for _ in range(ROUNDS):
        for weight in weights:
            hidden = numpy.tanh(hidden @ weight)
            hidden = hidden / numpy.sqrt(numpy.square(hidden).mean(axis=1, keepdims=True) + 1e-6)
            hasher.update(hidden.tobytes())
    return hasher.digest()


def _devices(torch: Any, request: Request) -> tuple[DigestDevice, ...]:
    """The work on every NVIDIA device, each in a child of its own: CUDA does not survive a fork."""
    count = torch.cuda.device_count() if may_have_devices() else 0
    if not count:
        return ()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may sum in another order

    def one(index: int) -> dict[str, Any]:
        try:
            torch.use_deterministic_algorithms(True)
            torch.cuda.set_device(index)
            name = torch.cuda.get_device_properties(index).name
            first, second = (_torch_work(torch, f"cuda:{index}") for _ in range(2))
        except RuntimeError as error:
            return {"index": index, "problem": (str(error).splitlines() or ["no message"])[0][:300]}
        return {"index": index, "name": name, "digest": first.hex()[:32], "again": first == second}

    request.tell(f"computing on {count} devices")
    answers = run_forked(one, count=count, deadline_s=max(1.0, request.deadline_s / 2 - RESERVE_S))
    return tuple(
        DigestDevice(**(answer or {"index": index, "problem": "no answer in time"}))
        for index, answer in enumerate(answers)
    )


def collect(request: Request) -> BitwiseFacts:
    """Fork two children, pin each, and compare what they computed twice."""
    request.tell("loading the library")
    try:
        import torch as library

        work: Callable[[Any], bytes] = _torch_work
        name = f"torch {library.__version__}"
    except ImportError:
        try:
            import numpy as library  # type: ignore[no-redef]
        except ImportError as error:
            raise NotApplicableError("neither torch nor numpy is installed here") from error
        work, name = _numpy_work, f"numpy {library.__version__}"
    mask = sorted(os.sched_getaffinity(0))
    # Far apart: neighbours are often two threads of one core.
    processors = (mask[0], mask[-1])

    def one(index: int) -> dict[str, Any]:
        pinned = processors[index]
        try:
            os.sched_setaffinity(0, {pinned})
        except OSError:
            pinned = -1
        first, second = work(library), work(library)
        return {"digest": first.hex()[:32], "again": first == second, "processor": pinned}

    request.tell("computing")
    answers = run_forked(one, count=CHILDREN, deadline_s=max(1.0, request.deadline_s / 2 - RESERVE_S))
    lost = [index for index, answer in enumerate(answers) if answer is None]
    if lost:
        raise ChildFailedError(f"child {lost[0]} on processor {processors[lost[0]]} gave no answer")
    found = [answer for answer in answers if answer is not None]
    devices = _devices(library, request) if work is _torch_work else ()
    return BitwiseFacts(
        library=name,
        digests=tuple(answer["digest"] for answer in found),
        repeats_equal=tuple(answer["again"] for answer in found),
        processors=tuple(answer["processor"] for answer in found),
        devices=devices,
    )
