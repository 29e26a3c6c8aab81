"""Which software this is, as peers and people are told."""

from __future__ import annotations

from functools import cache
from importlib import metadata

DISTRIBUTION = "aimaster-ft"


@cache
def software() -> str:
    """Distribution and version: ``aimaster-ft 0.1.0``."""
    try:
        return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return f"{DISTRIBUTION} of unknown version"
