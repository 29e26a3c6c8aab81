"""Typed msgpack: values that are not tensors, kept exactly, without pickle.

None, bool, int, float, str, bytes, list and dict with string keys are msgpack's own. Everything else is an
extension whose payload is msgpack again; the codes are in `Code` and never change their meaning. Only exact
types are taken: a subclass could carry more than we would store. An object that does not fit is an error
that names its key path, at the first save and not at the first restore.

Tensors and the parts written by adapters do not lie here: a `TensorRef` or a `PartNode` stands in their
place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from easyckpt.bags import BAG_ITEMS_MIN, SCALARS, Bags
from easyckpt.errors import CorruptCheckpoint, UnsupportedValue

__all__ = ["Code", "Frozen", "PartNode", "TensorRef", "join", "pack", "refs_of", "unpack"]

DEPTH_MAX = 100
"""Nesting of values; deeper is most likely a cycle through objects."""

PLAIN_BYTES_MAX = 1 << 30
"""Plain state of one rank. More belongs into tensors."""

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


class Code(IntEnum):
    """Extension codes of the format. Numbers are only added."""

    TENSOR_REF = 1  # name
    PART = 2  # [adapter, [tensor names], plain]
    BIG_INT = 3  # hexadecimal text
    COMPLEX = 4  # [real, imaginary]
    TUPLE = 5  # items
    PAIRS = 6  # dict with other keys than text: [key, value, key, value, …]
    ORDERED_DICT = 7  # as PAIRS
    COUNTER = 8  # as PAIRS
    SET = 9  # items, sorted by their bytes
    FROZENSET = 10  # as SET
    ARRAY = 11  # numpy: [type, shape, bytes in C order]
    SCALAR = 12  # numpy: [type, bytes]
    SIZE = 13  # torch.Size: items
    DTYPE = 14  # torch.dtype: name without "torch."
    DEVICE = 15  # torch.device: text
    TEXT = 16  # text with lone surrogates, as UTF-8 with surrogatepass
    BYTEARRAY = 17  # bytes
    RANGE = 18  # [start, stop, step]
    SLICE = 19  # [start, stop, step]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Stands where a tensor stood; its bytes are the chunk of that name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNode:
    """Stands where an object stood that an adapter took apart."""

    adapter: str
    tensors: tuple[str, ...]
    """Names relative to the object."""
    plain: Any


class Frozen:
    """A plain value that does not change any more: packed once, written as if it stood there itself."""

    __slots__ = ("raw", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.raw = b""


Hook = Callable[[Any, str], Any]
"""Given a value that is not plain and its path: what to store instead, or `NotImplemented`."""


def join(path: str, key: object) -> str:
    """The name of a value below another one: ``a.b`` for text keys, ``a[0]`` for all others.

    Dots and brackets within text keys are escaped, so that different paths never have the same name.
    """
    if isinstance(key, str):
        text = key
        for special in ("\\", ".", "["):
            text = text.replace(special, "\\" + special)
        if not text.isascii():  # else there is nothing to replace
            text = text.encode(errors="backslashreplace").decode()
        return f"{path}.{text}" if path else text
    if type(key) is int:
        return f"{path}[{key}]"
    return f"{path}[={pack(key).hex()}]"


def pack(value: Any, *, path: str = "", hook: Hook | None = None, bags: Bags | None = None) -> bytes:
    """Encode a tree of plain values.

    Args:
        value: the tree.
        path: key path of ``value``, for names and errors.
        hook: asked about every value that is not plain.
        bags: large containers that were packed before; is brought up to date.

    Raises:
        UnsupportedValue: something in the tree is not plain, is too large, or contains itself.
    """
    packed = _Packer(hook, bags).dump(value, path, depth=0)
    if len(packed) > PLAIN_BYTES_MAX:
        raise UnsupportedValue(
            f"plain values take {len(packed)} bytes, more than {PLAIN_BYTES_MAX}",
            where=path or "state",
            hint="keep large arrays as tensors",
        )
    return packed


class _Packer:
    def __init__(self, hook: Hook | None, bags: Bags | None = None) -> None:
        self._hook = hook
        self._bags = bags
        self._names: list[str] = []
        self._tensor_kinds: set[type] = set()
        self._open: set[int] = set()  # ids of the containers that we are inside of

    def dump(self, value: Any, path: str, depth: int) -> bytes:
        return msgspec.msgpack.encode(self._wire(value, path, depth))

    def _wire(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, bytes):
            return value
        if kind is int:
            if _INT_MIN <= value <= _INT_MAX:
                return value
            return _ext(Code.BIG_INT, hex(value))
        if kind is str:
            return value if _is_utf8(value) else msgspec.msgpack.Ext(int(Code.TEXT), _surrogates(value))
        if kind in _CONTAINERS:
            if depth >= DEPTH_MAX or id(value) in self._open:
                raise UnsupportedValue(f"nested more than {DEPTH_MAX} deep, or in itself", where=path)
            self._open.add(id(value))
            wire = self._container(value, path, depth + 1)
            self._open.discard(id(value))
            return wire
        if kind is Frozen:
            if not value.raw:
                value.raw = _Packer(None).dump(value.value, path, depth)
            return msgspec.Raw(value.raw)
        return self._other(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind not in (list, dict) or len(value) < BAG_ITEMS_MIN or self._bags is None:
            return self._walk(value, path, depth)
        bag = self._bags.find(path, value)
        if bag is not None:
            self._bags.seen(bag.names)
            return msgspec.Raw(bag.raw)
        begin = len(self._names)
        wire = self._walk(value, path, depth)
        kinds = set(map(type, value if kind is list else value.values()))
        if kinds <= SCALARS | self._tensor_kinds:
            self._bags.note(path, value, wire=wire, names=tuple(self._names[begin:]))
        return wire

    def _walk(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return _ext(Code.TUPLE, self._items(value, path, depth))
        if kind in (set, frozenset):
            items = sorted(self.dump(item, f"{path}{{}}", depth) for item in value)
            code = Code.SET if kind is set else Code.FROZENSET
            return _ext(code, [msgspec.Raw(item) for item in items])
        if kind is dict and all(type(key) is str and _is_utf8(key) for key in value):
            return {
                key: item if type(item) in _SAME_ON_THE_WIRE else self._wire(item, join(path, key), depth)
                for key, item in value.items()
            }
        pairs = []
        for key, item in value.items():
            pairs.append(self._wire(key, f"{path}{{key}}", depth))
            pairs.append(self._wire(item, join(path, key), depth))
        return _ext(_PAIR_CODES[kind], pairs)

    def _items(self, value: Any, path: str, depth: int) -> list[Any]:
        if _SAME_ON_THE_WIRE.issuperset(map(type, value)):
            return list(value)
        return [
            item if type(item) in _SAME_ON_THE_WIRE else self._wire(item, join(path, index), depth)
            for index, item in enumerate(value)
        ]

    def _other(self, value: Any, path: str, depth: int) -> Any:
        if self._hook is not None:
            replaced = self._hook(value, path)
            if isinstance(replaced, TensorRef):
                self._tensor_kinds.add(type(value))
                self._names.append(replaced.name)
                return _ext(Code.TENSOR_REF, replaced.name)
            if isinstance(replaced, PartNode):
                inner = self._wire(replaced.plain, path, depth + 1)
                return _ext(Code.PART, [replaced.adapter, list(replaced.tensors), inner])
        wire = _simple_wire(value)
        if wire is not None:
            return wire
        raise UnsupportedValue(
            f"a value of type {_type_name(value)} cannot be stored",
            where=path or "state",
            hint="store tensors, numbers, text, bytes, lists, tuples, dicts, sets or arrays, or give the "
            "object state_dict() and load_state_dict()",
        )


_PAIR_CODES: dict[Any, Code] = {
    dict: Code.PAIRS,
    OrderedDict: Code.ORDERED_DICT,
    Counter: Code.COUNTER,
}
_CONTAINERS = (list, tuple, dict, set, frozenset, OrderedDict, Counter)
_SAME_ON_THE_WIRE = frozenset((bool, float, bytes, type(None)))


def _simple_wire(value: Any) -> msgspec.msgpack.Ext | None:
    """Wire form of the values that hold no other values; None when ``value`` is not one."""
    kind = type(value)
    if kind is complex:
        return _ext(Code.COMPLEX, [value.real, value.imag])
    if kind is bytearray:
        return msgspec.msgpack.Ext(int(Code.BYTEARRAY), bytes(value))
    if kind is np.ndarray and value.dtype.kind in "biufcSUMm":
        dtype = value.dtype
        return _ext(Code.ARRAY, [dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()])
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUMm":
        return _ext(Code.SCALAR, [value.dtype.str, value.tobytes()])
    if kind is range:
        return _ext(Code.RANGE, [value.start, value.stop, value.step])
    if kind is slice and all(
        part is None or type(part) is int for part in (value.start, value.stop, value.step)
    ):
        return _ext(Code.SLICE, [value.start, value.stop, value.step])
    if kind.__module__ == "torch":
        if kind.__name__ == "Size":
            return _ext(Code.SIZE, [int(item) for item in value])
        if kind.__name__ == "dtype":
            return _ext(Code.DTYPE, str(value).removeprefix("torch."))
        if kind.__name__ == "device":
            return _ext(Code.DEVICE, str(value))
    return None


def _ext(code: Code, payload: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(payload))


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _surrogates(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def refs_of(value: Any) -> set[str]:
    """Names of all tensors that a decoded tree refers to, without those of its parts."""
    if isinstance(value, TensorRef):
        return {value.name}
    if isinstance(value, dict):
        return set().union(*map(refs_of, value.values()))
    if type(value) in (list, tuple):
        return set().union(*map(refs_of, value))
    return set()


def unpack(data: bytes | memoryview, *, where: str = "") -> Any:
    """Decode what `pack` made. Runs no code of the data's choosing.

    Raises:
        CorruptCheckpoint: the bytes are not ours.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpack_ext)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint(f"its plain state cannot be read: {error}", where=where) from error


def _unpack_ext(code: int, data: memoryview) -> Any:
    if code == Code.TEXT:
        return bytes(data).decode(errors="surrogatepass")
    if code == Code.BYTEARRAY:
        return bytearray(data)
    payload = msgspec.msgpack.decode(data, ext_hook=_unpack_ext)
    decode = _DECODERS.get(code)
    if decode is None:
        raise ValueError(f"extension {code} is not known")
    return decode(payload)


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return list(zip(items[::2], items[1::2], strict=True))


def _array(payload: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = payload
    return np.array(np.frombuffer(data, dtype=_plain_dtype(dtype)).reshape(shape))


def _scalar(payload: list[Any]) -> Any:
    dtype, data = payload
    return np.frombuffer(data, dtype=_plain_dtype(dtype))[0]


def _plain_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in "biufcSUMm":
        raise ValueError(f"an array of type {text}")
    return dtype


def _torch_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {name}")
    return dtype


def _torch_device(text: str) -> Any:
    import torch

    return torch.device(text)


def _torch_size(items: list[int]) -> Any:
    import torch

    return torch.Size(items)


def _part(payload: list[Any]) -> PartNode:
    adapter, tensors, plain = payload
    return PartNode(adapter=adapter, tensors=tuple(tensors), plain=plain)


_DECODERS: dict[int, Callable[[Any], Any]] = {
    Code.TENSOR_REF: lambda name: TensorRef(name=name),
    Code.PART: _part,
    Code.BIG_INT: lambda text: int(text, 16),
    Code.COMPLEX: lambda parts: complex(*parts),
    Code.TUPLE: tuple,
    Code.PAIRS: lambda items: dict(_pairs(items)),
    Code.ORDERED_DICT: lambda items: OrderedDict(_pairs(items)),
    Code.COUNTER: lambda items: Counter(dict(_pairs(items))),
    Code.SET: set,
    Code.FROZENSET: frozenset,
    Code.ARRAY: _array,
    Code.SCALAR: _scalar,
    Code.SIZE: _torch_size,
    Code.DTYPE: _torch_dtype,
    Code.DEVICE: _torch_device,
    Code.RANGE: lambda parts: range(*parts),
    Code.SLICE: lambda parts: slice(*parts),
}
