"""The ``easyckpt`` command."""

from __future__ import annotations

from easyckpt.cli import care, interop  # add their commands
from easyckpt.cli.app import main

__all__ = ["care", "interop", "main"]
