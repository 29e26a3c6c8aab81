"""What a GPU model should reach: ``data/gpu_specs.yaml``.

A name of NVML is matched by substring with exclusions, and must fit one entry only. An unknown model gives
None: nothing absolute is judged then. The guard on units compares every figure with what physics and the
other figures of the entry allow, since a slip by a factor of ten or a thousand is the usual error of such
tables.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanitycheck.errors import TableError
from sanitycheck.knowledge.table import DATA, load_table

__all__ = ["GpuSpec", "check_units", "load_specs", "replay_expected_per_min", "spec_of"]

SPECS = DATA / "gpu_specs.yaml"
GB = 1e9
PCIE_LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One direction, after encoding (PCI Express base specification)."""
NVLINK_GB_S_RANGE = (12.0, 110.0)
MEMORY_GB_S_RANGE = (200.0, 20_000.0)
MEMORY_GB_RANGE = (8, 600)
TFLOPS_RANGE = (10.0, 30_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One model.

    Attributes:
        dense_tflops: Peak without sparsity, by data type.
        gemm_tflops: What a large bf16 product reaches in practice; None where nobody published it.
        memory_gb_s: Peak of the memory.
        nvlinks: Links that the chip has; 0: none.
        bridged: NVLinks go over a bridge that may be missing, so that none active is healthy.
        chip_link: The host is reached over a chip link, so that PCIe values mean nothing.
        h2d_gb_s: What a pinned copy to the device usually reaches.
        source: Where each figure is from.
    """

    id: str
    match: tuple[str, ...]
    exclude: tuple[str, ...]
    arch: str
    memory_gb: float
    memory_gb_s: float
    dense_tflops: Mapping[str, float]
    gemm_tflops: float | None
    nvlinks: int
    nvlink_gb_s: float | None
    bridged: bool
    chip_link: bool
    pcie_gen: int
    pcie_width: int
    h2d_gb_s: float | None
    source: Mapping[str, str]

    def fits(self, name: str) -> bool:
        """Whether NVML's product name means this model."""
        return any(part in name for part in self.match) and not any(part in name for part in self.exclude)


def _spec(item: Mapping[str, Any]) -> GpuSpec:
    link, pcie = item["nvlink"], item["pcie"]
    tflops = {name: float(value) for name, value in item["dense_tflops"].items() if value is not None}
    gemm = (item.get("achieved") or {}).get("matmul_bf16_tflops")
    return GpuSpec(
        id=str(item["id"]),
        match=tuple(item["match"]),
        exclude=tuple(item.get("match_exclude") or ()),
        arch=str(item["arch"]),
        memory_gb=float(item["memory_gb"]),
        memory_gb_s=float(item["memory_bw_gb_s"]),
        dense_tflops=tflops,
        gemm_tflops=None if gemm is None else float(gemm),
        nvlinks=int(link.get("links", 0)) if link.get("type", "nvlink") == "nvlink" else 0,
        nvlink_gb_s=link.get("total_unidir_gb_s"),
        bridged=bool(link.get("bridge", False)),
        chip_link="c2c_total_gb_s" in item or "Grace" in str(pcie.get("note", "")),
        pcie_gen=int(pcie["gen"]),
        pcie_width=int(pcie["width"]),
        h2d_gb_s=pcie.get("typical_h2d_gb_s"),
        source={str(key): str(value) for key, value in item["source"].items()},
    )


def check_units(spec: GpuSpec) -> None:
    """Raise on a figure that cannot be in the unit it should have.

    Raises:
        TableError: Which figure, and what was expected of it.
    """

    def demand(good: bool, what: str) -> None:
        if not good:
            raise TableError(SPECS.name, problem=f"{spec.id}: {what}; a slip of the unit?")

    demand(MEMORY_GB_RANGE[0] <= spec.memory_gb <= MEMORY_GB_RANGE[1], f"memory of {spec.memory_gb} GB")
    low, high = MEMORY_GB_S_RANGE
    demand(low <= spec.memory_gb_s <= high, f"memory bandwidth of {spec.memory_gb_s} GB/s")
    for name, value in spec.dense_tflops.items():
        least = 0.3 if name.startswith("fp64") else TFLOPS_RANGE[0] / 2
        demand(least <= value <= TFLOPS_RANGE[1], f"{value} TFLOP/s {name}")
    peak = spec.dense_tflops.get("bf16") or spec.dense_tflops.get("fp16")
    if spec.gemm_tflops is not None and peak:
        share = spec.gemm_tflops / peak
        demand(0.3 <= share <= 1.0, f"a product at {share:.2f} of the peak")
    if spec.nvlinks and spec.nvlink_gb_s:
        per_link = spec.nvlink_gb_s / spec.nvlinks
        demand(NVLINK_GB_S_RANGE[0] <= per_link <= NVLINK_GB_S_RANGE[1], f"{per_link:.1f} GB/s per NVLink")
    demand(spec.pcie_gen in PCIE_LANE_GB_S, f"PCIe generation {spec.pcie_gen}")
    if spec.h2d_gb_s is not None:
        lanes = PCIE_LANE_GB_S[spec.pcie_gen] * spec.pcie_width
        demand(0.4 * lanes <= spec.h2d_gb_s <= lanes, f"copies of {spec.h2d_gb_s} GB/s over {lanes:.1f}")


def load_specs(path: Path = SPECS) -> tuple[GpuSpec, ...]:
    """All models, checked.

    Raises:
        TableError: A field is missing, a unit slipped, or a name of one entry fits another too.
    """
    data = load_table(path, version=1)
    try:
        specs = tuple(_spec(item) for item in data["gpus"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(path.name, problem=f"an entry is incomplete: {error!r}") from error
    for spec in specs:
        check_units(spec)
        for name in spec.match:
            fitting = [other.id for other in specs if other.fits(name)]
            if fitting != [spec.id] and not _narrowed(spec, name, specs):
                raise TableError(path.name, problem=f"{name!r} fits {', '.join(fitting) or 'nothing'}")
    return specs


def _narrowed(spec: GpuSpec, name: str, specs: Sequence[GpuSpec]) -> bool:
    """Whether a name only serves together with exclusions (``NVIDIA L4`` is part of ``NVIDIA L40``)."""
    return spec.fits(name) and all(
        other is spec or not other.fits(name) or bool(other.exclude) for other in specs
    )


@functools.cache
def _all() -> tuple[GpuSpec, ...]:
    return load_specs()


def spec_of(name: str) -> GpuSpec | None:
    """The model of NVML's product name; None where the table has none or more than one."""
    fitting = [spec for spec in _all() if spec.fits(name)]
    return fitting[0] if len(fitting) == 1 else None


@functools.cache
def _replays() -> Mapping[str, float]:
    return {
        str(key): float(value)
        for key, value in load_table(SPECS, version=1)["pcie_replay_expectation"][
            "per_minute_per_lane"
        ].items()
    }


def replay_expected_per_min(generation: int, *, width: int) -> float:
    """Corrected PCIe errors a minute that a link of this speed may show."""
    return _replays().get(f"gen{generation}", max(_replays().values())) * max(1, width)
