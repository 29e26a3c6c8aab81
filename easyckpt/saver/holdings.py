"""The pieces that one saver holds in memory: whose, of which step, in which slot, and how sure.

A *piece* is one rank's part of one saved step. A rank has at most two slots on a node, whether the rank
runs here or is a peer's that we keep a copy for. A piece goes ``copying → copied → sealed``; only a sealed
one (hashed, its digest known) is shown to others. A piece that is pinned (being hashed, sent, written to
storage, or read by a worker) is never overwritten and never freed.

Which slot is overwritten is decided here and nowhere else: never one whose step the lead protects, never a
pinned one, an empty one first, the older one else.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

import msgspec

from easyckpt.digest import BodyDigest
from easyckpt.errors import MemoryFull
from easyckpt.saver.protocol import Held, Key
from easyckpt.slots import HEADROOM_BYTES, Slot

__all__ = ["SLOTS_PER_RANK", "Holdings", "Piece", "PieceState", "SlotsBusy"]

SLOTS_PER_RANK = 2

ROSTERS_KEPT = 16
"""Steps whose roster is remembered: more than there are slots."""


class PieceState(Enum):
    """How far a piece is."""

    COPYING = "copying"
    COPIED = "copied"
    SEALED = "sealed"


class SlotsBusy(Exception):
    """No slot of the rank may be overwritten now."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """One rank's part of one step in a slot. Changed only by the saver's event loop."""

    key: Key
    rank: int
    world_size: int
    slot: Slot
    layout: bytes
    body_bytes: int
    state: PieceState = PieceState.COPYING
    digest: str = ""
    chunk_hashes: tuple[str, ...] = ()
    """What the digest is made of; known once it is sealed."""
    data: str = ""
    """See `Held`."""
    pins: int = 0
    dropped: bool = False
    """No longer held; its memory goes with the last pin."""

    def seal(self, digest: BodyDigest) -> None:
        """The bytes are complete, and this is what they are."""
        self.digest, self.chunk_hashes = digest.whole, digest.chunks
        self.state = PieceState.SEALED

    def pin(self) -> None:
        """Keep the bytes as they are."""
        self.pins += 1

    def unpin(self) -> None:
        """The other side of `pin`."""
        self.pins -= 1
        if self.dropped and not self.pins:
            self.slot.close()

    @property
    def body(self) -> memoryview:
        """The bytes. Pin the piece for as long as the view is used."""
        return self.slot.view[: self.body_bytes]

    @property
    def held(self) -> Held:
        """What others are told."""
        return Held(
            key=self.key, rank=self.rank, world_size=self.world_size, digest=self.digest, data=self.data
        )

    @contextlib.contextmanager
    def pinned(self) -> Iterator[memoryview]:
        """The bytes, safe from being overwritten within the block."""
        self.pin()
        view = self.body
        try:
            yield view
        finally:
            view.release()
            self.unpin()


class Holdings:
    """All pieces of one saver.

    Args:
        memory_limit: bytes that all slots may take together; None for as much as the machine gives.
        headroom: bytes that stay free on the machine.
    """

    def __init__(self, *, memory_limit: int | None = None, headroom: int = HEADROOM_BYTES) -> None:
        self._limit = memory_limit
        self._headroom = headroom
        self._pieces: dict[int, list[Piece]] = {}
        self._free: dict[int, list[Slot]] = {}
        self._rosters: OrderedDict[Key, str] = OrderedDict()

    @property
    def slot_bytes(self) -> int:
        """Memory that all slots take."""
        used = sum(piece.slot.capacity for pieces in self._pieces.values() for piece in pieces)
        return used + sum(slot.capacity for slots in self._free.values() for slot in slots)

    def find(self, rank: int, key: Key) -> Piece | None:
        """The piece, sealed or not."""
        return next((piece for piece in self._pieces.get(rank, ()) if piece.key == key), None)

    def sealed(self, rank: int, key: Key, digest: str | None = None) -> Piece | None:
        """The piece if it is sealed (and has this digest)."""
        piece = self.find(rank, key)
        if piece is None or piece.state is not PieceState.SEALED:
            return None
        return piece if digest is None or piece.digest == digest else None

    def inventory(self) -> tuple[Held, ...]:
        """All sealed pieces."""
        return tuple(
            self.told(piece)
            for pieces in self._pieces.values()
            for piece in pieces
            if piece.state is PieceState.SEALED
        )

    def told(self, piece: Piece) -> Held:
        """What others are told of a piece, with what is known of its whole step."""
        return msgspec.structs.replace(piece.held, roster=self._rosters.get(piece.key, ""))

    def note_roster(self, key: Key, roster: str) -> None:
        """A step is sealed on every rank: what all ranks' data is, together. Pieces of it may come later."""
        self._rosters.pop(key, None)
        if roster:
            self._rosters[key] = roster
            while len(self._rosters) > ROSTERS_KEPT:
                self._rosters.popitem(last=False)

    def place(self, held: Held, *, layout: bytes, body_bytes: int, protect: tuple[Key, ...]) -> Piece:
        """Room for a piece that is about to be copied, fetched or received.

        Raises:
            SlotsBusy: both slots of the rank are protected or pinned.
            MemoryFull: there is no memory for a slot of this size.
        """
        self.clear_way(held, body_bytes=body_bytes, protect=protect)
        self._reserve(held.rank, body_bytes)
        return self._append(held, layout, body_bytes)

    def clear_way(
        self, held: Held, *, body_bytes: int, protect: tuple[Key, ...]
    ) -> Callable[[], Slot] | None:
        """Let go of the piece that `place` would overwrite.

        Returns:
            What makes the slot that is lacking then, for a thread: reserving memory takes a tenth of a second
            for each GB. Its result goes to `add_slot`. None if a slot is free.

        Raises:
            SlotsBusy: both slots of the rank are protected or pinned.
            MemoryFull: the limit of this saver is reached.
        """
        pieces = self._pieces.setdefault(held.rank, [])
        self._replace(held)
        if len(pieces) >= SLOTS_PER_RANK:
            candidates = [p for p in pieces if not p.pins and p.key not in protect]
            if not candidates:
                raise SlotsBusy
            self._discard(min(candidates, key=lambda p: (p.state is PieceState.SEALED, p.key)))
        return self._maker(held.rank, body_bytes)

    def place_beside(self, held: Held, *, layout: bytes, body_bytes: int, in_parts: bool = False) -> Piece:
        """Room for a piece of a restore, which overwrites nothing: only `keep_only` gives the memory back.

        With ``in_parts`` its slot may not be reserved yet: the reader does that ahead of itself.

        Raises:
            SlotsBusy: the very piece is here and in use.
            MemoryFull: there is no memory for a third slot.
        """
        self._replace(held)
        self._reserve(held.rank, body_bytes, in_parts=in_parts)
        return self._append(held, layout, body_bytes, in_parts=in_parts)

    def clear_beside(self, held: Held, *, body_bytes: int) -> Callable[[], Slot] | None:
        """What makes the slot that `place_beside` in parts would, as by `clear_way`."""
        self._replace(held)
        return self._maker(held.rank, body_bytes, in_parts=True)

    def _replace(self, held: Held) -> None:
        present = self.find(held.rank, held.key)
        if present is not None:
            if present.pins:
                raise SlotsBusy
            self._discard(present)

    def lacking(self, rank: int, body_bytes: int) -> Callable[[], Slot] | None:
        """What makes the slot that the rank's next save will need; None if it has all of its slots.

        Raises:
            MemoryFull: the limit of this saver is reached.
        """
        if len(self._pieces.get(rank, [])) >= SLOTS_PER_RANK:
            return None
        return self._maker(rank, body_bytes)

    def free_slot(self, rank: int, body_bytes: int, *, in_parts: bool = False) -> Slot | None:
        """The slot that a piece of this size would be placed in, if it is free. One that is not reserved is
        found only by those who reserve it ``in_parts``."""
        free = [slot for slot in self._free.get(rank, []) if slot.whole or in_parts]
        fitting = [slot for slot in free if slot.capacity >= body_bytes]
        return min(fitting, key=lambda slot: slot.capacity, default=None)

    def slots_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of all slots of the rank, in use or free."""
        used = (piece.slot for piece in self._pieces.get(rank, ()))
        return tuple(slot.number for slot in (*used, *self._free.get(rank, ())))

    def add_slot(self, rank: int, slot: Slot) -> None:
        """A slot that was made for the rank."""
        self._free.setdefault(rank, []).append(slot)

    def scratch(self, held: Held, *, body_bytes: int) -> Piece:
        """Room for what a load puts together: pinned once, never found, its memory goes with the last pin.

        Raises:
            MemoryFull: there is no memory for it.
        """
        room = max(body_bytes, 1)
        self._reserve(held.rank, room)
        piece = Piece(
            key=held.key,
            rank=held.rank,
            world_size=held.world_size,
            slot=self._take_slot(held.rank, room),
            layout=b"",
            body_bytes=body_bytes,
            dropped=True,
        )
        piece.pin()
        return piece

    def of_step(self, key: Key) -> tuple[Piece, ...]:
        """All sealed pieces of a step."""
        found = (piece for pieces in self._pieces.values() for piece in pieces if piece.key == key)
        return tuple(piece for piece in found if piece.state is PieceState.SEALED)

    def drop_others(self, world_size: int) -> None:
        """Drop what another number of ranks saved: a newer step is complete."""
        for rank, pieces in list(self._pieces.items()):
            for piece in [piece for piece in pieces if piece.world_size != world_size]:
                self._discard(piece)
                for slot in self._free.pop(rank, []):
                    slot.close()

    def drop(self, piece: Piece) -> None:
        """Forget a piece; its slot is reused. A pinned one stays whole for who pins it, and is not found."""
        if piece in self._pieces.get(piece.rank, ()):
            self._discard(piece)

    def keep_only(self, keys: frozenset[Key], *, ranks: frozenset[int] | None = None) -> None:
        """Drop all pieces of other steps; and with ``ranks``, give the slots of other ranks back."""
        for rank, pieces in list(self._pieces.items()):
            for piece in list(pieces):
                if piece.key not in keys or (ranks is not None and rank not in ranks):
                    self._discard(piece)
            free = self._free.get(rank, [])
            keep = SLOTS_PER_RANK - len(self._pieces[rank]) if ranks is None or rank in ranks else 0
            while len(free) > max(keep, 0):
                free.pop(0).close()

    def rename(self, old: Key, new: Key) -> None:
        """The restored step belongs to the new generation from now on, on every rank."""
        if old == new:
            return
        self.note_roster(new, self._rosters.pop(old, ""))
        for rank, pieces in self._pieces.items():
            for piece in list(pieces):
                if piece.key == old and self.find(rank, new) is None:
                    piece.key = new

    def close(self) -> None:
        """Give all memory back."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.slot.close()
        for slots in self._free.values():
            for slot in slots:
                slot.close()
        self._pieces.clear()
        self._free.clear()

    def _append(self, held: Held, layout: bytes, body_bytes: int, *, in_parts: bool = False) -> Piece:
        piece = Piece(
            key=held.key,
            rank=held.rank,
            world_size=held.world_size,
            slot=self._take_slot(held.rank, body_bytes, in_parts=in_parts),
            layout=layout,
            body_bytes=body_bytes,
            digest=held.digest,
            data=held.data,
        )
        self._pieces.setdefault(held.rank, []).append(piece)
        return piece

    def _discard(self, piece: Piece) -> None:
        self._pieces[piece.rank].remove(piece)
        if piece.pins:
            piece.dropped = True
        elif not piece.slot.whole:
            piece.slot.close()
        else:
            self._free.setdefault(piece.rank, []).append(piece.slot)

    def _reserve(self, rank: int, body_bytes: int, *, in_parts: bool = False) -> None:
        """See to it that a slot of this size is free."""
        make = self._maker(rank, body_bytes, in_parts=in_parts)
        if make is not None:
            self.add_slot(rank, make())

    def _maker(self, rank: int, body_bytes: int, *, in_parts: bool = False) -> Callable[[], Slot] | None:
        if self.free_slot(rank, body_bytes, in_parts=in_parts) is not None:
            return None
        free = self._free.setdefault(rank, [])
        while free:  # all of them are too small
            free.pop().close()
        if self._limit is not None and self.slot_bytes + body_bytes > self._limit:
            raise MemoryFull(
                f"a checkpoint slot of {body_bytes} bytes does not fit: {self.slot_bytes} of the "
                f"{self._limit} bytes that slots may take are in use",
                where=f"rank {rank}",
                hint="raise the saver's memory limit",
            )
        return partial(Slot, body_bytes, headroom=self._headroom, in_parts=in_parts)

    def _take_slot(self, rank: int, body_bytes: int, *, in_parts: bool = False) -> Slot:
        slot = self.free_slot(rank, body_bytes, in_parts=in_parts)
        assert slot is not None  # the way was cleared
        self._free[rank].remove(slot)
        return slot
