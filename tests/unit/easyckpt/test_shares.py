"""Equal bytes of several ranks are stored once, and everything reads and proves them all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors

from easyckpt.digest import HASH_CHUNK_BYTES, BodyDigest, bytes_digest, digest_body, prefix_digest
from easyckpt.errors import CorruptCheckpoint, IncompleteCheckpoint
from easyckpt.layout import ChunkSpec, Layout, build_layout, layout_to_dict
from easyckpt.manifest import Fragment, FragmentRef, Manifest, PieceRecord
from easyckpt.piece import Extent, Stored
from easyckpt.saver.disk import Life, Vault
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.peering import Sealed, Share
from easyckpt.saver.protocol import Held, Key
from easyckpt.saver.shares import STEPS_KEPT, Shares, roster_of
from easyckpt.storage import LocalStorage
from easyckpt.verify import FindingKind, verify_step

RANKS = 3
SHARES = (Share(rank=0, by_rank=1, by_node=0), Share(rank=2, by_rank=1, by_node=0))


def sealed_message(rank: int, step: int, data: str, layout: str = "l") -> Sealed:
    return Sealed(rank=rank, step=step, digest=f"{rank}", layout=layout, data=data)


def test_ranks_of_equal_data_are_a_group_and_one_of_it_writes() -> None:
    shares = Shares()
    for rank in range(6):
        shares.sealed(sealed_message(rank, 7, f"{rank % 2:032x}" if rank < 5 else ""))
    nodes = {rank: rank // 2 for rank in range(6)}
    found = shares.of(7, nodes)
    assert found == shares.of(7, nodes), "the same choice every time"
    writers = {0, 1, 2, 3, 4} - {share.rank for share in found}
    assert len(writers) == 2
    assert all(share.rank % 2 == share.by_rank % 2 and share.by_rank in writers for share in found)
    assert all(share.by_node == share.by_rank // 2 for share in found)
    assert shares.of(8, nodes) == ()


def test_the_roster_is_known_when_every_ranks_data_is_and_some_are_equal() -> None:
    shares = Shares()
    for rank in range(3):
        assert shares.roster(7, 4) == ""
        shares.sealed(sealed_message(rank, 7, f"{rank % 2:032x}"))
    assert shares.roster(7, 3) == roster_of((f"{1:032x}", f"{0:032x}"))
    shares.sealed(sealed_message(3, 7, ""))
    assert shares.roster(7, 4) == ""
    for rank in range(2):
        shares.sealed(sealed_message(rank, 8, f"{rank:032x}"))
    assert shares.roster(8, 2) == "", "nobody could stand in for anybody"


def test_the_load_goes_round() -> None:
    writers = set()
    for number in range(40):
        shares = Shares()
        for rank in range(4):
            shares.sealed(sealed_message(rank, 1, f"{number * 0x9E3779B1 % (1 << 32):08x}" + "0" * 24))
        writers |= {share.by_rank for share in shares.of(1, dict.fromkeys(range(4), 0))}
    assert writers == {0, 1, 2, 3}


def test_old_steps_and_cut_history_are_forgotten() -> None:
    shares = Shares()
    for step in range(STEPS_KEPT + 1):
        for rank in range(2):
            shares.sealed(sealed_message(rank, step, "0" * 32))
    nodes = {0: 0, 1: 0}
    assert not shares.of(0, nodes)
    assert shares.of(1, nodes)
    shares.forget()
    assert not shares.of(1, nodes)


def layout_of(elements: int = 20_000) -> Layout:
    shape = (elements,)
    spec = ChunkSpec(name="w", dtype="uint8", global_shape=shape, offsets=(0,), sizes=shape)
    return build_layout([spec], state_bytes=64)


def sealed(holdings: Holdings, layout: Layout, rank: int) -> Piece:
    """Equal tensors, and a state of its own."""
    held = Held(key=Key(1, 5), rank=rank, world_size=RANKS, digest="")
    wire = json.dumps(layout_to_dict(layout)).encode()
    piece = holdings.place(held, layout=wire, body_bytes=layout.body_bytes, protect=())
    with piece.pinned() as body:
        body[: len(layout.header)] = layout.header
        body[layout.chunks[0].begin : layout.chunks[0].end] = bytes(range(250)) * (
            layout.chunks[0].sizes[0] // 250
        )
        body[layout.state_begin : layout.state_begin + 9] = b"\1" + bytes(7) + bytes([rank + 1])
        piece.seal(digest_body(body))
    return piece


@pytest.fixture
def pieces() -> Iterator[tuple[Piece, ...]]:
    holdings = Holdings()
    yield tuple(sealed(holdings, layout_of(), rank) for rank in range(RANKS))
    holdings.close()


def stored(folder: Path, pieces: tuple[Piece, ...]) -> tuple[Vault, Manifest]:
    """A committed step, stored once."""
    vault = Vault(str(folder))
    life = vault.begin_life(world_size=RANKS, resumed_step=None, wanted=lambda: True)
    ref = vault.persist(pieces, life=life, node_rank=0, step=5, shares=SHARES)
    assert vault.persist(pieces, life=life, node_rank=0, step=5, shares=SHARES) == ref, "repeating is fine"
    assert vault.commit((ref,), life=life, step=5, world_size=RANKS, metrics={}) == ""
    return vault, manifest_of(life, ref)


def manifest_of(life: Life, *refs: FragmentRef) -> Manifest:
    return Manifest(
        run_id=life.run_id, generation=life.generation, step=5, world_size=RANKS, resumed_step=None,
        fragments=refs, created_unix_s=1.0, software="",
    )  # fmt: skip


def body_file(folder: Path, rank: int) -> Path:
    return folder / f"data/g00000001/s000000000005/node00000/rank{rank:05d}.safetensors"


def load(vault: Vault, manifest: Manifest, rank: int) -> bytearray:
    located = vault.locate(manifest, rank)
    into = bytearray(b"\xff" * located.record.bytes)
    vault.load(located, memoryview(into))
    return into


def test_every_rank_gets_its_own_body_from_bytes_that_are_there_once(
    tmp_path: Path, pieces: tuple[Piece, ...]
) -> None:
    vault, manifest = stored(tmp_path, pieces)
    for piece in pieces:
        with piece.pinned() as body:
            assert load(vault, manifest, piece.rank) == body
    assert body_file(tmp_path, 1).stat().st_size == pieces[1].body_bytes
    for rank, names in ((0, {"__state__"}), (1, {"w", "__state__"}), (2, {"__state__"})):
        with safetensors.safe_open(body_file(tmp_path, rank), framework="numpy") as opened:
            assert {name for name in opened.keys() if not name.startswith("__pad__")} == names  # noqa: SIM118
    assert body_file(tmp_path, 0).stat().st_size == 8192
    verdict = verify_step(LocalStorage(tmp_path), manifest)
    assert verdict.is_good
    assert verdict.is_whole


def test_bytes_at_hand_are_used_if_they_are_right(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    vault, manifest = stored(tmp_path, pieces)
    located = vault.locate(manifest, 2)
    with pieces[2].pinned() as body:
        sound, wrong = bytes(body), bytes(len(body))
    for known in (sound, wrong):
        into = bytearray(len(sound))
        vault.load(located, memoryview(into), have={0: memoryview(known)})
        assert into == sound
    body_file(tmp_path, 1).write_bytes(bytes(len(sound)))
    into = bytearray(len(sound))
    vault.load(located, memoryview(into), have={0: memoryview(sound)})
    assert into == sound, "nothing was read"
    with pytest.raises(CorruptCheckpoint):
        vault.load(located, memoryview(into), have={0: memoryview(wrong)})


def test_damage_to_shared_bytes_concerns_all_who_share_them(
    tmp_path: Path, pieces: tuple[Piece, ...]
) -> None:
    vault, manifest = stored(tmp_path, pieces)
    raw = bytearray(body_file(tmp_path, 1).read_bytes())
    raw[9000] ^= 1
    body_file(tmp_path, 1).write_bytes(raw)
    for rank in range(RANKS):
        with pytest.raises(CorruptCheckpoint, match="rank00001") as caught:
            load(vault, manifest, rank)
        assert f"of rank {rank} differ" in str(caught.value)
    verdict = verify_step(LocalStorage(tmp_path), manifest)
    assert {rank for finding in verdict.findings for rank in finding.ranks} == {0, 1, 2}


def test_a_file_that_is_missing_short_or_anothers(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    vault, manifest = stored(tmp_path, pieces)
    whole, own = body_file(tmp_path, 1).read_bytes(), body_file(tmp_path, 0).read_bytes()
    body_file(tmp_path, 1).write_bytes(whole[:-4096])
    with pytest.raises(IncompleteCheckpoint, match="rank 1 has"):
        load(vault, manifest, 1)
    body_file(tmp_path, 1).unlink()
    for rank in range(RANKS):
        with pytest.raises(IncompleteCheckpoint):
            load(vault, manifest, rank)
    assert {item.kind for item in verify_step(LocalStorage(tmp_path), manifest).findings} >= {
        FindingKind.MISSING
    }
    body_file(tmp_path, 1).write_bytes(whole)
    body_file(tmp_path, 0).write_bytes(body_file(tmp_path, 2).read_bytes())
    with pytest.raises(CorruptCheckpoint):
        load(vault, manifest, 0)
    body_file(tmp_path, 0).write_bytes(own[:-1])
    with pytest.raises(IncompleteCheckpoint, match="has 8191 bytes instead of 8192"):
        load(vault, manifest, 0)


def test_memory_that_changed_is_not_published_and_padding_that_is_not_zero_is_stored(
    tmp_path: Path, pieces: tuple[Piece, ...]
) -> None:
    life = Life(run_id="r", generation=1, resumed_step=None)
    with pieces[2].pinned() as body:
        begin = layout_of().state_begin
        body[begin + 8] ^= 0xFF
        with pytest.raises(CorruptCheckpoint, match="rank 2 changed after step 5"):
            Vault(str(tmp_path)).persist(pieces, life=life, node_rank=0, step=5, shares=SHARES)
        body[begin + 8] ^= 0xFF
        body[-1] = 1
        pieces[2].seal(digest_body(body))
    ref = Vault(str(tmp_path)).persist(pieces, life=life, node_rank=0, step=5, shares=SHARES)
    fragment = Fragment.from_json(LocalStorage(tmp_path).read(ref.file), where="x")
    assert [bool(piece.extents) for piece in fragment.pieces] == [True, False, False]


def test_a_step_whose_shared_bytes_never_came_is_not_committed(
    tmp_path: Path, pieces: tuple[Piece, ...]
) -> None:
    """Two nodes: the one that was to store the bytes for both did not."""
    vault = Vault(str(tmp_path))
    life = vault.begin_life(world_size=RANKS, resumed_step=None, wanted=lambda: True)
    shares = (Share(rank=1, by_rank=0, by_node=0), Share(rank=2, by_rank=0, by_node=0))
    refs = (
        vault.persist(pieces[:1], life=life, node_rank=0, step=5, shares=shares),
        vault.persist(pieces[1:], life=life, node_rank=1, step=5, shares=shares),
    )
    body = body_file(tmp_path, 0)
    raw = body.read_bytes()
    body.unlink()
    with pytest.raises(IncompleteCheckpoint, match="rank 0 is not there"):
        vault.commit(refs, life=life, step=5, world_size=RANKS, metrics={})
    body.write_bytes(raw)
    assert vault.commit(refs, life=life, step=5, world_size=RANKS, metrics={}) == ""
    manifest = manifest_of(life, *refs)
    for piece in pieces:
        with piece.pinned() as memory:
            assert load(vault, manifest, piece.rank) == memory
    verdict = verify_step(LocalStorage(tmp_path), manifest)
    assert verdict.is_good


HOSTILE_EXTENTS = {
    "overlap": [(0, 100, 0), (50, 200, 0)],
    "backwards": [(100, 200, 0), (0, 50, 0)],
    "beyond the body": [(0, 1 << 40, 0)],
    "of no length": [(5, 5, 0)],
    "of a rank that there is not": [(0, 100, 99)],
}


@pytest.mark.parametrize("extents", HOSTILE_EXTENTS.values(), ids=HOSTILE_EXTENTS.keys())
def test_hostile_extents(
    tmp_path: Path, pieces: tuple[Piece, ...], extents: list[tuple[int, int, int]]
) -> None:
    _, manifest = stored(tmp_path, pieces)
    path = tmp_path / manifest.fragments[0].file
    fields = json.loads(path.read_bytes())
    fields["pieces"][0]["extents"] = [
        {"begin": begin, "end": end, "node_rank": 0, "rank": rank, "file_begin": 0}
        for begin, end, rank in extents
    ]
    raw = json.dumps(fields | {"checksum": "0" * 32}).encode()
    raw = raw.replace(b"0" * 32, bytes_digest(raw).encode(), 1)
    with pytest.raises(CorruptCheckpoint, match="not valid"):
        Fragment.from_json(raw, where="x")


def test_what_no_extent_covers_is_zeros() -> None:
    fragment_piece = PieceRecord(
        rank=0, file="data/g00000001/s000000000005/node00000/rank00000.safetensors", bytes=100,
        digest=BodyDigest.of(("0" * 32,)).whole, hash_chunk_bytes=HASH_CHUNK_BYTES, chunk_hashes=("0" * 32,),
        layout="0" * 32, file_bytes=8192,
        extents=(
            Extent(begin=10, end=20, node_rank=1, rank=7, file_begin=4096),
            Extent(begin=30, end=40, node_rank=0, rank=0, file_begin=0),
        ),
    )  # fmt: skip
    other = "data/g00000001/s000000000005/node00001/rank00007.safetensors"
    assert fragment_piece.stored(5, 35) == (
        Stored(begin=5, end=10),
        Stored(begin=10, end=20, file=other, file_begin=4096),
        Stored(begin=20, end=30),
        Stored(begin=30, end=35, file=fragment_piece.file, file_begin=0),
    )
    assert fragment_piece.stored(12, 15) == (Stored(begin=12, end=15, file=other, file_begin=4098),)
    assert fragment_piece.stored(50, 100) == (Stored(begin=50, end=100),)


def test_the_digest_of_the_data_knows_every_byte_before_the_state() -> None:
    body = memoryview(bytearray(HASH_CHUNK_BYTES + 9000))
    end = HASH_CHUNK_BYTES + 5000
    first = prefix_digest(body, digest_body(body), end=end)
    body[end] = 1
    assert prefix_digest(body, digest_body(body), end=end) == first
    for at in (0, HASH_CHUNK_BYTES - 1, end - 1):
        body[at] ^= 1
        assert prefix_digest(body, digest_body(body), end=end) != first
        body[at] ^= 1
