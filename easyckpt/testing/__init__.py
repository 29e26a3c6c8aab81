"""What tests of a checkpoint store need: one suite for every implementation, and ways to die at any point.

* `conformance_cases`: what `easyckpt.storage.base` promises, as runnable cases;
* `CrashingPosix`: stops, or kills the process, at the k-th primitive operation of a durable write;
* `SimulatedDisk`: a disk that loses what was not synced, in every way that a file system may;
* `CrashingStorage`: stops at the k-th operation on any store;
* `SampleRun`: writes small, real checkpoints.

Whoever writes another `Storage` runs it through the first.
"""

from __future__ import annotations

from easyckpt.testing.conformance import ConformanceCase, conformance_cases
from easyckpt.testing.crash import Crash, CrashingPosix, CrashingStorage, crash_points
from easyckpt.testing.disk import PowerLoss, SimulatedDisk
from easyckpt.testing.sample import SampleRun

__all__ = [
    "ConformanceCase",
    "Crash",
    "CrashingPosix",
    "CrashingStorage",
    "PowerLoss",
    "SampleRun",
    "SimulatedDisk",
    "conformance_cases",
    "crash_points",
]
