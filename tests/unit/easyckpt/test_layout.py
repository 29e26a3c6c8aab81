"""The slot is a safetensors file, aligned; a layout read back is checked."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import safetensors.numpy

from easyckpt.errors import CorruptCheckpoint, Misuse
from easyckpt.layout import (
    ALIGNMENT,
    ChunkKind,
    ChunkSpec,
    Layout,
    build_layout,
    encode_layout,
    layout_from_dict,
    layout_to_dict,
)


def spec(name: str, *sizes: int, dtype: str = "float32", **more: Any) -> ChunkSpec:
    fields: dict[str, Any] = {"global_shape": sizes, "offsets": (0,) * len(sizes), **more}
    return ChunkSpec(name=name, dtype=dtype, sizes=sizes, **fields)


def sample() -> Layout:
    return build_layout(
        [
            spec("small", 3),
            spec("large", 100, 100),
            spec("scalar"),
            spec("empty", 0, 4),
            spec("tied", 100, 100, alias_of="large"),
            spec("box", 2, 5, global_shape=(4, 5), offsets=(2, 0)),
            spec("flat", 4000, global_shape=(100, 80), offsets=(40,), kind=ChunkKind.FLAT),
            spec("fnuz", 5, dtype="float8_e4m3fnuz"),
        ],
        state_bytes=1000,
    )


def test_the_body_is_a_safetensors_file_with_aligned_data() -> None:
    layout = sample()
    body = layout.header + bytes(layout.body_bytes - len(layout.header))
    found = safetensors.numpy.load(body)
    assert set(found) >= {"small", "large", "scalar", "empty", "box#2,0", "flat#40", "fnuz", "__state__"}
    assert found["large"].shape == (100, 100)
    assert len(layout.header) % ALIGNMENT == 0
    assert layout.body_bytes % ALIGNMENT == 0
    for chunk in layout.chunks:
        assert chunk.begin % 64 == 0 or chunk.begin == chunk.end
        if chunk.end - chunk.begin >= ALIGNMENT:
            assert chunk.begin % ALIGNMENT == 0
    by_name = {chunk.name: chunk for chunk in layout.chunks}
    assert (by_name["tied"].begin, by_name["tied"].key) == (by_name["large"].begin, "large")


def test_a_layout_comes_back_from_json() -> None:
    layout = sample()
    again = layout_from_dict(json.loads(json.dumps(layout_to_dict(layout))), header=layout.header)
    assert again == layout


def test_the_digest_tells_layouts_apart() -> None:
    digests = {
        build_layout([spec("a", 3)], state_bytes=100).digest,
        build_layout([spec("b", 3)], state_bytes=100).digest,
        build_layout([spec("a", 3, dtype="int32")], state_bytes=100).digest,
        build_layout([spec("a", 3), spec("b", 3, alias_of="a")], state_bytes=100).digest,
        build_layout([spec("a", 3, global_shape=(6,), offsets=(3,))], state_bytes=100).digest,
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    "specs",
    [
        [spec("a", 1), spec("a", 1)],
        [spec("__state__", 1)],
        [spec("__metadata__", 1)],
        [spec("__pad__#0", 1)],
        [spec("a", 1, alias_of="b")],
        [spec("a", 1, dtype="qint8")],
        [spec("x" * 5000, 1)],
        [spec("a#0", 1), spec("a", 1, global_shape=(2,), offsets=(0,))],
    ],
)
def test_names_that_cannot_be_are_refused(specs: list[ChunkSpec]) -> None:
    with pytest.raises(Misuse):
        build_layout(specs, state_bytes=0)


def hostile() -> list[Any]:
    good = layout_to_dict(sample())

    def changed(index: int, field: int, value: Any) -> dict[str, Any]:
        chunks = [list(chunk) for chunk in good["chunks"]]
        chunks[index][field] = value
        return {**good, "chunks": chunks}

    return [
        None,
        [],
        {},
        {**good, "body_bytes": -1},
        {**good, "body_bytes": 1 << 70},
        {**good, "state": [0, 10]},
        {**good, "state": [good["body_bytes"], good["body_bytes"] + 1]},
        changed(0, 2, "sphere"),
        changed(0, 3, "float99"),
        changed(0, 4, [1] * 100),
        changed(0, 5, [2]),
        changed(0, 6, [math.inf]),
        changed(0, 7, 0),
        changed(0, 8, good["body_bytes"] + 64),
        changed(0, 1, "large"),
        changed(6, 5, [5000]),
        {**good, "chunks": [[1, 2, 3]]},
    ]


@pytest.mark.parametrize("value", hostile())
def test_a_hostile_layout_is_an_error(value: Any) -> None:
    with pytest.raises(CorruptCheckpoint):
        layout_from_dict(value)


def test_a_layout_of_another_header_is_an_error() -> None:
    layout = sample()
    with pytest.raises(CorruptCheckpoint, match="digest"):
        layout_from_dict(layout_to_dict(layout), header=layout.header[:-1] + b"\n")


def test_a_layout_travels_as_the_same_bytes_whoever_sends_it() -> None:
    layout = sample()
    raw = encode_layout(layout)
    assert json.loads(raw) == json.loads(json.dumps(layout_to_dict(layout)))
    headless = layout_from_dict(json.loads(raw))  # as it is read from a fragment
    assert encode_layout(headless, header_bytes=len(layout.header)) == raw
    assert layout_from_dict(json.loads(raw), header=layout.header) == layout
