"""What a saver does with storage: blocking calls, made in its worker threads.

The storage counts lives of the job on its own (its *generation*): one more each time a restore is settled,
also across jobs that share the folder. The launcher's generations may begin at 1 again with a new job;
these may not.
"""

from __future__ import annotations

import functools
import json
import logging
import platform
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from easyckpt.commit import (
    commit_manifest,
    ensure_root,
    next_generation,
    read_fragment_head,
    record_generation,
)
from easyckpt.digest import BodyDigest, chunk_count, digest_body
from easyckpt.errors import CorruptCheckpoint, EasyckptError, StaleGeneration
from easyckpt.keep import policy_from_text
from easyckpt.lanes import cores, run_lanes
from easyckpt.layout import Layout, layout_from_dict
from easyckpt.manifest import FragmentRef, LayoutRecord, Manifest, PieceRecord
from easyckpt.read import check_length, locate_pieces, read_chunk
from easyckpt.records import GenerationRecord, RootRecord
from easyckpt.retention import prune
from easyckpt.saver.holdings import Piece
from easyckpt.saver.peering import Share
from easyckpt.saver.persist import (
    LocatedPiece,
    PieceMeta,
    locate_piece,
    make_fragment,
    persist_piece,
    read_body,
    write_fragment,
)
from easyckpt.storage import Storage, open_storage
from easyckpt.survey import HiddenReason, Survey, survey
from easyckpt.tiers import OnDisk

__all__ = [
    "DiskView",
    "Layouts",
    "Life",
    "Vault",
    "decode_layout",
    "decode_ref",
    "encode_ref",
    "layout_head",
]

DIGESTS_READ_MAX = 4
"""Newest steps whose fragments are read to compare them with memory."""

LAYOUTS_KEPT = 64
"""One per rank of a node in the worst case; ranks with equal layouts share one."""

BODIES_AT_ONCE_MIN, BODIES_AT_ONCE_MAX = 2, 8

LIFE_ATTEMPTS_MAX = 20
"""Other lives that may begin in the same moment."""

_LOG = logging.getLogger("easyckpt.saver")
_EXPECTED = frozenset({HiddenReason.FENCED, HiddenReason.TAKEN_BACK})


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskView:
    """What storage offers."""

    on_disk: tuple[OnDisk, ...] = ()
    manifests: dict[tuple[int, int], Manifest] = field(default_factory=dict)
    """(step, generation) → manifest."""
    lost: tuple[str, ...] = ()
    """Steps that are there and cannot be used: progress existed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How storage knows this life of the job."""

    run_id: str
    generation: int
    resumed_step: int | None


