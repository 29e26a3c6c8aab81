"""What is done with a node's own pieces once they are copied: hashed, copied to the peer, written to storage.

Each piece is pinned for as long as a thread or a connection reads it. Whatever goes wrong is reported to
the lead, so that nothing waits for a piece that will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from easyckpt.digest import BodyDigest, prefix_digest
from easyckpt.errors import EasyckptError, IncompleteCheckpoint
from easyckpt.manifest import FragmentRef
from easyckpt.rates import RateLog
from easyckpt.saver.commits import Threads
from easyckpt.saver.disk import Layouts, Life, Vault, encode_ref, layout_head
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.peering import Members, Persisted, PersistStep, Replicated, Sealed, StageFailed
from easyckpt.saver.protocol import Begin, Key, Message
from easyckpt.saver.replicate import Dialer, digest_piece, put

__all__ = ["UNFORESEEN", "Upkeep"]

UNFORESEEN = "an error that nobody foresaw; see the saver's log on this node"

_LOG = logging.getLogger("easyckpt.saver")


class Upkeep:
    """See the module. Runs in the saver's event loop.

    Args:
        begin: the generation and this node's place in it.
        holdings: where the pieces are.
        dialer: to the peer.
        threads: for hashing and writing.
        send: a message to the lead.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        holdings: Holdings,
        dialer: Dialer,
        threads: Threads,
        send: Callable[[Message], None],
    ) -> None:
        self._begin = begin
        self._holdings = holdings
        self._dialer = dialer
        self._threads = threads
        self._send = send
        self.ranks = tuple(range(begin.first_rank, begin.first_rank + begin.ranks))
        self.ready = asyncio.Event()
        """Set when all members are known."""
        self.addresses: tuple[str, ...] = ()
        self.protect: tuple[Key, ...] = ()
        """Steps that a peer must not overwrite."""
        self.ranks_by_node: tuple[tuple[int, ...], ...] = ()
        self._layouts = Layouts()
        self._to_storage = RateLog("written to storage", _LOG)
        self._to_peer = RateLog("copied to the peer", _LOG)

    def know(self, members: Members) -> None:
        """Everyone is here."""
        self.addresses = members.addresses
        self.ranks_by_node = members.ranks
        self.ready.set()

    @property
    def _replicates(self) -> bool:
        return self._begin.nodes > 1 and self._begin.replicas > 0

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """Ranks whose copies are kept here: those of the node before this one in the ring."""
        if not self._replicates or not self.ranks_by_node:
            return ()
        return self.ranks_by_node[(self._begin.node_rank - 1) % self._begin.nodes]

    def failed(self, rank: int, step: int, reason: str) -> None:
        """A granted copy will not come."""
        _LOG.info("step %d of rank %d will not come: %s", step, rank, reason)
        self._send(StageFailed(rank=rank, step=step, reason=reason))

    async def seal(self, piece: Piece) -> None:
        """The rank's copy is complete: prove what it is, tell the lead, copy it to the peer."""
        try:
            digest = await digest_piece(piece, self._threads.hashing)
            layout, data = await self._likeness(piece, digest)
        except BaseException:
            self.failed(piece.rank, piece.key.step, "it could not be hashed; see the saver's log")
            raise
        if piece.dropped or self._holdings.find(piece.rank, piece.key) is not piece:
            return
        piece.seal(digest)
        piece.data = data
        self._send(
            Sealed(rank=piece.rank, step=piece.key.step, digest=digest.whole, layout=layout, data=data)
        )
        await self.replicate(piece)

    async def _likeness(self, piece: Piece, digest: BodyDigest) -> tuple[str, str]:
        """By what other ranks' pieces with the same tensors, and with the same values, are known."""
        if self._begin.world_size == 1:
            return "", ""
        head = layout_head(piece.layout)
        with piece.pinned() as body:
            work = partial(prefix_digest, body, digest, end=head.state_begin)
            running = asyncio.get_running_loop().run_in_executor(self._threads.hashing, work)
            try:
                return head.digest, await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})  # the thread reads the slot until it is done
                raise

    async def replicate(self, piece: Piece) -> None:
        """Have the next node of the ring keep a copy."""
        if not self._replicates:
            return
        error = UNFORESEEN
        try:
            await self.ready.wait()
            neighbour = self.addresses[(self._begin.node_rank + 1) % self._begin.nodes]
            begin_s = time.monotonic()
            await put(
                self._dialer,
                neighbour,
                piece=piece,
                generation=self._begin.generation,
                protect=self.protect,
            )
            self._to_peer.note(piece.body_bytes, time.monotonic() - begin_s, how="a rank")
            error = ""
        except EasyckptError as trouble:
            error = str(trouble)
        finally:
            if error:
                _LOG.warning("step %d of rank %d has no peer copy: %s", piece.key.step, piece.rank, error)
            self._send(Replicated(rank=piece.rank, step=piece.key.step, error=error))

    async def persist(self, order: PersistStep) -> None:
        """Write this node's pieces and its fragment, and report."""
        error = UNFORESEEN
        fragment = b""
        try:
            ranks = order.ranks[self._begin.node_rank] if order.ranks else self.ranks
            fragment = encode_ref(await self._write(order, ranks)) if ranks else b""
            error = ""
        except (EasyckptError, OSError) as trouble:
            error = str(trouble)
        finally:
            self._send(
                Persisted(
                    node_rank=self._begin.node_rank,
                    key=order.key,
                    life=order.life,
                    fragment=fragment,
                    error=error,
                )
            )

    async def _write(self, order: PersistStep, ranks: tuple[int, ...]) -> FragmentRef:
        found = [self._holdings.sealed(rank, order.key) for rank in ranks]
        lacking = [rank for rank, piece in zip(ranks, found, strict=True) if piece is None]
        if lacking:
            raise IncompleteCheckpoint(f"ranks {lacking} of step {order.key.step} are not in memory")
        pieces = tuple(piece for piece in found if piece is not None)
        with contextlib.ExitStack() as pins:
            for piece in pieces:
                pins.enter_context(piece.pinned())
            work = partial(
                Vault(order.root, layouts=self._layouts).persist,
                pieces,
                life=Life(run_id=order.run_id, generation=order.life, resumed_step=None),
                node_rank=self._begin.node_rank,
                step=order.key.step,
                shares=order.shares,
            )
            begin_s = time.monotonic()
            running = asyncio.get_running_loop().run_in_executor(self._threads.storage, work)
            try:
                written = await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})  # the thread reads the slots until it is done
                raise
        count = sum(piece.body_bytes for piece in pieces)
        self._to_storage.note(count, time.monotonic() - begin_s, how=f"ranks of this node: {len(pieces)}")
        return written
