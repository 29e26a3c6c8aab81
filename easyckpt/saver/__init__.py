"""The saver process of a node; see `easyckpt.saver.service`. Nothing in this package imports torch."""

from __future__ import annotations
