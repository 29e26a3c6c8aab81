"""A state into slot bytes and back, without a saver: what a rank does, and nothing else."""

from __future__ import annotations

import mmap
from typing import Any

from easyckpt.layout import Layout
from easyckpt.loader import Loader, known_of
from easyckpt.plain import unpack
from easyckpt.snapshot import fit_layout, read_plain, reader, write
from easyckpt.state import capture


def to_bytes(state: dict[str, Any], previous: Layout | None = None) -> tuple[Layout, mmap.mmap]:
    """The layout and a body that holds the state."""
    captured = capture(state)
    layout = fit_layout(captured, previous)
    body = mmap.mmap(-1, layout.body_bytes)
    write(body, layout, captured=captured, fresh=True)
    return layout, body


def from_bytes(layout: Layout, body: mmap.mmap, state: dict[str, Any], *, strict: bool = True) -> None:
    """Load the body into the state, in place."""
    tree = unpack(read_plain(body, layout, where="test"))
    loader = Loader(state, tree, known=known_of(layout.chunks), strict=strict, where="test")
    begins = {chunk.name: chunk.begin for chunk in layout.chunks}
    places = {spec: begins[spec.name] for spec in loader.compare()}
    loader.fill(reader(body, places, body_bytes=layout.body_bytes))
