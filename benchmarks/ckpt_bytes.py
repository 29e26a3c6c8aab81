"""The bytes of a checkpoint against the limits of the machine, all in one run.

    python benchmarks/ckpt_bytes.py --gb 1 --ranks 2 --folder /path/on/the/disk

Limits: one copy of a rank's bytes, one xxh3-128 pass over them, an O_DIRECT write of fresh files with a sync,
an O_DIRECT read. Paths: what the saver does with sealed slots, through the same functions. Each repeat
measures limits and paths right after each other, since a disk that is lent by the second is not the same disk
a minute later; ratios are medians over repeats, and `needs` says what they have to be. Processor time is that
of this process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from easyckpt.digest import digest_body
from easyckpt.layout import ChunkSpec, Layout, build_layout, encode_layout
from easyckpt.manifest import FragmentRef, Manifest
from easyckpt.read import LocatedPiece
from easyckpt.saver.disk import Layouts, Life, Vault
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.protocol import Held, Key
from easyckpt.slots import map_private
from easyckpt.storage import LocalStorage

TENSORS = 16
SMALL_TENSORS = 100_000
SMALL_ELEMENTS = 256
WRITE_BYTES = 8 << 20
Sample = tuple[float, float]
"""Wall seconds, processor seconds."""


def timed(work: Callable[[], object]) -> Sample:
    """How long it takes."""
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def plain_layout(count: int, elements: int) -> Layout:
    """So many float32 tensors."""
    shape = (elements,)
    names = [f"model.layer{number}" for number in range(count)]
    return build_layout(
        [ChunkSpec(name=n, dtype="float32", global_shape=shape, offsets=(0,), sizes=shape) for n in names],
        state_bytes=16 << 10,
    )


def sealed(holdings: Holdings, layout: Layout, rank: int, ranks: int) -> Piece:
    """A slot with random bytes, sealed."""
    held = Held(key=Key(1, 1), rank=rank, world_size=ranks, digest="")
    wire = encode_layout(layout)
    piece = holdings.place(held, layout=wire, body_bytes=layout.body_bytes, protect=())
    view = piece.body
    block = os.urandom(1 << 20)
    for at in range(0, len(view), len(block)):
        view[at : at + len(block)] = block[: len(view) - at]
    view[: len(layout.header)] = layout.header
    piece.seal(digest_body(view))
    return piece


def direct_write(path: Path, view: memoryview) -> None:
    """The limit: one thread, one file."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
    for at in range(0, len(view), WRITE_BYTES):
        os.pwrite(fd, view[at : at + WRITE_BYTES], at)
    os.fsync(fd)
    os.close(fd)


