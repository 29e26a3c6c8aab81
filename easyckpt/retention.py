"""Which steps are kept, and how the others go without ever harming what is left.

A policy (`easyckpt.keep`) names the steps that stay; `prune` removes the others.

A step goes in two moves::

    1  take back     a tombstone that names the newer step (anchor) read back before; nothing is deleted
    2  delete        after a grace time: manifest, then bodies and fragments, then the tombstone

* Nothing is taken back before a newer step was read back and found good, and the newest good step stays
  whatever the policy says; so a policy never removes the last one.
* Only the current generation removes, and what a replaced one took back counts only if its reason still
  stands
  (see `easyckpt.survey`).
* A crash between any two operations leaves either a visible step that verifies, or remains that no reader
  looks at and the next `prune` finishes.

Remains of other kinds go after their own, longer grace: data of steps that were never committed, steps that a
newer life left behind, and unfinished writes. Steps hidden because a life *began anew* in a folder that held
checkpoints are never removed by themselves: that may have been a mistake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from easyckpt.commit import next_generation
from easyckpt.errors import StaleGeneration, StorageConflict
from easyckpt.keep import KeepAll, KeepAny, KeepBest, KeepEvery, KeepLatest, KeepPinned, KeepPolicy
from easyckpt.manifest import Manifest
from easyckpt.paths import (
    DATA_FOLDER,
    StepName,
    manifest_path,
    parse_data,
    quarantine_path,
    step_folder,
    tombstone_path,
)
from easyckpt.pins import pinned_steps
from easyckpt.records import Tombstone
from easyckpt.storage.base import Entry, Storage
from easyckpt.survey import HiddenReason, HiddenStep, Survey, fenced_by, survey
from easyckpt.verify import verify_step

__all__ = [
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepPinned",
    "KeepPolicy",
    "PruneOptions",
    "PruneReport",
    "Removed",
    "RemovedKind",
    "prune",
    "prune_report",
]

GRACE_S = 60.0
"""From taking a step back to deleting its bytes: a reader that has begun may finish."""

REMAINS_GRACE_S = 3600.0
"""Age of data without a manifest before it counts as left over; far longer than any persist takes."""

READ_BACK_BYTES = 8 << 30
"""How much of the anchor is read back before older steps may go; up to this size, all of it."""


class RemovedKind(Enum):
    """What went."""

    TAKEN_BACK = "taken_back"  # no longer offered; the bytes are still there
    DELETED = "deleted"  # the bytes of a step that was taken back
    LEFT_BEHIND = "left_behind"  # a step that a newer life does not see
    NEVER_COMMITTED = "never_committed"  # data without a manifest
    UNFINISHED = "unfinished"  # a write that was cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """One thing that went, or would go."""

    kind: RemovedKind
    path: str
    name: StepName | None
    bytes: int
    """Freed by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What `prune_report` did, and what held it back."""

    removed: tuple[Removed, ...]
    kept: tuple[StepName, ...]
    anchor: StepName | None
    """The newest step that was read back and found good."""
    damaged: tuple[StepName, ...]
    """Newer steps than the anchor that were found wanting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """Grace times and effort."""

    grace_s: float = GRACE_S
    remains_grace_s: float = REMAINS_GRACE_S
    read_back_bytes: int | None = READ_BACK_BYTES
    """None reads the anchor whole, however large."""
    dry_run: bool = False


DEFAULT_OPTIONS = PruneOptions()


