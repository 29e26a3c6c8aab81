"""A slot on its way to storage and back: every damage is found, named, and an older step is still there."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from easyckpt.digest import digest_body
from easyckpt.errors import CheckpointFault, CorruptCheckpoint, IncompleteCheckpoint, Misuse, StaleGeneration
from easyckpt.manifest import Fragment, Manifest
from easyckpt.read import load_piece, locate_piece, read_body
from easyckpt.saver.persist import PieceMeta, make_fragment, persist_piece, write_fragment
from easyckpt.storage import LocalStorage, MemoryStorage, Storage
from easyckpt.survey import visible_steps
from easyckpt.testing import SampleRun
from easyckpt.testing.sample import sample_body, sample_layout
from easyckpt.verify import FindingKind, verify_step
from easyckpt.why import ReasonKind, explain_step


def load(storage: Storage, manifest: Manifest, rank: int) -> bytearray:
    located = locate_piece(storage, manifest, rank)
    into = bytearray(located.record.bytes)
    loaded = load_piece(storage, manifest, rank=rank, into=memoryview(into), located=located)
    assert loaded.record == located.record
    assert loaded.layout == sample_layout(rank, manifest.world_size, elements=3000)
    return into


@pytest.fixture
def run() -> SampleRun:
    run = SampleRun(storage=MemoryStorage(), nodes=2, ranks_per_node=2)
    run.begin(1)
    for step in (10, 20):
        run.save(step)
    return run


def manifest_of(run: SampleRun, step: int) -> Manifest:
    (found,) = (item for item in visible_steps(run.storage) if item.step == step)
    return found.manifest


def test_every_rank_gets_its_bytes_back(run: SampleRun) -> None:
    for step in (10, 20):
        for rank in range(4):
            assert load(run.storage, manifest_of(run, step), rank) == run.bodies[step, 1][rank]


def test_through_a_real_folder_with_large_bodies(tmp_path: Path) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path / "run"), elements=(3 << 20) // 4 + 1234)
    run.begin(1)
    assert run.save(7).is_visible
    manifest = visible_steps(run.storage)[0].manifest
    located = locate_piece(run.storage, manifest, 0)
    into = bytearray(located.record.bytes)
    load_piece(run.storage, manifest, rank=0, into=memoryview(into))
    assert into == run.bodies[7, 1][0]
    assert located.record.bytes > 3 << 20


def meta_of(step: int, rank: int, body: bytearray, **changes: object) -> PieceMeta:
    fields = PieceMeta(
        generation=1, step=step, node_rank=0, rank=rank, layout=sample_layout(rank, 1),
        seal=digest_body(memoryview(body)),
    )  # fmt: skip
    return dataclasses.replace(fields, **changes)  # type: ignore[arg-type]


def test_a_slot_that_is_not_what_was_sealed_is_not_written(run: SampleRun) -> None:
    storage = MemoryStorage()
    body = sample_body(sample_layout(0, 1), seed=1)
    meta = meta_of(5, 0, body)
    body[-1] ^= 1
    with pytest.raises(CorruptCheckpoint, match="changed after step 5 was sealed"):
        persist_piece(storage, body=memoryview(body), piece=meta)
    body[-1] ^= 1
    body[3] ^= 1
    with pytest.raises(CorruptCheckpoint, match="header"):
        persist_piece(storage, body=memoryview(body), piece=meta)
    with pytest.raises(Misuse, match="bytes for a layout"):
        persist_piece(storage, body=memoryview(body)[:-1], piece=meta)
    assert storage.list() == ()


def test_persisting_again_is_fine_and_other_bytes_are_refused() -> None:
    storage = MemoryStorage()
    body = sample_body(sample_layout(0, 1), seed=1)
    meta = meta_of(5, 0, body)
    record = persist_piece(storage, body=memoryview(body), piece=meta)
    assert persist_piece(storage, body=memoryview(body), piece=meta) == record
    fragment = make_fragment([(meta, record)], run_id="r", world_size=1)
    ref = write_fragment(storage, fragment)
    assert write_fragment(storage, fragment) == ref
    assert persist_piece(storage, body=memoryview(body), piece=meta) == record
    other = sample_body(sample_layout(0, 1), seed=2)
    with pytest.raises(StaleGeneration, match="other bytes"):
        persist_piece(storage, body=memoryview(other), piece=meta_of(5, 0, other))
    assert storage.read(record.file) == body, "a manifest may stand on it"
    changed = dataclasses.replace(fragment, run_id="s")
    with pytest.raises(StaleGeneration, match="another fragment"):
        write_fragment(storage, changed)
    storage.delete(record.file)
    assert persist_piece(storage, body=memoryview(body), piece=meta) == record
    assert storage.read(record.file) == body, "a body that was lost is written again"


def test_a_fragment_is_of_one_node_and_one_step() -> None:
    storage = MemoryStorage()
    pairs = []
    for rank, changes in ((0, {}), (1, {"generation": 2}), (1, {"node_rank": 1}), (0, {})):
        body = sample_body(sample_layout(rank, 1), seed=1)
        meta = meta_of(5, rank, body, **changes)
        pairs.append((meta, persist_piece(storage, body=memoryview(body), piece=meta)))
    for wrong in ([pairs[0], pairs[1]], [pairs[0], pairs[2]], [pairs[0], pairs[3]], []):
        with pytest.raises(Misuse, match="fragment"):
            make_fragment(wrong, run_id="r", world_size=2)


def test_equal_layouts_stand_once_in_a_fragment() -> None:
    storage = MemoryStorage()
    layout = sample_layout(0, 1)
    pairs = []
    for rank in range(4):
        body = sample_body(layout, seed=rank)
        meta = meta_of(5, rank, body, layout=layout)
        pairs.append((meta, persist_piece(storage, body=memoryview(body), piece=meta)))
    fragment = make_fragment(reversed(pairs), run_id="r", world_size=4)
    assert len(fragment.layouts) == 1
    assert [piece.rank for piece in fragment.pieces] == [0, 1, 2, 3]
    assert Fragment.from_json(fragment.to_json(), where="x") == fragment


def body_file(run: SampleRun, step: int, rank: int) -> str:
    return f"data/g00000001/s{step:012d}/node{rank // 2:05d}/rank{rank:05d}.safetensors"


def test_every_flipped_byte_of_a_body_is_found(run: SampleRun) -> None:
    manifest = manifest_of(run, 20)
    path = body_file(run, 20, 1)
    sound = run.storage.read(path)
    for at in (0, 7, 8, 500, 4095, 4096, len(sound) // 2, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[at] ^= 0x10
        run.storage.write_durable(path, damaged)
        with pytest.raises(CorruptCheckpoint, match="differ from their hash") as caught:
            load(run.storage, manifest, 1)
        assert path in str(caught.value)
        assert "rank 1" in str(caught.value)
        assert "easyckpt why 20" in str(caught.value)
        verdict = verify_step(run.storage, manifest)
        assert not verdict.is_good
        assert {rank for finding in verdict.findings for rank in finding.ranks} == {1}
        assert load(run.storage, manifest, 0) == run.bodies[20, 1][0]
    assert load(run.storage, manifest_of(run, 10), 1) == run.bodies[10, 1][1], "the older step is unharmed"


def test_missing_truncated_and_longer_bodies(run: SampleRun) -> None:
    manifest = manifest_of(run, 20)
    path = body_file(run, 20, 3)
    sound = run.storage.read(path)
    for raw in (sound[:-1], sound[: len(sound) // 2], b"", sound + b"\0"):
        run.storage.write_durable(path, raw)
        with pytest.raises(IncompleteCheckpoint, match=f"has {len(raw)} bytes instead of {len(sound)}"):
            load(run.storage, manifest, 3)
        (finding,) = verify_step(run.storage, manifest).findings
        assert (finding.kind, finding.ranks) == (FindingKind.MISSING, (3,))
    run.storage.delete(path)
    with pytest.raises(IncompleteCheckpoint, match="is not there"):
        load(run.storage, manifest, 3)
    answer = explain_step(run.storage, 20)
    assert not answer.loadable
    assert [reason.kind for reason in answer.reasons] == [ReasonKind.MISSING]
    assert answer.others == (10,)


def test_swapped_bodies_are_named(run: SampleRun) -> None:
    first, second = body_file(run, 20, 0), body_file(run, 20, 1)
    a, b = run.storage.read(first), run.storage.read(second)
    run.storage.write_durable(first, b)
    run.storage.write_durable(second, a)
    manifest = manifest_of(run, 20)
    with pytest.raises(CheckpointFault):
        load(run.storage, manifest, 0)
    verdict = verify_step(run.storage, manifest)
    assert not verdict.is_good
    reasons = {reason.kind for reason in explain_step(run.storage, 20).reasons}
    assert reasons <= {ReasonKind.SWAPPED, ReasonKind.CORRUPT}
    # A step's body in another step's place is damage too, with the same layout throughout.
    run.storage.write_durable(first, run.storage.read(body_file(run, 10, 0)))
    run.storage.write_durable(second, b)
    with pytest.raises(CorruptCheckpoint):
        load(run.storage, manifest, 0)


def test_swapped_bodies_of_equal_layout_are_told_by_name() -> None:
    storage = MemoryStorage()
    layout = sample_layout(0, 1)
    run = SampleRun(storage=storage, nodes=1, ranks_per_node=2)
    run.begin(1)
    pairs = []
    for rank in range(2):
        body = sample_body(layout, seed=rank)
        meta = meta_of(5, rank, body, layout=layout)
        pairs.append((meta, persist_piece(storage, body=memoryview(body), piece=meta)))
    ref = write_fragment(storage, make_fragment(pairs, run_id=run.run_id, world_size=2))
    manifest = run.manifest(5, [ref])
    a, b = (storage.read(record.file) for _, record in pairs)
    storage.write_durable(pairs[0][1].file, b)
    storage.write_durable(pairs[1][1].file, a)
    findings = verify_step(storage, manifest).findings
    assert [finding.kind for finding in findings] == [FindingKind.SWAPPED] * 2
    assert "are those of rank 1" in findings[0].detail


def test_a_fragment_that_is_damaged_or_gone(run: SampleRun) -> None:
    manifest = manifest_of(run, 20)
    path = "data/g00000001/s000000000020/node00001.json"
    sound = run.storage.read(path)
    run.storage.write_durable(path, sound.replace(b"float32", b"float16"))
    with pytest.raises(CorruptCheckpoint, match="differs from what the manifest says"):
        load(run.storage, manifest, 2)
    run.storage.delete(path)
    with pytest.raises(IncompleteCheckpoint, match="fragment of node 1 is not there"):
        load(run.storage, manifest, 2)
    verdict = verify_step(run.storage, manifest)
    assert verdict.findings[0].ranks == (2, 3)
    assert load(run.storage, manifest, 1) == run.bodies[20, 1][1]


def test_an_index_that_lies_consistently_about_the_body(run: SampleRun) -> None:
    """All hashes fit, and a chunk is said to lie where another tensor does: the body's own header
    disagrees."""
    path = "data/g00000001/s000000000020/node00000.json"
    fragment = Fragment.from_json(run.storage.read(path), where="x")
    layout = fragment.layouts[0].layout
    weight, bias = layout.chunks[0], layout.chunks[1]
    moved = dataclasses.replace(bias, begin=weight.begin, end=weight.begin + bias.end - bias.begin)
    lying = dataclasses.replace(layout, chunks=(weight, moved, *layout.chunks[2:]))
    records = (dataclasses.replace(fragment.layouts[0], layout=lying), *fragment.layouts[1:])
    fake = dataclasses.replace(fragment, layouts=records)
    raw = fake.to_json()
    run.storage.write_durable(path, raw)
    manifest = manifest_of(run, 20)
    forged = dataclasses.replace(manifest, fragments=(fake.ref(raw), manifest.fragments[1]))
    rank = next(piece.rank for piece in fake.pieces if piece.layout == lying.digest)
    located = locate_piece(run.storage, forged, rank)
    with pytest.raises(CorruptCheckpoint, match="lies elsewhere in the file than the index says"):
        read_body(run.storage, located, into=memoryview(bytearray(located.record.bytes)))
    assert not verify_step(run.storage, forged).is_good


def test_a_rank_that_is_not_in_the_step(run: SampleRun) -> None:
    with pytest.raises(IncompleteCheckpoint, match="saved by 4 ranks, and has no rank 4"):
        locate_piece(run.storage, manifest_of(run, 20), 4)


def test_the_buffer_has_to_fit(run: SampleRun) -> None:
    manifest = manifest_of(run, 20)
    for into in (
        memoryview(bytearray(10)),
        memoryview(bytes(locate_piece(run.storage, manifest, 0).record.bytes)),
    ):
        with pytest.raises(Misuse, match="writable buffer"):
            load_piece(run.storage, manifest, rank=0, into=into)


def test_a_budget_reads_a_part_and_says_so(run: SampleRun) -> None:
    manifest = manifest_of(run, 20)
    whole = verify_step(run.storage, manifest)
    assert whole.is_good
    assert whole.is_whole
    seen: list[tuple[int, int]] = []
    part = verify_step(
        run.storage, manifest, byte_budget=1, on_bytes=lambda done, wanted: seen.append((done, wanted))
    )
    assert part.is_good
    assert not part.is_whole
    assert 0 < part.bytes_proved < part.bytes_total == whole.bytes_total
    assert seen[-1][0] == seen[-1][1] == part.bytes_proved
    run.storage.delete(body_file(run, 20, 0))
    assert not verify_step(run.storage, manifest, byte_budget=0).is_good, "lengths are looked at in any case"


def test_why_of_steps_that_were_never_committed(run: SampleRun) -> None:
    refs = run.persist(30)
    assert "never committed" in explain_step(run.storage, 30).reasons[0].detail
    run.storage.delete(refs[1].file)
    (reason,) = explain_step(run.storage, 30).reasons
    assert reason.kind is ReasonKind.NEVER_COMMITTED
    assert "2 of 4 ranks did not finish (2, 3)" in reason.detail
    run.storage.delete(refs[0].file)
    assert "no node finished" in explain_step(run.storage, 30).reasons[0].detail
    (reason,) = explain_step(run.storage, 31).reasons
    assert reason.kind is ReasonKind.NEVER_SAVED
    good = explain_step(run.storage, 20)
    assert good.loadable
    assert good.reasons[0].kind is ReasonKind.GOOD


def test_the_disk_side_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, json\n"
        "import easyckpt.saver.persist, easyckpt.retention, easyckpt.storage, easyckpt.read, easyckpt.why\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'fsspec', 'rich') if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []
