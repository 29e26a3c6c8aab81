"""The ``easyckpt`` command."""

from __future__ import annotations

from easyckpt.cli import interop  # adds its commands
from easyckpt.cli.app import main

__all__ = ["interop", "main"]
