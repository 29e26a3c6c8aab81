"""Reading old steps back from time to time, and remembering what was proved when.

Storage decays silently: a step that was good when it was written may not be good when it is needed. A scrub
proves steps whole, those first whose last proof is oldest, until its budget of bytes is used up; called
from a timer it gets through everything in turn. What it found stands in ``scrub.json``, for `easyckpt ls`
and for people; no reader decides by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

from easyckpt.envelope import decode, encode, read_index
from easyckpt.errors import CheckpointFault, StorageMissing
from easyckpt.paths import SCRUB_PATH, StepName
from easyckpt.records import SMALL_BYTES_MAX, check_number, check_wall_time
from easyckpt.storage.base import Storage
from easyckpt.survey import VisibleStep, survey
from easyckpt.verify import StepVerdict, verify_step

__all__ = ["Proof", "ScrubRecord", "read_proofs", "scrub"]

PROOFS_MAX = 300
"""Newest steps that are remembered; the record stays below its size limit."""

VERDICTS = ("good", "damaged", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What reading one step back found."""

    step: int
    generation: int
    verdict: str
    """``good``, ``damaged``, or ``unknown`` where the storage refused."""
    bytes: int
    unix_s: float

    def __post_init__(self) -> None:
        check_number(self.step, "step")
        check_number(self.generation, "generation", least=1)
        check_number(self.bytes, "bytes", most=1 << 60)
        check_wall_time(self.unix_s, "unix_s")
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {str(self.verdict)[:20]!r} is none of {', '.join(VERDICTS)}")

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubRecord:
    """``scrub.json``."""

    KIND: ClassVar[str] = "easyckpt.scrub"

    proofs: tuple[Proof, ...]
    """Newest step first."""

    def __post_init__(self) -> None:
        if len(self.proofs) > PROOFS_MAX:
            raise ValueError(f"{len(self.proofs)} proofs, more than {PROOFS_MAX}")

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self), pretty=False)

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> ScrubRecord:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)


def read_proofs(storage: Storage) -> dict[StepName, Proof]:
    """What earlier scrubs found; nothing if there was none, or its record is damaged.

    Raises:
        StorageError: the storage refuses.
    """
    try:
        raw = read_index(storage, SCRUB_PATH, bytes_max=SMALL_BYTES_MAX)
        record = ScrubRecord.from_json(raw, where=storage.where(SCRUB_PATH))
    except (StorageMissing, CheckpointFault):
        return {}
    return {proof.name: proof for proof in record.proofs}


def scrub(
    storage: Storage,
    *,
    now_unix_s: float,
    byte_budget: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> tuple[StepVerdict, ...]:
    """Prove steps whole, the longest unproved first, and record what was found.

    Args:
        storage: the folder.
        now_unix_s: wall time.
        byte_budget: no further step is begun once so much was read; None proves all.
        on_bytes: told (proved so far, to be proved) of the step at hand.

    Returns:
        A verdict for each step that was read.

    Raises:
        CheckpointFault: the folder's own record is damaged.
        StorageError: the storage refuses as a whole.
    """
    found = survey(storage)
    proofs = read_proofs(storage)
    verdicts: list[StepVerdict] = []
    used = 0
    for item in _in_turn(found.visible, proofs):
        if byte_budget is not None and used >= byte_budget:
            break
        verdict = verify_step(storage, item.manifest, on_bytes=on_bytes)
        used += max(verdict.bytes_proved, 1)
        verdicts.append(verdict)
        word = "unknown" if verdict.is_unknown else "good" if verdict.is_good else "damaged"
        proofs[item.name] = Proof(
            step=item.step,
            generation=item.generation,
            verdict=word,
            bytes=verdict.bytes_proved,
            unix_s=now_unix_s,
        )
        _record(storage, proofs, {step.name for step in found.visible})
    return tuple(verdicts)


def _in_turn(steps: tuple[VisibleStep, ...], proofs: dict[StepName, Proof]) -> list[VisibleStep]:
    """The longest unproved first; of those never proved the newest first."""

    def age(item: VisibleStep) -> float:
        return proofs[item.name].unix_s if item.name in proofs else -1.0

    return sorted(steps, key=age)  # a stable sort: visible steps come newest first


def _record(storage: Storage, proofs: dict[StepName, Proof], there: set[StepName]) -> None:
    """After each step: what a scrub that is interrupted has done is not done again."""
    kept = sorted((name for name in proofs if name in there), reverse=True)[:PROOFS_MAX]
    record = ScrubRecord(proofs=tuple(proofs[name] for name in kept))
    storage.write_durable(SCRUB_PATH, record.to_json())
