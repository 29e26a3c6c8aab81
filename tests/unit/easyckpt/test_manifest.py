"""Index files: what is written is read, and nothing that is damaged, hostile or foreign is believed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from easyckpt.bodyfile import parse_header
from easyckpt.digest import HASH_CHUNK_BYTES, bytes_digest, digest_body
from easyckpt.envelope import encode, read_index
from easyckpt.errors import CheckpointFault, CorruptCheckpoint, StorageMissing, UnknownFormat
from easyckpt.manifest import Fragment, FragmentRef, LayoutRecord, Manifest, PieceRecord
from easyckpt.paths import (
    StepName,
    body_path,
    fragment_path,
    generation_path,
    manifest_path,
    parse_data,
    parse_generation,
    parse_manifest,
    parse_tombstone,
    tombstone_path,
)
from easyckpt.records import GenerationRecord, LatestHint, RootRecord, Tombstone
from easyckpt.storage import MemoryStorage
from easyckpt.testing.sample import SampleRun, sample_body, sample_layout

NAME = StepName(step=100, generation=3)
OTHER = StepName(step=99, generation=3)


def make_fragment() -> Fragment:
    run = SampleRun(storage=MemoryStorage(), nodes=2, ranks_per_node=2)
    run.begin(3, resumed_step=90)
    ref = run.persist(100)[1]
    return Fragment.from_json(run.storage.read(ref.file), where="fragment")


def make_manifest(**changes: Any) -> Manifest:
    refs = tuple(
        FragmentRef(
            node_rank=node,
            file=fragment_path(NAME, node_rank=node),
            bytes=100,
            hash="0" * 31 + str(node),
            ranks=(2 * node, 2 * node + 1),
        )
        for node in range(2)
    )
    fields: dict[str, Any] = {
        "run_id": "run", "generation": 3, "step": 100, "world_size": 4, "resumed_step": 90, "fragments": refs,
        "created_unix_s": 1.5e9, "software": "test",
    }  # fmt: skip
    return Manifest(**(fields | changes))


RECORDS = (
    RootRecord(run_id="run", created_unix_s=1.5, software="s"),
    GenerationRecord(run_id="run", generation=3, resumed_step=None, world_size=4, life="x",
                     created_unix_s=0.0, software=""),
    GenerationRecord(run_id="ü run", generation=3, resumed_step=0, world_size=4, life="x",
                     created_unix_s=0.0, software=""),
    Tombstone(run_id="run", step=1, generation=1, by_generation=2, anchor_step=2, anchor_generation=1,
              created_unix_s=3.0),
    LatestHint(step=1, generation=1, manifest="m"),
    make_manifest(metrics={"loss": 0.5}),
    make_manifest(resumed_step=None),
    make_fragment(),
)  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_round_trip(record: Any) -> None:
    raw = record.to_json()
    assert type(record).from_json(raw, where="x") == record
    assert json.loads(raw)["schema"] == 2
    assert type(record).from_json(raw, where="x").to_json() == raw


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_flipped_bit_is_found(record: Any) -> None:
    raw = record.to_json()
    step = max(1, len(raw) // 150)
    for at in range(0, len(raw), step):
        for bit in (0, 3, 6):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            with pytest.raises(CheckpointFault):
                type(record).from_json(bytes(damaged), where="x")
    for cut in (0, 1, len(raw) // 2, len(raw) - 2):
        with pytest.raises(CheckpointFault):
            type(record).from_json(raw[:cut], where="x")


def test_checksum_is_what_the_format_says() -> None:
    raw = make_manifest().to_json()
    checksum = json.loads(raw)["checksum"]
    assert bytes_digest(raw.replace(checksum.encode(), b"0" * 32, 1)) == checksum


def test_metrics_that_are_no_number_become_null() -> None:
    manifest = make_manifest(metrics={"a": float("nan"), "b": float("inf"), "c": 1})
    assert dict(manifest.metrics) == {"a": None, "b": None, "c": 1.0}
    again = Manifest.from_json(manifest.to_json(), where="x")
    assert again.same_content(manifest)


def test_same_content_is_about_bytes_not_about_writers() -> None:
    assert make_manifest().same_content(make_manifest(created_unix_s=5.0, software="other"))
    assert not make_manifest().same_content(make_manifest(resumed_step=80))


def resigned(record: Any, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The record with a change and a checksum that fits: what a hostile writer would make."""
    fields = json.loads(record.to_json())
    change(fields)
    kind = fields.pop("kind")
    schema = fields.pop("schema")
    del fields["checksum"]
    raw = encode(kind, fields)
    if schema == 2:
        return raw
    raw = raw.replace(b'"schema": 2', b'"schema": ' + str(schema).encode(), 1)
    checksum = json.loads(raw)["checksum"].encode()
    unsigned = raw.replace(checksum, b"0" * 32, 1)
    return raw.replace(checksum, bytes_digest(unsigned).encode(), 1)


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: Any) -> None:
        for part in path[:-1]:
            fields = fields[part]
        fields[path[-1]] = value

    return change


