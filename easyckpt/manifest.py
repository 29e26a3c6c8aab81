"""What a stored step consists of: pieces (one rank each), fragments (one node each), the manifest (all).

::

    manifest ──hash of each──▶ fragment ──hash of each 64 MiB──▶ body (a safetensors file)

A fragment is written when all bodies of its node are durable; the manifest when all fragments are. A step
exists if and only if its manifest does. So whoever sees a manifest can prove every byte below it.

Paths inside an index file are never followed blindly: in this schema every path has to be the one that its
step, generation, node and rank give, so that an index cannot point outside its own step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from easyckpt.envelope import SCHEMA, decode, encode
from easyckpt.fragment import (
    FRAGMENT_BYTES_MAX,
    RANKS_MAX,
    Fragment,
    FragmentHead,
    FragmentRef,
    LayoutRecord,
    PieceRecord,
)
from easyckpt.paths import StepName, fragment_path
from easyckpt.records import GenerationRecord, check_number, check_text, check_wall_time

__all__ = [
    "FRAGMENT_BYTES_MAX",
    "MANIFEST_BYTES_MAX",
    "SCHEMA",
    "Fragment",
    "FragmentHead",
    "FragmentRef",
    "GenerationRecord",
    "LayoutRecord",
    "Manifest",
    "PieceRecord",
]

METRICS_MAX = 100

MANIFEST_BYTES_MAX = 256 << 20
"""About 100 bytes per rank and 250 per node; a million ranks fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed step: which fragments make it, and how to prove them."""

    KIND: ClassVar[str] = "easyckpt.manifest"

    run_id: str
    generation: int
    step: int
    world_size: int
    resumed_step: int | None
    """The step that this generation resumed from; None if it began without a checkpoint."""
    fragments: tuple[FragmentRef, ...]
    created_unix_s: float
    software: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """What the caller of save() gave, for example ``{"loss": 1.2}``; retention can keep the best. JSON knows
    neither NaN nor infinity: they become None, which is never the best."""

    def __post_init__(self) -> None:
        check_text(self.run_id, "run_id")
        check_number(self.generation, "generation", least=1)
        check_number(self.step, "step")
        check_number(self.world_size, "world_size", least=1, most=RANKS_MAX)
        if self.resumed_step is not None:
            check_number(self.resumed_step, "resumed_step")
        check_text(self.software, "software", may_be_empty=True)
        check_wall_time(self.created_unix_s, "created_unix_s")
        if len(self.metrics) > METRICS_MAX:
            raise ValueError(f"{len(self.metrics)} metrics, more than {METRICS_MAX}")
        for key in self.metrics:
            check_text(key, "a metric's name")
        finite = {
            key: None if value is None or not math.isfinite(value) else float(value)
            for key, value in self.metrics.items()
        }
        object.__setattr__(self, "metrics", finite)
        self._check_fragments()

    def _check_fragments(self) -> None:
        nodes = [ref.node_rank for ref in self.fragments]
        if nodes != sorted(set(nodes)):
            raise ValueError("the fragments are not in the order of their nodes, or stand twice")
        for ref in self.fragments:
            expected = fragment_path(self.name, node_rank=ref.node_rank)
            if ref.file != expected:
                raise ValueError(
                    f"the fragment of node {ref.node_rank} is {ref.file[:200]!r} instead of {expected!r}"
                )
        ranks = sorted(rank for ref in self.fragments for rank in ref.ranks)
        if len(ranks) != self.world_size or ranks != list(range(self.world_size)):
            raise ValueError(f"the fragments do not hold each of {self.world_size} ranks exactly once")

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)

    def same_content(self, other: Manifest) -> bool:
        """Whether both stand for the same bytes, whoever wrote them and when."""
        return replace(self, created_unix_s=0.0, software="") == replace(
            other, created_unix_s=0.0, software=""
        )

    def ref_of(self, rank: int) -> FragmentRef | None:
        """The fragment that holds a rank."""
        for ref in self.fragments:
            if rank in ref.ranks:
                return ref
        return None

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> Manifest:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)
