"""A state into slot bytes and back, without a saver: what a rank does, and nothing else."""

from __future__ import annotations

import mmap
from typing import Any

from easyckpt.layout import Layout
from easyckpt.loader import Loader, known_of
from easyckpt.overlap.plan import CopyPlan
from easyckpt.plain import unpack
from easyckpt.snapshot import as_bytes, fit_layout, read_plain, reader, write_frame, write_plain
from easyckpt.state import Capture, capture


def to_bytes(state: dict[str, Any], previous: Layout | None = None) -> tuple[Layout, mmap.mmap]:
    """The layout and a body that holds the state."""
    captured = capture(state)
    layout = fit_layout(captured, previous)
    body = mmap.mmap(-1, layout.body_bytes)
    write(body, layout, captured)
    return layout, body


def write(body: mmap.mmap, layout: Layout, captured: Capture) -> None:
    """Copy a state into a body, all of it at once."""
    write_frame(body, layout)
    plan = CopyPlan(layout, captured.tensors, everything_at_once=True)
    plan.copy_at_once(as_bytes(body, layout), captured.tensors)
    write_plain(body, layout, captured.plain)


def from_bytes(layout: Layout, body: mmap.mmap, state: dict[str, Any], *, strict: bool = True) -> None:
    """Load the body into the state, in place."""
    tree = unpack(read_plain(body, layout, where="test"))
    loader = Loader(state, tree, known=known_of(layout.chunks), strict=strict, where="test")
    begins = {chunk.name: chunk.begin for chunk in layout.chunks}
    places = {spec: begins[spec.name] for spec in loader.compare()}
    loader.fill(reader(body, places, body_bytes=layout.body_bytes))