HUGE = 1 << 70

HOSTILE_MANIFESTS = {
    "path out of the folder": put("fragments", 0, "file", value="../../etc/passwd"),
    "absolute path": put("fragments", 0, "file", value="/etc/passwd"),
    "another step's fragment": put("fragments", 0, "file", value=fragment_path(OTHER, node_rank=0)),
    "another node's fragment": put("fragments", 0, "file", value=fragment_path(NAME, node_rank=1)),
    "a rank twice": put("fragments", 1, "ranks", value=[1, 3]),
    "a rank missing": put("fragments", 1, "ranks", value=[2]),
    "a rank too many": put("fragments", 1, "ranks", value=[2, 3, 4]),
    "nodes out of order": lambda fields: fields["fragments"].reverse(),
    "no fragments": put("fragments", value=[]),
    "negative step": put("step", value=-1),
    "step beyond numbers": put("step", value=HUGE),
    "step as text": put("step", value="100"),
    "step as a fraction": put("step", value=100.5),
    "step as truth": put("step", value=True),
    "generation nought": put("generation", value=0),
    "world of nobody": put("world_size", value=0),
    "world beyond limits": put("world_size", value=10**9),
    "hash too short": put("fragments", 0, "hash", value="00"),
    "hash in capitals": put("fragments", 0, "hash", value="A" * 32),
    "fragment of no bytes": put("fragments", 0, "bytes", value=0),
    "fragment too long": put("fragments", 0, "bytes", value=1 << 40),
    "terminal codes in the run": put("run_id", value="\x1b[31mrun"),
    "run of no name": put("run_id", value=""),
    "run of a long name": put("run_id", value="x" * 1000),
    "no step": lambda fields: fields.pop("step"),
    "time that is none": put("created_unix_s", value=-1),
    "a list for an object": put("fragments", 0, value=[]),
    "too many metrics": put("metrics", value={str(number): 1.0 for number in range(101)}),
}  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE_MANIFESTS.values(), ids=HOSTILE_MANIFESTS.keys())
def test_hostile_manifest(change: Callable[[dict[str, Any]], None]) -> None:
    raw = resigned(make_manifest(), change)
    with pytest.raises(CorruptCheckpoint, match="not valid") as caught:
        Manifest.from_json(raw, where="/ckpt/manifests/x.json")
    assert "/ckpt/manifests/x.json" in str(caught.value)
    assert caught.value.exit_code == 4


HOSTILE_FRAGMENTS = {
    "path out of the folder": put("pieces", 0, "file", value="data/../../x"),
    "another rank's body": put("pieces", 0, "file", value=body_path(NAME, node_rank=1, rank=3)),
    "a length that is not the layout's": put("pieces", 0, "bytes", value=4096),
    "a length beyond limits": put("pieces", 0, "bytes", value=1 << 60),
    "a million hashes": put("pieces", 0, "chunk_hashes", value=["0" * 32] * 100_000),
    "no hashes": put("pieces", 0, "chunk_hashes", value=[]),
    "hashing in tiny chunks": put("pieces", 0, "hash_chunk_bytes", value=1),
    "an unknown layout": put("pieces", 0, "layout", value="f" * 32),
    "ranks twice": put("pieces", 1, "rank", value=2),
    "a rank beyond the world": put("world_size", value=3),
    "no pieces": put("pieces", value=[]),
    "no layouts": put("layouts", value=[]),
    "a layout that is text": put("layouts", 0, value="layout"),
    "a chunk that leaves the body": put("layouts", 0, "chunks", 0, 8, value=1 << 40),
    "a chunk that ends before it begins": put("layouts", 0, "chunks", 0, 7, value=1 << 13),
    "an unknown type": put("layouts", 0, "chunks", 0, 3, value="float7"),
    "a shape with a sign": put("layouts", 0, "chunks", 0, 4, value=[-40, -50]),
    "a shape of shapes": put("layouts", 0, "chunks", 0, 4, value=[[40], 50]),
    "more dimensions than sense": put("layouts", 0, "chunks", 0, 4, value=[1] * 1000),
    "a body of another length": put("layouts", 0, "body_bytes", value=12345),
    "a header of no length": put("layouts", 0, "header_bytes", value=0),
    "a header beyond limits": put("layouts", 0, "header_bytes", value=1 << 40),
}


