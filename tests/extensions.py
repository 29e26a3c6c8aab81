"""The environment in which tests run DeepSpeed: with the extensions that the set-up built."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "hello_deepspeed"


def _environment() -> dict[str, str]:
    """From the example itself: another ``ninja`` or folder would have them built again within the tests."""
    found: dict[str, str] = runpy.run_path(str(EXAMPLE / "build_ops.py"))["environment"]()
    return found


DEEPSPEED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **_environment()}