def direct_read(path: Path, view: memoryview) -> None:
    """The limit: one thread, one file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for at in range(0, len(view), WRITE_BYTES):
        os.preadv(fd, [view[at : at + WRITE_BYTES]], at)
    os.close(fd)


def forget(folder: Path) -> None:
    """Have the page cache hold nothing of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Bench:
    """All measurements; each rank's buffers are made once, as slots are."""

    def __init__(self, folder: Path, *, gb: float, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        layout = plain_layout(TENSORS, int(gb * 1e9 / 4 / TENSORS))
        self.holdings = Holdings()
        self.pieces = tuple(sealed(self.holdings, layout, rank, ranks) for rank in range(ranks))
        self.bytes = layout.body_bytes * ranks
        self.rooms = [memoryview(mmap.mmap(-1, layout.body_bytes)) for _ in range(ranks)]
        self.layouts = Layouts()
        self.ref: FragmentRef
        self.samples: dict[str, list[Sample]] = {}
        self._threads = ThreadPoolExecutor(ranks)

    def note(self, name: str, work: Callable[[], object]) -> None:
        """Measure once."""
        self.samples.setdefault(name, []).append(timed(work))

    def each(self, work: Callable[[int], object]) -> Callable[[], object]:
        """The same for every rank, beside each other."""
        return lambda: list(self._threads.map(work, range(self.ranks)))

    def _copy(self, source: memoryview, rank: int) -> None:
        tensor = torch.frombuffer(source, dtype=torch.uint8)
        torch.frombuffer(self.rooms[rank], dtype=torch.uint8).copy_(tensor)

    def limits(self) -> None:
        """What the machine can do."""
        self.note("memcpy", self.each(lambda rank: self._copy(self.pieces[rank].body, rank)))
        self.note("xxh3-128", self.each(lambda rank: xxhash.xxh3_128_digest(self.pieces[rank].body)))
        paths = [self.folder / f"limit.{rank}" for rank in range(self.ranks)]
        self.note("O_DIRECT write", self.each(lambda rank: direct_write(paths[rank], self.pieces[rank].body)))
        self.note("O_DIRECT read", self.each(lambda rank: direct_read(paths[rank], self.rooms[rank])))
        for path in paths:
            path.unlink()

    def paths(self, turn: int) -> None:
        """What the saver does."""
        root = self.folder / f"run{turn}"
        vault = Vault(str(root), layouts=self.layouts)
        life = Life(run_id="bench", generation=1, resumed_step=None)
        self.note("seal", self.each(lambda rank: digest_body(self.pieces[rank].body)))
        self.note("sealed to durable", lambda: self._persist(vault, life))
        store = LocalStorage(root)
        files = sorted(entry.path for entry in store.list("data/") if entry.path.endswith(".safetensors"))
        located = self._locate(vault)
        self.note("load, cold cache", self.each(lambda rank: vault.load(located[rank], self.rooms[rank])))
        for path in files:  # a warm cache: what a copy of the folder leaves behind
            with open(root / path, "rb") as file:
                while file.read(16 << 20):
                    pass
        self.note("load, warm cache", self.each(lambda rank: vault.load(located[rank], self.rooms[rank])))
        self.note("load, memory", self.each(self._load_memory))
        forget(root)
        shutil.rmtree(root)

    def _persist(self, vault: Vault, life: Life) -> None:
        self.ref = vault.persist(self.pieces, life=life, node_rank=0, step=1)

    def _locate(self, vault: Vault) -> list[LocatedPiece]:
        manifest = Manifest(
            run_id="bench",
            generation=1,
            step=1,
            world_size=self.ranks,
            resumed_step=None,
            fragments=(self.ref,),
            created_unix_s=1.0,
            software="bench",
        )
        return [vault.locate(manifest, rank) for rank in range(self.ranks)]

    def _load_memory(self, rank: int) -> None:
        """As a restarted worker does: the saver proves the slot, the worker maps and copies it."""
        piece = self.pieces[rank]
        assert digest_body(piece.body).whole == piece.digest
        mapped = map_private(piece.slot.fd, piece.slot.capacity)
        self._copy(memoryview(mapped)[: piece.body_bytes], rank)

    def small(self) -> dict[str, float]:
        """Many small tensors: what a later persist costs, beyond its bytes, per tensor."""
        layout = plain_layout(SMALL_TENSORS, SMALL_ELEMENTS)
        piece = sealed(self.holdings, layout, self.ranks, self.ranks + 1)
        vault = Vault(str(self.folder / "small"), layouts=self.layouts)
        life = Life(run_id="bench", generation=1, resumed_step=None)
        times = [
            timed(lambda step=step: vault.persist((piece,), life=life, node_rank=0, step=step))  # type: ignore[misc]
            for step in range(3)
        ]
        shutil.rmtree(self.folder / "small")
        return {
            "first_processor_us_per_tensor": times[0][1] / SMALL_TENSORS * 1e6,
            "later_processor_us_per_tensor": times[-1][1] / SMALL_TENSORS * 1e6,
            "body_mb": layout.body_bytes / 1e6,
        }


def report(bench: Bench, small: dict[str, float]) -> dict:
    """Medians, and the ratios that matter."""
    wall = {name: statistics.median(sample[0] for sample in found) for name, found in bench.samples.items()}
    processor = {
        name: statistics.median(sample[1] for sample in found) for name, found in bench.samples.items()
    }

    def median_of(ratio: Callable[[int], float]) -> float:
        return statistics.median(ratio(turn) for turn in range(len(bench.samples["memcpy"])))

    def at(name: str, turn: int, which: int = 0) -> float:
        return bench.samples[name][turn][which]

    def ratio(over: tuple[str, ...], under: tuple[str, ...], *, copies: float = 1.0, which: int = 0) -> float:
        def total(names: tuple[str, ...], turn: int) -> float:
            return sum(at(name, turn, which) * (copies if name == "memcpy" else 1.0) for name in names)

        return median_of(lambda turn: total(over, turn) / total(under, turn))

    copied = ("memcpy", "xxh3-128")
    needs: dict[str, tuple[float, str]] = {
        "durable rate / O_DIRECT write": (ratio(("O_DIRECT write",), ("sealed to durable",)), "≥ 0.8"),
        "cold load rate / O_DIRECT read": (ratio(("O_DIRECT read",), ("load, cold cache",)), "≥ 0.8"),
        "warm load / (memcpy + digest)": (ratio(("load, warm cache",), copied), "about 1"),
        "memory load / (1.3 memcpy + digest)": (ratio(("load, memory",), copied, copies=1.3), "≤ 1"),
        "processor of copy, seal and persist / of the limits": (
            ratio(("memcpy", "seal", "sealed to durable"), (*copied, "O_DIRECT write"), which=1),
            "≤ 1.5",
        ),
    }
    return {
        "schema": 1,
        "bytes": bench.bytes,
        "ranks": bench.ranks,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "seconds": {name: round(value, 4) for name, value in wall.items()},
        "processor_s": {name: round(value, 4) for name, value in processor.items()},
        "gb_per_s": {name: round(bench.bytes / value / 1e9, 2) for name, value in wall.items()},
        "ratios": {name: {"ratio": round(value, 3), "needs": text} for name, (value, text) in needs.items()},
        "small_tensors": {name: round(value, 3) for name, value in small.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=0.5, help="per rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", default=None, help="on the disk to be measured; a temporary one by default"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ckpt-bytes-", dir=arguments.folder) as name:
        bench = Bench(Path(name), gb=arguments.gb, ranks=arguments.ranks)
        for turn in range(arguments.repeats):
            bench.limits()
            bench.paths(turn)
        found = report(bench, bench.small())
        bench.holdings.close()
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(f"{'':24}{'GB/s':>8}{'wall s':>9}{'processor s':>13}")
    for path in found["seconds"]:
        print(
            f"{path:24}{found['gb_per_s'][path]:8.2f}{found['seconds'][path]:9.3f}{found['processor_s'][path]:13.3f}"
        )
    print()
    for ratio, entry in found["ratios"].items():
        print(f"{ratio:58}{entry['ratio']:8.3f}   needs {entry['needs']}")
    for small, value in found["small_tensors"].items():
        print(f"{small:58}{value:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
