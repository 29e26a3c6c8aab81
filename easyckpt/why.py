"""Why a step can, or cannot, be loaded: every reason that the folder itself knows.

A step that was never committed leaves data without a manifest; then the fragments that are there tell which
ranks never finished. A step that is there and not offered was fenced, taken back, or damaged. A step that is
offered is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from easyckpt.envelope import read_index
from easyckpt.errors import EasyckptError
from easyckpt.manifest import FRAGMENT_BYTES_MAX, Fragment
from easyckpt.paths import DATA_FOLDER, StepName, parse_data
from easyckpt.storage.base import Entry, Storage
from easyckpt.survey import Survey, survey
from easyckpt.verify import verify_step

__all__ = ["Answer", "Reason", "ReasonKind", "explain_step"]


class ReasonKind(Enum):
    """One reason, for programs. The hidden reasons of `easyckpt.survey` and the findings of a read-back stand
    under their own words."""

    GOOD = "good"
    NEVER_SAVED = "never_saved"
    NEVER_COMMITTED = "never_committed"
    FENCED = "fenced"
    FENCE_UNREADABLE = "fence_unreadable"
    TAKEN_BACK = "taken_back"
    CORRUPT = "corrupt"
    UNKNOWN_FORMAT = "unknown_format"
    OTHER_RUN = "other_run"
    UNREADABLE = "unreadable"
    SET_ASIDE = "set_aside"
    MISSING = "missing"
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why, where, and of which generation."""

    kind: ReasonKind
    generation: int | None
    where: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is known of one step."""

    step: int
    loadable: bool
    reasons: tuple[Reason, ...]
    others: tuple[int, ...]
    """Steps that are offered, newest first, without this one."""

    @property
    def is_unknown(self) -> bool:
        """Neither proved good nor proved bad: the storage refuses."""
        return not self.loadable and all(reason.kind is ReasonKind.UNREADABLE for reason in self.reasons)


def explain_step(
    storage: Storage,
    step: int,
    *,
    byte_budget: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Answer:
    """Collect all reasons.

    Args:
        storage: the folder.
        step: which step.
        byte_budget: how much to read of a step that is offered; None reads all.
        on_bytes: told (proved so far, to be proved).

    Raises:
        CheckpointFault: the folder's own record is damaged.
        StorageError: the storage refuses as a whole.
    """
    found = survey(storage)
    reasons: list[Reason] = []
    loadable = False
    for item in found.visible:
        if item.step != step:
            continue
        verdict = verify_step(storage, item.manifest, byte_budget=byte_budget, on_bytes=on_bytes)
        for finding in verdict.findings:
            reasons.append(
                Reason(
                    kind=ReasonKind(finding.kind.value),
                    generation=item.generation,
                    where=finding.where,
                    detail=finding.detail,
                )
            )
        if verdict.is_good:
            loadable = True
            read = "every byte" if verdict.is_whole else "a part of its bytes"
            detail = f"{read} was read back and matches its hash"
            reasons.append(_reason(ReasonKind.GOOD, item.generation, storage.where(item.path), detail))
    for hidden in found.hidden:
        if hidden.name.step == step:
            kind = ReasonKind(hidden.reason.value)
            reasons.append(_reason(kind, hidden.name.generation, storage.where(hidden.path), hidden.detail))
    reasons += _uncommitted(storage, step, found)
    if not reasons:
        detail = "nothing of this step is here"
        reasons.append(_reason(ReasonKind.NEVER_SAVED, None, storage.where(), detail))
    others = tuple(dict.fromkeys(item.step for item in found.visible if item.step != step))
    return Answer(step=step, loadable=loadable, reasons=tuple(reasons), others=others)


def _reason(kind: ReasonKind, generation: int | None, where: str, detail: str) -> Reason:
    return Reason(kind=kind, generation=generation, where=where, detail=detail)


def _uncommitted(storage: Storage, step: int, found: Survey) -> list[Reason]:
    committed = {item.name for item in found.visible} | {item.name for item in found.hidden}
    data: dict[StepName, list[Entry]] = {}
    for entry in storage.list(DATA_FOLDER):
        parsed = parse_data(entry.path)
        if parsed is not None and parsed.name.step == step and parsed.name not in committed:
            data.setdefault(parsed.name, []).append(entry)
    return [
        _reason(
            ReasonKind.NEVER_COMMITTED,
            name.generation,
            storage.where(entries[0].path),
            _what_is_there(storage, entries),
        )
        for name, entries in sorted(data.items(), reverse=True)
    ]


def _what_is_there(storage: Storage, entries: list[Entry]) -> str:
    """Which ranks finished, as far as the fragments tell."""
    done: set[int] = set()
    world_size = 0
    for entry in entries:
        parsed = parse_data(entry.path)
        if parsed is None or parsed.rank is not None:
            continue
        try:
            raw = read_index(storage, entry.path, bytes_max=FRAGMENT_BYTES_MAX)
            fragment = Fragment.from_json(raw, where=storage.where(entry.path))
        except EasyckptError:
            continue  # a fragment that cannot be read tells nothing of who finished
        world_size = max(world_size, fragment.world_size)
        done |= {piece.rank for piece in fragment.pieces}
    if not world_size:
        return "it was never committed: bodies are there, and no node finished"
    missing = sorted(set(range(world_size)) - done)
    if not missing:
        return "all ranks finished, and it was never committed: the committer ended before, or was replaced"
    named = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
    return f"it was never committed: {len(missing)} of {world_size} ranks did not finish ({named})"
