"""easyckpt inside other people's training loops, one module per framework, imported only by who uses it."""

from __future__ import annotations