@pytest.mark.parametrize("change", HOSTILE_FRAGMENTS.values(), ids=HOSTILE_FRAGMENTS.keys())
def test_hostile_fragment(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"valid|layout") as caught:
        Fragment.from_json(resigned(make_fragment(), change), where="/ckpt/data/x.json")
    assert "/ckpt/data/x.json" in str(caught.value)


def test_a_newer_schema_says_so() -> None:
    raw = resigned(make_manifest(), put("schema", value=3))
    with pytest.raises(UnknownFormat, match="schema 3, and this version reads up to 2") as caught:
        Manifest.from_json(raw, where="x")
    assert "version" in caught.value.hint


def test_another_kind_and_no_json_at_all() -> None:
    with pytest.raises(UnknownFormat, match=r"'easyckpt.latest' and has to be 'easyckpt.manifest'"):
        Manifest.from_json(LatestHint(step=1, generation=1, manifest="m").to_json(), where="x")
    nested = b'{"kind":' + b"[" * 100_000
    for raw in (
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"kind":"easyckpt.manifest"}',
        b"\0" * 100,
        nested,
    ):
        with pytest.raises(CorruptCheckpoint, match="JSON"):
            Manifest.from_json(raw, where="x")


def test_fields_of_tomorrow_are_ignored() -> None:
    raw = resigned(make_manifest(), put("colour", value="green"))
    assert Manifest.from_json(raw, where="x") == make_manifest()


def test_an_index_that_is_too_long_is_not_read() -> None:
    storage = MemoryStorage()
    storage.write_durable("manifests/x", b" " * 1001)
    with pytest.raises(CorruptCheckpoint, match="1000 bytes"):
        read_index(storage, "manifests/x", bytes_max=1000)
    with pytest.raises(StorageMissing):
        read_index(storage, "manifests/y", bytes_max=1000)


def test_own_mistakes_are_refused_when_made() -> None:
    for changes in ({"step": -1}, {"world_size": 3}, {"run_id": ""}, {"created_unix_s": float("nan")}):
        with pytest.raises(ValueError):
            make_manifest(**changes)
    with pytest.raises(ValueError, match="newer"):
        Tombstone(
            run_id="r", step=5, generation=1, by_generation=1, anchor_step=4, anchor_generation=1,
            created_unix_s=0.0,
        )  # fmt: skip


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_manifest().step = 5  # type: ignore[misc]


@pytest.mark.parametrize(("step", "generation"), [(0, 1), (100, 3), (10**13, 10**9)])
def test_names_are_read_back(step: int, generation: int) -> None:
    name = StepName(step=step, generation=generation)
    assert parse_manifest(manifest_path(name)) == name
    assert parse_generation(generation_path(generation)) == generation
    tombstone = parse_tombstone(tombstone_path(name, by_generation=7))
    assert tombstone is not None
    assert (tombstone.target, tombstone.by_generation) == (name, 7)
    body = parse_data(body_path(name, node_rank=2, rank=17))
    assert body is not None
    assert (body.name, body.node_rank, body.rank) == (name, 2, 17)
    fragment = parse_data(fragment_path(name, node_rank=2))
    assert fragment is not None
    assert (fragment.name, fragment.node_rank, fragment.rank) == (name, 2, None)


def test_only_exact_names_count() -> None:
    for path in (
        "manifests/s100-g3.json",
        "manifests/s0000000000100-g00000003.json",
        "manifests/s000000000100-g00000003.json.bak",
        "manifests/x/s000000000100-g00000003.json",
        "manifests/s٠٠٠٠٠٠٠٠٠١٠٠-g00000003.json",
        "manifests/s000000000100-g00000003.json\n",
    ):
        assert parse_manifest(path) is None
    assert parse_generation("generations/3.json") is None
    assert parse_data("data/g00000001/s000000000001/node00000/model.safetensors") is None


def test_digests_of_chunks_and_of_the_whole() -> None:
    body = memoryview(bytes(range(256)) * 10_000)
    digest = digest_body(body, chunk_bytes=1_000_000)
    assert digest.whole == bytes_digest(b"".join(bytes.fromhex(chunk) for chunk in digest.chunks))
    assert digest.chunks == tuple(
        bytes_digest(body[at : at + 1_000_000]) for at in range(0, 2_560_000, 1_000_000)
    )
    assert digest_body(memoryview(b"")).chunks == ()
    assert HASH_CHUNK_BYTES == 64 << 20


