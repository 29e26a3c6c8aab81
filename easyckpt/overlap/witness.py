"""Proof that tensors did not change between ``save`` and the end of their copy.

A witness is taken when ``save`` is called, and asked again after the last byte was copied, before the fence
lets training change anything. Two kinds:

**sample** (the default on a CPU, where a pass over all bytes costs as much as the copy): the version counter
that torch keeps for each tensor, and some words of its bytes, spread evenly over it. The counter moves with
every in-place operation of torch on the tensor or a view of it, but not with a write through ``.data``,
NumPy, a kernel of somebody else's, or a fused update of a flat buffer. For those there is the sample: it sees
an update of the whole tensor, and may miss one of a few elements.

**full**: an xxh3-128 of every byte of the source, taken within ``save`` and compared with the bytes in the
slot. A change of any byte before it was copied is found, whoever made it.

What was copied at once needs no witness: ``save`` had not returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import xxhash

from easyckpt.overlap.plan import Later

__all__ = ["SAMPLES", "VERIFY_KINDS", "FullWitness", "SampleWitness", "Verify", "Witness", "make_witness"]

Verify = Literal["sample", "full"]

VERIFY_KINDS = ("sample", "full")

SAMPLES = 16
"""Words that are compared of each tensor. More would cost a cache miss each."""


class Witness(Protocol):
    """Made once for a set of tensors, taken at each save."""

    def take(self) -> None:
        """Remember the tensors as they are. On the training thread."""
        ...

    def changed(self, whole: torch.Tensor) -> tuple[str, ...]:
        """Names of tensors that are not what they were, or whose copy in the slot is not. Any thread."""
        ...


def make_witness(later: Sequence[Later], verify: Verify) -> Witness:
    """The witness of a kind for the tensors that are copied later."""
    return FullWitness(later) if verify == "full" else SampleWitness(later)


class SampleWitness:
    """Version counters and a strided sample; see the module."""

    def __init__(self, later: Sequence[Later]) -> None:
        self._later = later
        self._versioned = [item for item in later if not item.tensor.is_inference()]
        self._groups = [
            _Group([item for item in later if _word_of(item.tensor) is word], word) for word in _WORDS
        ]
        self._versions: list[int] = []

    def take(self) -> None:
        """See `Witness.take`."""
        self._versions = [item.tensor._version for item in self._versioned]
        for group in self._groups:
            group.taken = group.look()

    def changed(self, whole: torch.Tensor) -> tuple[str, ...]:
        """See `Witness.changed`."""
        names = [
            item.name
            for item, version in zip(self._versioned, self._versions, strict=True)
            if item.tensor._version != version
        ]
        for group in self._groups:
            names.extend(group.changed())
        return tuple(dict.fromkeys(names))


class _Group:
    """Tensors that are sampled in words of one size, in one call for all."""

    def __init__(self, items: list[Later], word: torch.dtype) -> None:
        self._items = items
        self._views = [_sample_view(item.tensor, word) for item in items]
        self.taken = torch.empty(0, dtype=word)

    def look(self) -> torch.Tensor:
        return torch.cat(self._views) if self._views else self.taken

    def changed(self) -> list[str]:
        now = self.look()
        if torch.equal(now, self.taken):
            return []
        lengths = [len(view) for view in self._views]
        pairs = zip(self._items, torch.split(now, lengths), torch.split(self.taken, lengths), strict=True)
        return [item.name for item, one, two in pairs if not torch.equal(one, two)]


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _word_of(tensor: torch.Tensor) -> torch.dtype:
    """The largest word that the tensor's memory can be read in."""
    at = tensor.storage_offset() * tensor.element_size()
    count = tensor.numel() * tensor.element_size()
    return next(word for word in _WORDS if at % word.itemsize == 0 and count % word.itemsize == 0)


def _sample_view(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    flat = _flat(tensor).view(word)
    # The first word, the last, and between them a stride that is odd, so that no column of a matrix with an
    # even number of columns is looked at alone.
    step = max(1, (len(flat) - 1) // (SAMPLES - 1))
    return flat[:: step if step % 2 or step < 3 else step - 1]


class FullWitness:
    """A digest of every byte; see the module."""

    def __init__(self, later: Sequence[Later]) -> None:
        self._later = later
        self._digests: list[bytes] = []

    def take(self) -> None:
        """See `Witness.take`."""
        self._digests = [_digest(item.tensor.data_ptr(), item.byte_count) for item in self._later]

    def changed(self, whole: torch.Tensor) -> tuple[str, ...]:
        """See `Witness.changed`."""
        base = whole.data_ptr()
        return tuple(
            item.name
            for item, digest in zip(self._later, self._digests, strict=True)
            if _digest(base + item.begin, item.byte_count) != digest
        )


def _digest(address: int, count: int) -> bytes:
    """xxh3-128 of raw memory; lets go of the interpreter while it runs."""
    return bytes(xxhash.xxh3_128_digest((ctypes.c_char * count).from_address(address)))
