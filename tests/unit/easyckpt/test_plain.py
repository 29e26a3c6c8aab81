"""Typed msgpack: what is kept exactly, what is refused, and that hostile bytes are only an error."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from easyckpt.errors import CorruptCheckpoint, UnsupportedValue
from easyckpt.plain import Code, PartNode, TensorRef, join, pack, unpack

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63, 2**64, -(2**63) - 1, 2**300, 1.5, -0.0, math.inf, "", "ä\ud800", "a.b",
    b"", b"\0", [], [[]], (), (1, (2,)), {}, {"a": 1}, {1: 2, "1": 3, (1, 2): 4, None: 5, 1.5: 7},
    {"\ud800": 1}, {True: 1}, set(), {1, "a"}, frozenset({(1, 2)}), OrderedDict([("b", 1), ("a", 2)]),
    Counter("aab"), 1 + 2j, bytearray(b"x"), range(1, 9, 2), slice(None, 3), torch.Size([1, 2]),
    torch.bfloat16, torch.device("cuda:1"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)  # a set's text varies
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = unpack(pack(value))
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, dict):
        assert [(type(key), key) for key in back] == [(type(key), key) for key in value]


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3).T, np.zeros((0, 3)), np.array(5), np.array(["ab", "c"]), np.array([b"x"]),
     np.array([1 + 2j]), np.array(["2020-01-01"], dtype="M8[ns]"), np.arange(3, dtype=">i4")],
)  # fmt: skip
def test_arrays_come_back_as_they_were(array: np.ndarray[Any, Any]) -> None:
    back = unpack(pack(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    back[...] = back  # may be written


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("x"), np.float64("nan")]
)
def test_numpy_scalars_keep_their_type(scalar: Any) -> None:
    back = unpack(pack({"x": scalar}))["x"]
    assert type(back) is type(scalar)
    assert back.tobytes() == scalar.tobytes()


class Level(IntEnum):
    ONE = 1


class Name(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Level.ONE,
        Name("x"),
        object(),
        print,
        defaultdict(list),
        np.array([object()]),
        np.zeros(1, dtype="i4,i4"),
    ],
)
def test_subclasses_and_objects_are_refused_by_path(value: Any) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        pack({"a": [0, value]})
    assert caught.value.where == "a[1]"


def test_deep_and_circular_values_are_refused() -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    circle: dict[str, Any] = {}
    circle["self"] = circle
    for value in (deep, circle):
        with pytest.raises(UnsupportedValue, match="deep, or in itself"):
            pack(value)
    shared = [1]
    assert unpack(pack([shared, shared])) == [[1], [1]]


def test_what_stands_for_tensors_and_objects_comes_back() -> None:
    part = PartNode(adapter="a", tensors=("x", "y"), plain={"n": (1,)})

    def hook(value: Any, path: str) -> Any:
        return {"T": TensorRef(name=path), "P": part}.get(type(value).__name__, NotImplemented)

    tensor, thing = type("T", (), {})(), type("P", (), {})()
    assert unpack(pack({"a": [tensor], "b": thing}, hook=hook)) == {"a": [TensorRef(name="a[0]")], "b": part}


def test_different_paths_have_different_names() -> None:
    paths = [
        ("a", "b"),
        ("a.b",),
        ("a", 0),
        ("a[0]",),
        ("a", "0"),
        ("a\\", "b"),
        ("a", ""),
        ("a", (0,)),
        ("a", True),
        ("a", 1),
    ]
    names = set()
    for path in paths:
        name = ""
        for key in path:
            name = join(name, key)
        names.add(name)
    assert len(names) == len(paths)


def extension(code: int, payload: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(payload)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x91" * 5000 + b"\x01",
        extension(99, 1),
        extension(Code.BIG_INT, "z"),
        extension(Code.ARRAY, ["O", [1], b"12345678"]),
        extension(Code.ARRAY, ["<f8", [2], b"1"]),
        extension(Code.PAIRS, [[], 1]),
        extension(Code.DTYPE, "load"),
    ],
)
def test_hostile_bytes_are_an_error_and_run_nothing(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        unpack(data)