class Layouts:
    """Layouts that were read before: with many tensors, reading one takes longer than writing a step.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Layout, LayoutRecord]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, raw: bytes, body: memoryview) -> tuple[Layout, LayoutRecord]:
        """The layout of a body, with the header that stands in it, and what an index has to say of it.

        Raises:
            CorruptCheckpoint: they do not belong together.
        """
        with self._lock:
            known = self._known.get(raw)
            if known is None or bytes(body[: len(known[0].header)]) != known[0].header:
                layout = decode_layout(raw, bytes(body[: layout_head(raw).header_bytes]))
                known = (layout, LayoutRecord.of(layout))
            self._known[raw] = known
            self._known.move_to_end(raw)
            while len(self._known) > LAYOUTS_KEPT:
                self._known.popitem(last=False)
        return known


def _seal_of(piece: Piece, body: memoryview) -> BodyDigest:
    """What was sealed; of a piece that is known by its digest alone, proved anew."""
    seal = BodyDigest(whole=piece.digest, chunks=piece.chunk_hashes)
    if len(seal.chunks) != chunk_count(piece.body_bytes):
        seal = digest_body(body)
        if seal.whole != piece.digest:
            raise CorruptCheckpoint(
                f"the memory of rank {piece.rank} changed after step {piece.key.step} was sealed"
            )
    return seal


class Vault:
    """The storage of one run. Every method blocks; any thread may call.

    Args:
        root: the checkpoint folder.
        layouts: kept from call to call by who persists often.
    """

    def __init__(self, root: str, *, layouts: Layouts | None = None) -> None:
        self.root = root
        self._storage: Storage = open_storage(root)
        self._layouts = layouts if layouts is not None else Layouts()

    def look(self) -> DiskView:
        """What may be loaded.

        Raises:
            StorageError: the storage refuses as a whole.
            CheckpointFault: the folder's own record is damaged.
        """
        found: Survey = survey(self._storage)
        steps = []
        for index, item in enumerate(found.visible):
            digests = self._digests(item.manifest) if index < DIGESTS_READ_MAX else {}
            steps.append(
                OnDisk(
                    step=item.step,
                    generation=item.generation,
                    world_size=item.manifest.world_size,
                    digests=digests,
                )
            )
        lost = tuple(
            f"step {item.name.step}: {item.reason.value} {item.detail}".strip()
            for item in found.hidden
            if item.reason not in _EXPECTED
        )
        manifests = {(item.step, item.generation): item.manifest for item in found.visible}
        return DiskView(on_disk=tuple(steps), manifests=manifests, lost=lost)

    def _digests(self, manifest: Manifest) -> dict[int, str]:
        digests: dict[int, str] = {}
        for ref in manifest.fragments:
            try:
                fragment = read_fragment_head(self._storage, ref, manifest)
            except EasyckptError as error:  # loading it will say so too, if it comes to that
                _LOG.warning("step %d: %s", manifest.step, error)
                continue
            digests.update({piece.rank: piece.digest for piece in fragment.pieces})
        return digests

    def begin_life(self, *, world_size: int, resumed_step: int | None, wanted: Callable[[], bool]) -> Life:
        """Make this life known, under the next number that is free.

        Args:
            world_size: ranks.
            resumed_step: where it goes on; None if it begins without a checkpoint.
            wanted: asked before each attempt: a life that was replaced meanwhile must not fence its
            successor.

        Raises:
            StaleGeneration: it is not wanted any more, or others took number after number.
            StorageError: the storage refuses.
        """
        now = time.time()
        software = _software()
        root = RootRecord(run_id=uuid.uuid4().hex, created_unix_s=now, software=software)
        run_id = ensure_root(self._storage, root).run_id
        life = uuid.uuid4().hex
        for attempt in range(LIFE_ATTEMPTS_MAX):
            if not wanted():
                raise StaleGeneration("this life of the job is over", where=self.root)
            generation = next_generation(self._storage)
            record = GenerationRecord(
                run_id=run_id,
                generation=generation,
                resumed_step=resumed_step,
                world_size=world_size,
                life=life,
                created_unix_s=now,
                software=software,
            )
            try:
                record_generation(self._storage, record)
            except StaleGeneration:
                _LOG.info("storage generation %d was taken, attempt %d", generation, attempt)
                continue
            return Life(run_id=run_id, generation=generation, resumed_step=resumed_step)
        raise StaleGeneration(
            f"{LIFE_ATTEMPTS_MAX} other lives began here at once", where=self.root, hint="one job per folder"
        )

    def persist(
        self,
        pieces: tuple[Piece, ...],
        *,
        life: Life,
        node_rank: int,
        step: int,
        shares: tuple[Share, ...] = (),
    ) -> FragmentRef:
        """Write a node's pieces and its fragment. The pieces are pinned by the caller.

        Args:
            pieces: of this node.
            life: whose names they get.
            node_rank: of this node.
            step: training step.
            shares: ranks whose tensors another rank stores, on this node or another one.

        Raises:
            CorruptCheckpoint: a slot is not what was sealed.
            StorageError: the storage refuses.
        """
        done: dict[int, tuple[PieceMeta, PieceRecord]] = {}
        stored_by = {share.rank: (share.by_node, share.by_rank) for share in shares}

        def write(piece: Piece) -> None:
            with piece.body as body:
                layout, record = self._layouts.get(piece.layout, body)
                meta = PieceMeta(
                    generation=life.generation,
                    step=step,
                    node_rank=node_rank,
                    rank=piece.rank,
                    layout=layout,
                    layout_record=record,
                    seal=_seal_of(piece, body),
                    stored_by=stored_by.get(piece.rank),
                )
                done[piece.rank] = (meta, persist_piece(self._storage, body=body, piece=meta))

        # Bodies beside each other, so that the device has something to do while one of them begins or ends.
        bodies = max(BODIES_AT_ONCE_MIN, min(BODIES_AT_ONCE_MAX, cores() // 4))
        run_lanes([partial(write, piece) for piece in pieces], lanes=bodies)
        fragment = make_fragment(done.values(), run_id=life.run_id, world_size=pieces[0].world_size)
        return write_fragment(self._storage, fragment)

    def commit(
        self,
        refs: tuple[FragmentRef, ...],
        *,
        life: Life,
        step: int,
        world_size: int,
        metrics: dict[str, float],
    ) -> str:
        """Create the manifest. Returns why the step is not visible, empty if it is.

        Raises:
            CheckpointFault: something below it is missing or differs.
            StorageError: the storage refuses.
        """
        manifest = Manifest(
            run_id=life.run_id,
            generation=life.generation,
            step=step,
            world_size=world_size,
            resumed_step=life.resumed_step,
            fragments=tuple(sorted(refs, key=lambda ref: ref.node_rank)),
            created_unix_s=time.time(),
            software=_software(),
            metrics=metrics,
        )
        result = commit_manifest(self._storage, manifest)
        if result.is_visible:
            return ""
        by = f" by generation {result.fenced_by}" if result.fenced_by is not None else ""
        return f"the commit of step {step} is {result.outcome.value}{by}"

    def tidy(self, *, keep: str, generation: int) -> None:
        """Take back what the policy (as text) does not keep. Trouble is logged: nothing depends on it."""
        try:
            removed = prune(self._storage, keep=policy_from_text(keep), generation=generation)
        except EasyckptError as error:
            _LOG.warning("old steps stay: %s", error)
            return
        for item in removed:
            _LOG.info("retention: %s", item)

    def locate(self, manifest: Manifest, rank: int) -> LocatedPiece:
        """Where a rank's piece lies and how long it is."""
        return locate_piece(self._storage, manifest, rank)

    def locate_all(self, manifest: Manifest, ranks: tuple[int, ...]) -> dict[int, LocatedPiece]:
        """The pieces of several ranks, whose bodies have their length. Each fragment is read once."""
        located = locate_pieces(self._storage, manifest, ranks)
        for piece in located.values():
            check_length(self._storage, piece.record, step=manifest.step)
        return located

    def read_chunk(self, located: LocatedPiece, index: int, *, into: memoryview) -> None:
        """Read one hash chunk and prove it."""
        read_chunk(self._storage, located.record, index=index, into=into, step=located.step)

    def load(
        self,
        located: LocatedPiece,
        into: memoryview,
        *,
        have: Mapping[int, memoryview] | None = None,
        reserve: Callable[[int, int], None] | None = None,
    ) -> Layout:
        """Read a piece and prove every byte; see `read_body`."""
        return read_body(self._storage, located, into=into, have=have, reserve=reserve)


def _software() -> str:
    return f"easyckpt on Python {platform.python_version()}"


def decode_layout(raw: bytes, header: bytes) -> Layout:
    """A layout as it travels, with the header that stands in its slot."""
    return layout_from_dict(json.loads(raw), header=header)


class LayoutHead(msgspec.Struct, frozen=True):
    """What is not about single tensors in a layout."""

    header_bytes: int
    digest: str
    state: tuple[int, int]

    @property
    def state_begin(self) -> int:
        """First byte of the plain state."""
        return self.state[0]


@functools.lru_cache(maxsize=LAYOUTS_KEPT)
def layout_head(raw: bytes) -> LayoutHead:
    """The head of a layout as it travels.

    Raises:
        CorruptCheckpoint: it is no layout.
    """
    try:
        return msgspec.json.decode(raw, type=LayoutHead)
    except msgspec.MsgspecError as error:
        raise CorruptCheckpoint(f"a layout cannot be read: {error}") from error


def encode_ref(ref: FragmentRef) -> bytes:
    """A fragment's reference as it travels to the lead."""
    return msgspec.json.encode(ref)


def decode_ref(raw: bytes) -> FragmentRef:
    """Read it."""
    return msgspec.json.decode(raw, type=FragmentRef)
