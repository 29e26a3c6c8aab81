"""Speed and correctness of a matrix product on the processors: ``cpu.gemm``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.request import Request

__all__ = ["GemmFacts", "collect"]

SIZE = 1024
PASSES = 3
PASS_S = 0.25
"""Long enough for the clock of the processor to rise, short enough for three."""
PRODUCTS_MAX = 2000
SEED = 20240229


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFacts:
    """Figures of the product.

    Attributes:
        gflops: Of each pass; the best counts, since other work on the node can only lower them.
        relative_error: Largest deviation from a product in double precision, over the largest value.
    """

    library: str = "numpy"
    threads: int = 1
    size: int = SIZE
    gflops: tuple[float, ...] = (100.0, 100.0, 100.0)
    relative_error: float = 1e-7


def _numpy(size: int) -> tuple[str, Any, Any]:
    import numpy

    rng = numpy.random.default_rng(SEED)
    left, right = (rng.standard_normal((size, size), dtype=numpy.float32) for _ in range(2))
    out = numpy.empty_like(left)

    def product() -> Any:
        return numpy.matmul(left, right, out=out)

    def deviation() -> float:
        exact = left.astype(numpy.float64) @ right.astype(numpy.float64)
        return float(numpy.abs(product() - exact).max() / numpy.abs(exact).max())

    return f"numpy {numpy.__version__}", product, deviation


def _torch(size: int) -> tuple[str, Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    left, right = (torch.randn(size, size, generator=generator) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> Any:
        return torch.matmul(left, right, out=out)

    def deviation() -> float:
        exact = left.double() @ right.double()
        return float((product() - exact).abs().max() / exact.abs().max())

    return f"torch {torch.__version__}", product, deviation


def _flops(product: Any, size: int) -> float:
    """GFLOP/s over one pass."""
    begin, count = time.perf_counter(), 0
    while count < PRODUCTS_MAX and (count == 0 or time.perf_counter() - begin < PASS_S):
        product()
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - begin) / 1e9


def collect(request: Request) -> GemmFacts:
    """Multiply on all processors of the affinity mask; NumPy first, since its import costs least."""
    request.tell("loading the library")
    try:
        library, product, deviation = _numpy(SIZE)
    except ImportError:
        try:
            library, product, deviation = _torch(SIZE)
        except ImportError as error:
            raise NotApplicableError("neither numpy nor torch is installed here") from error
    request.tell("multiplying")
    product()  # starts the library's threads
    return GemmFacts(
        library=library,
        threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        gflops=tuple(round(_flops(product, SIZE), 3) for _ in range(PASSES)),
        relative_error=deviation(),
    )
