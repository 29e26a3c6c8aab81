"""Small, real checkpoints for tests, made by the same functions as large ones."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from easyckpt.commit import CommitResult, commit_manifest, ensure_root, record_generation
from easyckpt.digest import digest_body
from easyckpt.layout import DTYPE_BYTES, ChunkKind, ChunkSpec, Layout, build_layout
from easyckpt.manifest import FragmentRef, Manifest
from easyckpt.records import GenerationRecord, RootRecord
from easyckpt.saver.persist import PieceMeta, make_fragment, persist_piece, write_fragment
from easyckpt.storage.base import Storage

__all__ = ["SampleRun", "sample_body", "sample_layout"]

STATE_LENGTH_BYTES = 8


def sample_layout(rank: int, world_size: int, *, elements: int = 3000) -> Layout:
    """A replicated matrix, a small vector, a tied name, and this rank's flat part of an optimizer's
    moments."""
    part = math.ceil(elements / world_size)
    begin, end = min(rank * part, elements), min((rank + 1) * part, elements)
    shape = (40, 50)
    return build_layout(
        [
            ChunkSpec(name="model.weight", dtype="float32", global_shape=shape, offsets=(0, 0), sizes=shape),
            ChunkSpec(name="model.bias", dtype="bfloat16", global_shape=(7,), offsets=(0,), sizes=(7,)),
            ChunkSpec(
                name="model.tied",
                dtype="float32",
                global_shape=shape,
                offsets=(0, 0),
                sizes=shape,
                alias_of="model.weight",
            ),
            ChunkSpec(
                name="optimizer.moments",
                dtype="float32",
                kind=ChunkKind.FLAT,
                global_shape=(elements,),
                offsets=(begin,),
                sizes=(end - begin,),
            ),
        ],
        state_bytes=64,
    )


def sample_body(layout: Layout, *, seed: int, state: bytes = b"\x80") -> bytearray:
    """A body of that layout with bytes that the seed gives; chunks of one name and place agree over ranks."""
    body = bytearray(layout.body_bytes)
    body[: len(layout.header)] = layout.header
    for chunk in layout.chunks:
        rng = random.Random(f"{seed} {chunk.name}")
        count = math.prod(chunk.global_shape) * DTYPE_BYTES[chunk.dtype]
        logical = rng.randbytes(count)
        skip = chunk.offsets[0] * DTYPE_BYTES[chunk.dtype] if chunk.kind is ChunkKind.FLAT else 0
        if chunk.alias_of is None:
            body[chunk.begin : chunk.end] = logical[skip : skip + chunk.end - chunk.begin]
    at = layout.state_begin + STATE_LENGTH_BYTES
    body[layout.state_begin : at] = len(state).to_bytes(STATE_LENGTH_BYTES, "little")
    body[at : at + len(state)] = state
    return body


@dataclass(slots=True, kw_only=True)
class SampleRun:
    """A run that writes sample checkpoints into a store, as ``nodes`` savers and a committer would.

    Repeating `begin` and `save` with the same arguments repeats what a restarted saver would do.
    """

    storage: Storage
    run_id: str = "sample-run"
    nodes: int = 1
    ranks_per_node: int = 1
    generation: int = 0
    resumed_step: int | None = None
    now_unix_s: float = 1e9
    elements: int = 3000
    software: str = "easyckpt.testing"
    shared: bool = False
    """All ranks hold the same tensors, and rank 0 stores them for all."""
    bodies: dict[tuple[int, int], tuple[bytearray, ...]] = field(default_factory=dict)
    """(step, generation) → the body of each rank, as it was written."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def begin(self, generation: int, *, resumed_step: int | None = None) -> None:
        """Start a life."""
        root = RootRecord(run_id=self.run_id, created_unix_s=self.now_unix_s, software=self.software)
        self.run_id = ensure_root(self.storage, root).run_id
        self.generation, self.resumed_step = generation, resumed_step
        record_generation(
            self.storage,
            GenerationRecord(
                run_id=self.run_id,
                generation=generation,
                resumed_step=resumed_step,
                world_size=self.world_size,
                life=f"life-{generation}",
                created_unix_s=self.now_unix_s,
                software=self.software,
            ),
        )

    def persist(self, step: int, *, seed: int | None = None) -> tuple[FragmentRef, ...]:
        """Write all bodies and fragments of a step, and commit nothing."""
        refs = []
        bodies = []
        for node_rank in range(self.nodes):
            pieces = []
            first = node_rank * self.ranks_per_node
            for rank in range(first, first + self.ranks_per_node):
                place = (0, 1) if self.shared else (rank, self.world_size)
                layout = sample_layout(*place, elements=self.elements)
                body = sample_body(layout, seed=step if seed is None else seed, state=b"\x80" + bytes([rank]))
                meta = PieceMeta(
                    generation=self.generation,
                    step=step,
                    node_rank=node_rank,
                    rank=rank,
                    layout=layout,
                    seal=digest_body(memoryview(body)),
                    stored_by=(0, 0) if self.shared and rank else None,
                )
                bodies.append(body)
                pieces.append((meta, persist_piece(self.storage, body=memoryview(body), piece=meta)))
            fragment = make_fragment(pieces, run_id=self.run_id, world_size=self.world_size)
            refs.append(write_fragment(self.storage, fragment))
        self.bodies[step, self.generation] = tuple(bodies)
        return tuple(refs)

    def manifest(
        self, step: int, refs: Sequence[FragmentRef], *, metrics: Mapping[str, float] | None = None
    ) -> Manifest:
        """The manifest of fragments that `persist` has written."""
        return Manifest(
            run_id=self.run_id,
            generation=self.generation,
            step=step,
            world_size=self.world_size,
            resumed_step=self.resumed_step,
            fragments=tuple(refs),
            created_unix_s=self.now_unix_s,
            software=self.software,
            metrics=dict(metrics or {}),
        )

    def save(
        self, step: int, *, seed: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> CommitResult:
        """Write a step and commit it."""
        refs = self.persist(step, seed=seed)
        return commit_manifest(self.storage, self.manifest(step, refs, metrics=metrics))