def prune(
    storage: Storage, *, keep: KeepPolicy, generation: int, now_unix_s: float | None = None
) -> tuple[Removed, ...]:
    """Remove what the policy does not keep. See `prune_report`, which tells more.

    Args:
        storage: the folder.
        keep: what stays.
        generation: ours; has to be the current one.
        now_unix_s: wall time; read from the clock if it is not given.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    return prune_report(storage, keep=keep, generation=generation, now_unix_s=now).removed


def prune_report(
    storage: Storage,
    *,
    keep: KeepPolicy,
    generation: int,
    now_unix_s: float,
    options: PruneOptions = DEFAULT_OPTIONS,
    proved: Collection[StepName] = frozenset(),
    on_bytes: Callable[[int, int], None] | None = None,
) -> PruneReport:
    """Remove what the policy does not keep, and remains that nobody will miss.

    Args:
        storage: the folder.
        keep: what stays.
        generation: ours; has to be the current one.
        now_unix_s: wall time, by the clock that the storage's times are from.
        options: grace times and effort; ``dry_run`` only tells, and reads steps back all the same.
        proved: steps that the caller has read back already.
        on_bytes: told (proved so far, to be proved) while a step is read back.

    Raises:
        StaleGeneration: a newer life is there; nothing was removed from then on.
        StorageError: the storage refuses; what was removed until then is gone, in an order that harms
        nothing.
    """
    _check_current(storage, generation)
    run = _Prune(
        storage=storage,
        generation=generation,
        now_unix_s=now_unix_s,
        options=options,
        found=survey(storage),
    )
    if not options.dry_run:
        run.delete_taken_back()  # on a full disk this makes room for the tombstones to come
    kept, unwanted = run.split(keep)
    anchor: StepName | None = None
    damaged: tuple[StepName, ...] = ()
    if unwanted:
        anchor, damaged = run.find_anchor(kept, unwanted, proved=proved, on_bytes=on_bytes)
        if anchor is not None:
            run.take_back([step for step in unwanted if step.name < anchor], anchor)
    run.delete_taken_back()
    run.delete_left_behind()
    run.delete_remains()
    gone = {item.name for item in run.removed if item.kind is RemovedKind.TAKEN_BACK}
    return PruneReport(
        removed=tuple(run.removed),
        kept=tuple(step.name for step in run.found.visible if step.name not in gone),
        anchor=anchor,
        damaged=damaged,
    )


def _check_current(storage: Storage, generation: int) -> None:
    """Only the newest life removes anything."""
    if next_generation(storage) - 1 != generation:
        raise StaleGeneration(
            f"generation {generation} is not the current one, and may remove nothing",
            where=storage.where(),
            hint="this process belongs to an earlier life of the job and should end",
        )


@dataclass(slots=True, kw_only=True)
class _Prune:
    """One run of `prune`."""

    storage: Storage
    generation: int
    now_unix_s: float
    options: PruneOptions
    found: Survey
    removed: list[Removed] = field(default_factory=list)

    def split(self, keep: KeepPolicy) -> tuple[list[Manifest], list[Manifest]]:
        """Visible steps that stay, and those that need not; both newest first."""
        manifests = [step.manifest for step in self.found.visible]
        pinned = pinned_steps(self.storage)
        names = keep.keeps(manifests) | {item.name for item in manifests if item.step in pinned}
        kept = [manifest for manifest in manifests if manifest.name in names]
        return kept, [manifest for manifest in manifests if manifest.name not in names]

    def find_anchor(
        self,
        kept: Sequence[Manifest],
        unwanted: Sequence[Manifest],
        *,
        proved: Collection[StepName],
        on_bytes: Callable[[int, int], None] | None,
    ) -> tuple[StepName | None, tuple[StepName, ...]]:
        """The newest step that reads back well; among those to keep if there is one, else any."""
        damaged: list[StepName] = []
        for manifest in [*kept, *unwanted]:
            if manifest.name in proved:
                return manifest.name, tuple(damaged)
            verdict = verify_step(
                self.storage, manifest, byte_budget=self.options.read_back_bytes, on_bytes=on_bytes
            )
            if verdict.is_good:
                return manifest.name, tuple(damaged)
            damaged.append(manifest.name)
        return None, tuple(damaged)

    def take_back(self, steps: Sequence[Manifest], anchor: StepName) -> None:
        """Hide steps from readers, oldest first."""
        for manifest in reversed(steps):
            path = tombstone_path(manifest.name, by_generation=self.generation)
            tombstone = Tombstone(
                run_id=manifest.run_id,
                step=manifest.step,
                generation=manifest.generation,
                by_generation=self.generation,
                anchor_step=anchor.step,
                anchor_generation=anchor.generation,
                created_unix_s=self.now_unix_s,
            )
            self._note(RemovedKind.TAKEN_BACK, manifest_path(manifest.name), manifest.name, 0)
            if not self.options.dry_run:
                _check_current(self.storage, self.generation)
                try:
                    self.storage.write_durable(path, tombstone.to_json(), if_absent=True)
                except StorageConflict:
                    continue  # an earlier run of ours was cut off here; the tombstone stands

    def delete_taken_back(self) -> None:
        """Delete what was hidden long enough ago."""
        taken_back = self.found.tombstones if self.options.dry_run else survey(self.storage).tombstones
        hidden = {step.name: step for step in self.found.hidden}
        for tombstone in taken_back:
            name = StepName(step=tombstone.step, generation=tombstone.generation)
            if not self._is_old(tombstone.created_unix_s, self.options.grace_s):
                continue
            anchor = StepName(step=tombstone.anchor_step, generation=tombstone.by_generation)
            if fenced_by(anchor, self.found.lives) is not None and self.storage.exists(manifest_path(name)):
                continue  # it takes nothing back: see easyckpt.survey
            if name in hidden and hidden[name].reason is not HiddenReason.TAKEN_BACK:
                continue  # hidden for another reason too, which decides
            self._delete_step(
                RemovedKind.DELETED, name, tombstone_path(name, by_generation=tombstone.by_generation)
            )

    def delete_left_behind(self) -> None:
        """Delete steps that a newer life resumed before."""
        for step in self.found.hidden:
            if step.reason is not HiddenReason.FENCED or self._began_anew(step):
                continue
            entry = self.storage.stat(step.path)
            if entry is not None and self._is_old(entry.mtime_s, self.options.remains_grace_s):
                self._delete_step(RemovedKind.LEFT_BEHIND, step.name, None)

    def _began_anew(self, step: HiddenStep) -> bool:
        return any(life.fences(step.name) and life.resumed_step is None for life in self.found.lives)

    def delete_remains(self) -> None:
        """Delete data without a manifest, and unfinished writes, when they are old."""
        for entry in self.storage.unfinished():
            if self._is_old(entry.mtime_s, self.options.remains_grace_s):
                self._delete(RemovedKind.UNFINISHED, entry, None)
        known = {step.name for step in self.found.visible} | {step.name for step in self.found.hidden}
        newest = max((step.step for step in self.found.visible), default=-1)
        for name, entries in self._data_by_step().items():
            if name in known or self.storage.exists(manifest_path(name)):
                continue
            if name.generation >= self.generation and name.step >= newest:
                continue  # it may be on its way
            if self._is_old(max(entry.mtime_s for entry in entries), self.options.remains_grace_s):
                for entry in entries:
                    self._delete(RemovedKind.NEVER_COMMITTED, entry, name)

    def _data_by_step(self) -> dict[StepName, list[Entry]]:
        found: dict[StepName, list[Entry]] = {}
        for entry in self.storage.list(DATA_FOLDER):
            data = parse_data(entry.path)
            if data is not None:
                found.setdefault(data.name, []).append(entry)
        return found

    def _delete_step(self, kind: RemovedKind, name: StepName, tombstone: str | None) -> None:
        """Manifest first, the tombstone last: a crash in between is finished by the next run."""
        if not self.options.dry_run:
            _check_current(self.storage, self.generation)
            self.storage.delete(manifest_path(name))
            if any(step.name == name and step.path == quarantine_path(name) for step in self.found.hidden):
                self.storage.delete(quarantine_path(name))
        freed = 0
        for entry in self.storage.list(step_folder(name)):
            if parse_data(entry.path) is not None:
                freed += entry.bytes
                if not self.options.dry_run:
                    self.storage.delete(entry.path)
        if tombstone is not None and not self.options.dry_run:
            self.storage.delete(tombstone)
        self._note(kind, manifest_path(name), name, freed)

    def _delete(self, kind: RemovedKind, entry: Entry, name: StepName | None) -> None:
        if not self.options.dry_run:
            _check_current(self.storage, self.generation)
            self.storage.delete(entry.path)
        self._note(kind, entry.path, name, entry.bytes)

    def _note(self, kind: RemovedKind, path: str, name: StepName | None, freed: int) -> None:
        self.removed.append(Removed(kind=kind, path=path, name=name, bytes=freed))

    def _is_old(self, then_unix_s: float, grace_s: float) -> bool:
        return self.now_unix_s - then_unix_s >= grace_s