def test_layout_record_keeps_the_headers_length() -> None:
    layout = sample_layout(0, 1)
    record = LayoutRecord.of(layout)
    assert record.header_bytes == len(layout.header)
    again = LayoutRecord.from_plain(msgspec.json.decode(msgspec.json.encode(record.to_plain())), where="x")
    assert again == record


def test_piece_records_prove_themselves() -> None:
    with pytest.raises(ValueError, match="instead of 2"):
        PieceRecord(
            rank=0, file="f", bytes=HASH_CHUNK_BYTES + 1, digest="0" * 32, hash_chunk_bytes=HASH_CHUNK_BYTES,
            chunk_hashes=("0" * 32,), layout="0" * 32,
        )  # fmt: skip


def header_of(table: object) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} | changes


HOSTILE_HEADERS = {
    "overlap": {"a": entry(0, 60), "b": entry(50, 100)},
    "gap": {"a": entry(0, 40), "b": entry(50, 100)},
    "too short": {"a": entry(0, 99)},
    "too long": {"a": entry(0, 101)},
    "backwards": {"a": entry(0, 100), "b": {"dtype": "U8", "shape": [-10], "data_offsets": [100, 90]}},
    "unknown type": {"a": entry(0, 100, dtype="F7")},
    "shape that is not the length": {"a": entry(0, 100, shape=[101])},
    "shape that overflows": {"a": entry(0, 100, shape=[1 << 62, 1 << 62])},
    "fractions": {"a": entry(0, 100, data_offsets=[0, 100.0])},
    "truth": {"a": entry(0, 100, data_offsets=[False, 100])},
    "no offsets": {"a": {"dtype": "U8", "shape": [100]}},
    "no object": [1, 2],
    "text": "x",
    "twice": b'{"a":{"dtype":"U8","shape":[100],"data_offsets":[0,100]},"a":{}}',
    "not JSON": b"{",
    "not text": b"\xff\xff\xff",
    "deep": b"[" * 50_000,
}


@pytest.mark.parametrize("table", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_hostile_body_header(table: object) -> None:
    header = header_of(table)
    with pytest.raises(CorruptCheckpoint, match=r"body.safetensors"):
        parse_header(header, body_bytes=len(header) + 100, where="body.safetensors")


def test_oversized_header_is_refused_before_it_is_read() -> None:
    for length in (100_000_001, 1 << 63, 93):
        first = length.to_bytes(8, "little")
        with pytest.raises(CorruptCheckpoint, match="claims"):
            parse_header(first, body_bytes=100, where="x")
    with pytest.raises(CorruptCheckpoint, match="too short"):
        parse_header(b"\0" * 7, body_bytes=7, where="x")


def test_own_bodies_have_sound_headers() -> None:
    layout = sample_layout(1, 2)
    body = sample_body(layout, seed=1)
    header = parse_header(bytes(body), body_bytes=len(body), where="x")
    assert header.data_begin == len(layout.header)
    assert {entry.key for entry in header.entries} >= {"model.weight", "model.bias", "__state__"}


def schema_1(fragment: Fragment, bodies: dict[int, bytes]) -> bytes:
    """The same fragment as the version before wrote it: the digest is the hash of the whole body."""
    fields = json.loads(fragment.to_json())
    for piece in fields["pieces"]:
        piece["digest"] = bytes_digest(bodies[piece["rank"]])
    raw = json.dumps(fields | {"schema": 1, "checksum": "0" * 32}).encode()
    return raw.replace(b"0" * 32, bytes_digest(raw).encode(), 1)


def test_a_fragment_of_schema_1_is_read() -> None:
    """With the digest that the same bytes have now, so that memory and older storage can be compared."""
    run = SampleRun(storage=MemoryStorage(), ranks_per_node=2)
    run.begin(3)
    (ref,) = run.persist(100)
    new = Fragment.from_json(run.storage.read(ref.file), where="x")
    bodies = {rank: bytes(body) for rank, body in enumerate(run.bodies[100, 3])}
    assert Fragment.from_json(schema_1(new, bodies), where="x") == new
    hostile = schema_1(new, bodies).replace(new.pieces[0].chunk_hashes[0].encode(), b"z" * 32)
    with pytest.raises(CorruptCheckpoint):
        Fragment.from_json(hostile, where="x")


def test_a_digest_that_is_not_that_of_the_chunks_is_refused() -> None:
    raw = resigned(make_fragment(), put("pieces", 0, "digest", value="0" * 32))
    with pytest.raises(CorruptCheckpoint, match="not that of its chunk hashes"):
        Fragment.from_json(raw, where="x")
