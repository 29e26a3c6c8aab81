"""The ``easyckpt`` command."""

from __future__ import annotations

from easyckpt.cli.app import main

__all__ = ["main"]
