"""The format's document is enough: the reader in it is run on real checkpoints, with nothing of ours."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.commit import commit_manifest
from easyckpt.digest import bytes_digest, digest_body
from easyckpt.layout import DTYPE_BYTES, ChunkKind, ChunkSpec, build_layout
from easyckpt.paths import LATEST_PATH
from easyckpt.read import load_piece
from easyckpt.retention import KeepLatest, PruneOptions, prune_report
from easyckpt.saver.persist import PieceMeta, make_fragment, persist_piece, write_fragment
from easyckpt.storage import LocalStorage
from easyckpt.survey import visible_steps
from easyckpt.testing import SampleRun
from easyckpt.testing.sample import sample_body, sample_layout
from easyckpt.verify import verify_step

DOCUMENT = Path(__file__).parents[2] / "docs/explain/checkpoint-format.md"
LINES_MAX = 125


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (text,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)
    path = tmp_path_factory.mktemp("reader") / "reader.py"
    path.write_text(text)
    return path


def read(reader: Path, root: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-I", str(reader), root], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_reader_is_short_and_knows_nothing_of_ours(reader: Path) -> None:
    text = reader.read_text()
    names = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert names <= {"json", "os", "struct", "sys", "safetensors", "xxhash"}
    assert "ImportFrom" not in {type(node).__name__ for node in ast.walk(ast.parse(text))}
    assert len([line for line in text.splitlines() if line.strip()]) <= 100
    assert len(text.splitlines()) <= LINES_MAX


def logical(step: int, name: str, shape: tuple[int, ...], dtype: str) -> bytes:
    """What `sample_body` puts into a tensor that no rank has cut."""
    spec = ChunkSpec(name=name, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape)
    layout = build_layout([spec], state_bytes=0)
    return bytes(sample_body(layout, seed=step, state=b"")[layout.chunks[0].begin : layout.chunks[0].end])


def test_it_reads_the_newest_step(reader: Path, tmp_path: Path) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path), nodes=2, ranks_per_node=2)
    run.begin(1)
    for step in (10, 20):
        run.save(step)
    found = read(reader, str(tmp_path))
    assert found["step"] == 20
    assert found["tensors"] == {
        "model.weight": ["float32", [40, 50], bytes_digest(logical(20, "model.weight", (40, 50), "float32"))],
        "model.tied": ["float32", [40, 50], bytes_digest(logical(20, "model.weight", (40, 50), "float32"))],
        "model.bias": ["bfloat16", [7], bytes_digest(logical(20, "model.bias", (7,), "bfloat16"))],
        "optimizer.moments": [
            "float32", [3000], bytes_digest(logical(20, "optimizer.moments", (3000,), "float32"))
        ],
    }  # fmt: skip
    assert found["states"] == {str(rank): bytes_digest(b"\x80" + bytes([rank])) for rank in range(4)}


def test_it_agrees_on_which_steps_count(reader: Path, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run = SampleRun(storage=storage)

    def agree(expected: int) -> None:
        assert read(reader, str(tmp_path))["step"] == expected == visible_steps(storage)[0].step

    run.begin(1)
    for step in (10, 20, 30, 40):
        run.save(step)
    run.persist(50)
    agree(40)
    options = PruneOptions(grace_s=1e9)
    prune_report(storage, keep=KeepLatest(1), generation=1, now_unix_s=2e9, options=options)
    assert [step.step for step in visible_steps(storage)] == [40]
    run.begin(2, resumed_step=30)
    agree(30)  # 40 was left behind, and with it the reason to take 30 back
    run.save(35)
    storage.write_durable(LATEST_PATH, b"nonsense")
    agree(35)
    run.begin(3, resumed_step=None)
    run.save(5)
    agree(5)


def test_a_folder_of_the_version_before_is_read_by_both(reader: Path, tmp_path: Path) -> None:
    """Schema 1, as it stands in folders that are there: the digest of a piece was the hash of its body."""
    storage = LocalStorage(tmp_path)
    run = SampleRun(storage=storage, ranks_per_node=2)
    run.begin(1)
    (ref,) = run.persist(10)
    fields = json.loads(storage.read(ref.file))
    for piece in fields["pieces"]:
        piece["digest"] = bytes_digest(run.bodies[10, 1][piece["rank"]])
    raw = json.dumps(fields | {"schema": 1, "checksum": "0" * 32}).encode()
    raw = raw.replace(b"0" * 32, bytes_digest(raw).encode(), 1)
    storage.write_durable(ref.file, raw)
    old = dataclasses.replace(ref, bytes=len(raw), hash=bytes_digest(raw))
    assert commit_manifest(storage, run.manifest(10, [old])).is_visible
    found = read(reader, str(tmp_path))
    assert found["step"] == 10
    assert set(found["states"]) == {"0", "1"}
    (visible,) = visible_steps(storage)
    assert verify_step(storage, visible.manifest).is_good
    for rank in range(2):
        into = bytearray(len(run.bodies[10, 1][rank]))
        load_piece(storage, visible.manifest, rank=rank, into=memoryview(into))
        assert into == run.bodies[10, 1][rank]


def test_it_reads_bytes_that_are_stored_once(reader: Path, tmp_path: Path) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path), ranks_per_node=2)
    run.begin(1)
    layout = sample_layout(0, 1)
    pairs = []
    for rank in range(2):
        body = sample_body(layout, seed=9, state=b"\x80" + bytes([rank]))
        meta = PieceMeta(
            generation=1, step=10, node_rank=0, rank=rank, layout=layout, seal=digest_body(memoryview(body)),
            stored_by=(0, 1) if rank == 0 else None,
        )  # fmt: skip
        pairs.append((meta, persist_piece(run.storage, body=memoryview(body), piece=meta)))
    ref = write_fragment(run.storage, make_fragment(pairs, run_id=run.run_id, world_size=2))
    assert commit_manifest(run.storage, run.manifest(10, [ref])).is_visible
    found = read(reader, str(tmp_path))
    assert found["states"] == {str(rank): bytes_digest(b"\x80" + bytes([rank])) for rank in range(2)}
    assert found["tensors"]["model.weight"][2] == bytes_digest(
        logical(9, "model.weight", (40, 50), "float32")
    )


@pytest.mark.parametrize("what", ["body", "fragment", "manifest"])
def test_it_refuses_damage(reader: Path, tmp_path: Path, what: str) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path))
    run.begin(1)
    run.save(10)
    pattern = {"body": "data/**/*.safetensors", "fragment": "data/**/*.json", "manifest": "manifests/*.json"}
    (path,) = tmp_path.glob(pattern[what])
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    done = subprocess.run(
        [sys.executable, "-I", str(reader), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert "damaged" in done.stderr or "JSON" in done.stderr or "codec" in done.stderr


shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(["float32", "bfloat16", "bool", "complex64", "float64"]),
)
def test_boxes_and_ranges_of_every_shape(
    reader: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple, dtype: str
) -> None:
    """A logical tensor cut into two ranks, as a box along some dimension or as flat ranges."""
    tmp_path = tmp_path_factory.mktemp("boxes")
    count = math.prod(shape)
    whole = bytes((7 * number + 3) % 251 for number in range(count * DTYPE_BYTES[dtype]))
    flat = not shape or data.draw(st.booleans(), label="flat")
    if flat:
        cut = data.draw(st.integers(0, count), label="cut")
        parts = [((0,), (cut,)), ((cut,), (count - cut,))]
    else:
        dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
        cut = data.draw(st.integers(0, shape[dim]), label="cut")
        first = tuple(cut if at == dim else length for at, length in enumerate(shape))
        second = tuple(shape[dim] - cut if at == dim else length for at, length in enumerate(shape))
        begin = tuple(cut if at == dim else 0 for at in range(len(shape)))
        parts = [((0,) * len(shape), first), (begin, second)]
    run = SampleRun(storage=LocalStorage(tmp_path), nodes=1, ranks_per_node=2)
    run.begin(1)
    pairs = []
    for rank, (offsets, sizes) in enumerate(parts):
        spec = ChunkSpec(
            name="t", dtype=dtype, global_shape=shape, offsets=offsets, sizes=sizes,
            kind=ChunkKind.FLAT if flat else ChunkKind.BOX,
        )  # fmt: skip
        layout = build_layout([spec], state_bytes=16)
        body = bytearray(layout.body_bytes)
        body[: len(layout.header)] = layout.header
        body[layout.chunks[0].begin : layout.chunks[0].end] = cut_out(whole, shape, spec)
        meta = PieceMeta(
            generation=1, step=1, node_rank=0, rank=rank, layout=layout,
            seal=digest_body(memoryview(body)),
        )  # fmt: skip
        pairs.append((meta, persist_piece(run.storage, body=memoryview(body), piece=meta)))
    fragment = make_fragment(pairs, run_id=run.run_id, world_size=2)
    assert commit_manifest(run.storage, run.manifest(1, [write_fragment(run.storage, fragment)])).is_visible
    module: dict = {"__name__": "reader"}
    exec(compile(reader.read_text(), str(reader), "exec"), module)  # noqa: S102  the document's own program
    _, tensors, _ = module["read"](str(tmp_path))
    assert bytes(tensors["t"][2]) == whole


def cut_out(whole: bytes, shape: tuple[int, ...], spec: ChunkSpec) -> bytes:
    """The chunk's bytes, element by element: slow, and plainly right."""
    size = DTYPE_BYTES[spec.dtype]
    if spec.kind is ChunkKind.FLAT:
        return whole[spec.offsets[0] * size : (spec.offsets[0] + spec.sizes[0]) * size]
    found = bytearray()
    for number in range(math.prod(shape)):
        index, left = [], number
        for length in reversed(shape):
            index.insert(0, left % length)
            left //= length
        inside = all(
            offset <= at < offset + length
            for at, offset, length in zip(index, spec.offsets, spec.sizes, strict=True)
        )
        if inside:
            found += whole[number * size : (number + 1) * size]
    return bytes(found)
