"""A rank's load: from the saver's answer to a state that is filled in place.

Most loads find the rank's own piece in the very cut that the state has: it is mapped and read. If the piece
is cut in another way, or lacks what another rank's has, or if another number of ranks saved the step, the
saver offers the step by the names of its logical tensors; the state is compared with these, and what it
needs is put together by the saver from whatever holds it (`easyckpt.saver.reshape`). Either way everything
is compared before anything is written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from easyckpt.assembly import place
from easyckpt.catalog import Known
from easyckpt.errors import EasyckptError, StateMismatch
from easyckpt.layout import Chunk, ChunkSpec, Layout, layout_from_dict
from easyckpt.link import Piece, RankLink
from easyckpt.loader import Loader, known_of
from easyckpt.only import Selection
from easyckpt.plain import unpack
from easyckpt.saver.protocol import LoadOffer, WantedChunk
from easyckpt.snapshot import read_plain, reader

__all__ = ["Resumed", "resume"]

_LOG = logging.getLogger("easyckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was loaded, and from which tier."""

    step: int
    tier: str
    body_bytes: int = 0
    """Of the rank's own piece; 0 if it was put together from others."""


def resume(
    link: RankLink, state: dict[str, Any], *, index: int, step: int | None, strict: bool, only: Selection
) -> Resumed | None:
    """Load a step into a state; None if there is none. See `Checkpointer.load`."""
    answer = link.load(index, step)
    if answer is None:
        return None
    loader: Loader | None = None
    wanted: tuple[ChunkSpec, ...] = ()
    try:
        if isinstance(answer, Piece):
            found = _from_own(link, state, answer, strict=strict, only=only)
            if found is not None:
                return found
            answer = link.reshape(index)
        while isinstance(answer, LoadOffer):
            try:
                loader, wanted = _compare(link, state, answer, strict=strict, only=only)
            except EasyckptError as error:
                link.refuse(index, answer.attempt, error)
                raise
            answer = link.want(index, answer.attempt, tuple(map(_wire, wanted)))
        if answer is None or loader is None:
            return None
        begins, _ = place(wanted)
        places = dict(zip(wanted, begins, strict=True))
        loader.fill(reader(answer.body, places, body_bytes=answer.body_bytes))
        return Resumed(step=answer.step, tier=answer.tier)
    finally:
        link.loaded(index)


def _from_own(
    link: RankLink, state: dict[str, Any], piece: Piece, *, strict: bool, only: Selection
) -> Resumed | None:
    """Fill the state from the rank's own piece; None if that does not have all, or in another cut."""
    where = f"step {piece.step}"
    fields = json.loads(piece.layout)
    layout = layout_from_dict(fields, header=piece.body[: fields["header_bytes"]], where=where)
    tree = unpack(read_plain(piece.body, layout, where=where), where=where)
    known = known_of(layout.chunks)
    loader = Loader(state, tree, known=known, strict=strict, only=only, where=where)
    try:
        places = _own_places(loader.compare(), layout)
    except StateMismatch:
        if link.seat.world_size == 1:
            raise
        return None
    if places is None:
        return None
    loader.fill(reader(piece.body, places, body_bytes=layout.body_bytes))
    return Resumed(step=piece.step, tier=piece.tier, body_bytes=layout.body_bytes)


def _own_places(wanted: Iterable[ChunkSpec], layout: Layout) -> dict[ChunkSpec, int] | None:
    chunks = {chunk.name: chunk for chunk in layout.chunks}
    places = {}
    for spec in wanted:
        chunk = chunks.get(spec.name)
        if chunk is None or not _same_cut(spec, chunk):
            return None
        places[spec] = chunk.begin
    return places


def _same_cut(spec: ChunkSpec, chunk: Chunk) -> bool:
    return (spec.kind, spec.offsets, spec.sizes) == (chunk.kind, chunk.offsets, chunk.sizes)


def _compare(
    link: RankLink, state: dict[str, Any], offer: LoadOffer, *, strict: bool, only: Selection
) -> tuple[Loader, tuple[ChunkSpec, ...]]:
    where = f"step {offer.step}"
    resized = offer.saved_ranks != link.seat.world_size
    if offer.borrowed and not resized:
        _LOG.warning(
            "step %d: rank %d's own piece is lost; its tensors are those of ranks with equal ones, its plain "
            "values another rank's, and its random numbers begin anew",
            offer.step,
            link.seat.rank,
        )
    if resized and link.seat.rank == 0:
        _LOG.info(
            "step %d was saved by %d ranks, and now there are %d: what each rank has alone, such as random "
            "numbers, begins anew from (seed, rank)",
            offer.step,
            offer.saved_ranks,
            link.seat.world_size,
        )
    loader = Loader(
        state,
        unpack(offer.plain, where=where),
        known={item.name: Known(dtype=item.dtype, global_shape=item.global_shape) for item in offer.tensors},
        strict=strict,
        only=only,
        reseed=(offer.seed, link.seat.rank) if resized or offer.borrowed else None,
        where=where,
    )
    return loader, loader.compare()


def _wire(spec: ChunkSpec) -> WantedChunk:
    return WantedChunk(spec.name, spec.kind.value, spec.dtype, spec.global_shape, spec.offsets, spec.sizes)
