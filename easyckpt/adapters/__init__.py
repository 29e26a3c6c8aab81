"""Adapters teach easyckpt to read and write one kind of object; see `easyckpt.adapters.base`."""

from __future__ import annotations
