"""A node's sealed slots on their way to storage: together, proved, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyckpt.commit import read_fragment_head
from easyckpt.digest import HASH_CHUNK_BYTES, BodyDigest, digest_body
from easyckpt.errors import CorruptCheckpoint, StaleGeneration
from easyckpt.layout import ChunkSpec, Layout, build_layout, layout_to_dict
from easyckpt.manifest import FragmentRef, Manifest
from easyckpt.saver.disk import Layouts, Life, Vault
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.protocol import Held, Key
from easyckpt.storage import LocalStorage

RANKS = 3
LIFE = Life(run_id="run", generation=1, resumed_step=None)


def layout_of(elements: int) -> Layout:
    shape = (elements,)
    spec = ChunkSpec(name="w", dtype="uint8", global_shape=shape, offsets=(0,), sizes=shape)
    return build_layout([spec], state_bytes=64)


def sealed(holdings: Holdings, layout: Layout, rank: int) -> Piece:
    held = Held(key=Key(1, 5), rank=rank, world_size=RANKS, digest="")
    wire = json.dumps(layout_to_dict(layout)).encode()
    piece = holdings.place(held, layout=wire, body_bytes=layout.body_bytes, protect=())
    with piece.pinned() as body:
        body[: len(layout.header)] = layout.header
        body[-200:-100] = bytes([rank + 1]) * 100
        piece.seal(digest_body(body))
    return piece


@pytest.fixture
def holdings() -> Iterator[Holdings]:
    holdings = Holdings()
    yield holdings
    holdings.close()


@pytest.fixture
def pieces(holdings: Holdings) -> tuple[Piece, ...]:
    return tuple(sealed(holdings, layout_of(20_000), rank) for rank in range(RANKS))


def manifest_of(ref: FragmentRef) -> Manifest:
    return Manifest(
        run_id="run", generation=1, step=5, world_size=RANKS, resumed_step=None, fragments=(ref,),
        created_unix_s=1.0, software="",
    )  # fmt: skip


def flip(piece: Piece, at: int) -> None:
    with piece.pinned() as body:
        body[at] ^= 1


def test_all_ranks_come_back_with_their_seal(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    vault = Vault(str(tmp_path))
    ref = vault.persist(pieces, life=LIFE, node_rank=0, step=5)
    assert ref.ranks == (0, 1, 2)
    assert vault.persist(pieces, life=LIFE, node_rank=0, step=5) == ref, "repeating it is fine"
    for piece in pieces:
        located = vault.locate(manifest_of(ref), piece.rank)
        assert located.record.seal == BodyDigest(whole=piece.digest, chunks=piece.chunk_hashes)
        into = bytearray(piece.body_bytes)
        vault.load(located, memoryview(into))
        with piece.pinned() as body:
            assert into == body
    head = read_fragment_head(LocalStorage(tmp_path), ref, manifest_of(ref))
    assert [record.rank for record in head.pieces] == [0, 1, 2]


def test_memory_that_changed_after_the_seal_is_never_published(
    tmp_path: Path, pieces: tuple[Piece, ...]
) -> None:
    flip(pieces[1], -150)
    with pytest.raises(CorruptCheckpoint, match="memory of rank 1 changed after step 5 was sealed") as caught:
        Vault(str(tmp_path)).persist(pieces, life=LIFE, node_rank=0, step=5)
    assert "rank00001.safetensors" in str(caught.value)
    del caught  # its traceback holds views of the slot
    store = LocalStorage(tmp_path)
    assert not [entry.path for entry in store.list() if "rank00001" in entry.path or "json" in entry.path]
    assert store.unfinished() == ()
    flip(pieces[1], -150)
    ref = Vault(str(tmp_path)).persist(pieces, life=LIFE, node_rank=0, step=5)
    assert len(ref.ranks) == RANKS, "what was written before is no obstacle"


def test_a_change_far_into_a_long_body_is_found(tmp_path: Path, holdings: Holdings) -> None:
    piece = sealed(holdings, layout_of(HASH_CHUNK_BYTES + 100_000), 0)
    assert len(piece.chunk_hashes) == 2
    with piece.pinned() as body:
        whole = digest_body(body, lanes=1)
    assert whole.chunks == piece.chunk_hashes
    flip(piece, HASH_CHUNK_BYTES + 5000)
    with pytest.raises(CorruptCheckpoint, match=f"in bytes {HASH_CHUNK_BYTES} to {piece.body_bytes}"):
        Vault(str(tmp_path)).persist((piece,), life=LIFE, node_rank=0, step=5)
    assert LocalStorage(tmp_path).list() == LocalStorage(tmp_path).unfinished() == ()


def test_a_piece_known_by_its_digest_alone_is_proved_anew(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    for piece in pieces:
        piece.chunk_hashes = ()
    vault = Vault(str(tmp_path))
    ref = vault.persist(pieces, life=LIFE, node_rank=0, step=5)
    assert vault.locate(manifest_of(ref), 2).record.digest == pieces[2].digest
    flip(pieces[0], -150)
    with pytest.raises(CorruptCheckpoint, match="changed after step 5"):
        vault.persist(pieces, life=LIFE, node_rank=0, step=6)


def test_another_body_under_the_same_name_is_refused(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    Vault(str(tmp_path)).persist(pieces, life=LIFE, node_rank=0, step=5)
    flip(pieces[0], -150)
    with pieces[0].pinned() as body:
        pieces[0].seal(digest_body(body))
    with pytest.raises(StaleGeneration, match="with other bytes"):
        Vault(str(tmp_path)).persist(pieces, life=LIFE, node_rank=0, step=5)


def test_a_layout_is_read_once(pieces: tuple[Piece, ...]) -> None:
    layouts = Layouts()
    found = []
    for piece in pieces:
        with piece.pinned() as body:
            found.append(layouts.get(piece.layout, body))
    assert all(layout is found[0][0] and record is found[0][1] for layout, record in found)
    flip(pieces[0], 20)  # the header in the slot is another one: what is remembered does not count
    with pieces[0].pinned() as body, pytest.raises(CorruptCheckpoint):
        layouts.get(pieces[0].layout, body)
