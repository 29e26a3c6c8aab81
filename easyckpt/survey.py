"""Which steps a folder offers, and why the others are not offered: the reader's side of the commit protocol.

A step is offered if its manifest is there, is sound, belongs to this run, is not fenced, and was not taken
back.

**Fence.** Every life of the job (generation) leaves a record that names the step it resumed from. What an
older life commits beyond that step belongs to a past that was left behind: a process that was thought dead
may commit it hours later, and nobody will see it. So with ``resumed(g)`` as the step that generation ``g``
resumed from::

    (step, generation) is fenced  ⇔  some g > generation has  step > resumed(g)
                                      (a life that began without a checkpoint fences everything older)

**Tombstone.** Retention takes a step back by a tombstone, which names the newer step (anchor) that was read
back before. It counts only while the anchor is not fenced against the generation that set it: what a replaced
life removes for the sake of its own lost future stays.

If a generation's record cannot be read, a manifest of that generation says the same; if there is none either,
all older generations are held back, named, until a person decides. A wrong guess here would load a past that
was left behind.

`decide` is pure; `survey` reads the files for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from easyckpt.envelope import read_index
from easyckpt.errors import CheckpointFault, EasyckptError, StorageMissing, UnknownFormat
from easyckpt.late import all_generations, hinted_step
from easyckpt.manifest import MANIFEST_BYTES_MAX, Manifest
from easyckpt.paths import (
    MANIFESTS_FOLDER,
    ROOT_PATH,
    TOMBSTONES_FOLDER,
    StepName,
    generation_path,
    manifest_path,
    parse_manifest,
    parse_tombstone,
    quarantine_path,
    tombstone_path,
)
from easyckpt.records import SMALL_BYTES_MAX, GenerationRecord, RootRecord, Tombstone
from easyckpt.setaside import names_set_aside
from easyckpt.storage.base import Storage

__all__ = [
    "HiddenReason",
    "HiddenStep",
    "Life",
    "Survey",
    "Trouble",
    "VisibleStep",
    "decide",
    "fenced_by",
    "read_lives",
    "read_root",
    "survey",
    "visible_steps",
]

MANIFESTS_MAX = 100_000
"""More in one folder is not a run whose retention works."""
LOOKS_MAX = 5
"""How often a listing is taken anew that retention has overtaken."""


class HiddenReason(Enum):
    """Why a manifest that is there is not offered."""

    FENCED = "fenced"  # a newer life resumed from an earlier step
    FENCE_UNREADABLE = "fence_unreadable"  # a newer life's record is damaged
    TAKEN_BACK = "taken_back"  # retention
    CORRUPT = "corrupt"
    UNKNOWN_FORMAT = "unknown_format"
    OTHER_RUN = "other_run"
    UNREADABLE = "unreadable"  # the storage refuses just this file
    SET_ASIDE = "set_aside"  # beyond repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known of one generation: where it resumed, if that is known."""

    generation: int
    known: bool
    resumed_step: int | None = None

    def fences(self, name: StepName) -> bool:
        """Whether this life left the step behind."""
        if self.generation <= name.generation:
            return False
        return not self.known or self.resumed_step is None or name.step > self.resumed_step


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleStep:
    """A step that may be loaded."""

    step: int
    generation: int
    path: str
    manifest: Manifest

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStep:
    """A manifest that is there and is not offered."""

    name: StepName
    path: str
    reason: HiddenReason
    by_generation: int | None = None
    """The life that fences it, or whose retention took it back."""
    detail: str = ""
    manifest: Manifest | None = None
    """If it could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A file that could not be used, and what was said about it."""

    path: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that the index files of a folder say."""

    root: RootRecord | None
    lives: tuple[Life, ...]
    """Oldest first."""
    visible: tuple[VisibleStep, ...]
    """Newest first: by step, then generation."""
    hidden: tuple[HiddenStep, ...]
    """Newest first."""
    tombstones: tuple[Tombstone, ...]
    troubles: tuple[Trouble, ...]

    @property
    def generation(self) -> int:
        """The newest life's number; 0 if there was none."""
        return self.lives[-1].generation if self.lives else 0

    def find(self, step: int) -> VisibleStep | None:
        """The step, of its newest generation."""
        for found in self.visible:
            if found.step == step:
                return found
        return None


def fenced_by(name: StepName, lives: Sequence[Life]) -> Life | None:
    """The oldest life that left this step behind, or None."""
    for life in lives:
        if life.fences(name):
            return life
    return None


def decide(
    manifests: Mapping[StepName, Manifest], lives: Sequence[Life], tombstones: Sequence[Tombstone]
) -> tuple[tuple[VisibleStep, ...], tuple[HiddenStep, ...]]:
    """Which of the sound manifests are offered. Pure.

    Args:
        manifests: those that could be read and belong to the run.
        lives: every generation that is known of, oldest first.
        tombstones: those that could be read and belong to the run.
    """
    taken_back: dict[StepName, Tombstone] = {}
    for tombstone in tombstones:
        anchor = StepName(step=tombstone.anchor_step, generation=tombstone.by_generation)
        if fenced_by(anchor, lives) is None:
            target = StepName(step=tombstone.step, generation=tombstone.generation)
            taken_back.setdefault(target, tombstone)
    visible: list[VisibleStep] = []
    hidden: list[HiddenStep] = []
    for name in sorted(manifests, reverse=True):
        path = manifest_path(name)
        life = fenced_by(name, lives)
        if life is not None:
            reason = HiddenReason.FENCED if life.known else HiddenReason.FENCE_UNREADABLE
            hidden.append(
                HiddenStep(
                    name=name,
                    path=path,
                    reason=reason,
                    by_generation=life.generation,
                    detail=_fence_detail(life),
                    manifest=manifests[name],
                )
            )
        elif name in taken_back:
            by = taken_back[name]
            hidden.append(
                HiddenStep(
                    name=name,
                    path=path,
                    reason=HiddenReason.TAKEN_BACK,
                    by_generation=by.by_generation,
                    detail=f"retention of generation {by.by_generation} took it back for {by.anchor_step}",
                    manifest=manifests[name],
                )
            )
        else:
            visible.append(
                VisibleStep(step=name.step, generation=name.generation, path=path, manifest=manifests[name])
            )
    return tuple(visible), tuple(hidden)


def _fence_detail(life: Life) -> str:
    if not life.known:
        return f"the record of generation {life.generation} cannot be read, so where it resumed is not known"
    if life.resumed_step is None:
        return f"generation {life.generation} began anew, without a checkpoint"
    return f"generation {life.generation} resumed from step {life.resumed_step}"


# ----- reading -----


def read_root(storage: Storage) -> RootRecord | None:
    """Whose folder this is, or None if nobody's yet.

    Raises:
        CheckpointFault: the record is damaged or of another format.
        StorageError: the storage refuses.
    """
    try:
        raw = read_index(storage, ROOT_PATH, bytes_max=SMALL_BYTES_MAX)
    except StorageMissing:
        return None
    return RootRecord.from_json(raw, where=storage.where(ROOT_PATH))


def visible_steps(storage: Storage) -> tuple[VisibleStep, ...]:
    """The steps that may be loaded, newest first. See `survey` for the others and the errors."""
    return survey(storage).visible


def survey(storage: Storage) -> Survey:
    """Read all index files above the fragments and decide what is offered.

    A damaged manifest or record hides no others: it is reported in the result.

    Raises:
        CheckpointFault: the folder's own record is damaged.
        StorageError: the storage refuses as a whole.
    """
    before = None
    for _ in range(LOOKS_MAX):
        found, vanished = _look(storage)
        taken_back = any(step.reason is HiddenReason.TAKEN_BACK for step in found.hidden)
        if found.visible or not (vanished or taken_back) or found == before:
            break  # else all that was listed may have been taken back for something newer meanwhile
        before = found
    return found


def _look(storage: Storage) -> tuple[Survey, bool]:
    """The result of one look, and whether a manifest was gone before it could be read."""
    root, troubles = read_root(storage), list[Trouble]()
    manifests, unusable, vanished = _read_manifests(storage, root, troubles)
    lives = read_lives(storage, root, manifests=manifests, troubles=troubles)
    tombstones = _read_tombstones(storage, root, troubles)
    visible, known = decide(manifests, lives, tombstones)
    unusable += [_set_aside(name, lives) for name in names_set_aside(storage) if name not in manifests]
    return Survey(
        root=root,
        lives=lives,
        visible=visible,
        hidden=tuple(sorted((*known, *unusable), key=lambda step: step.name, reverse=True)),
        tombstones=tombstones,
        troubles=tuple(troubles),
    ), vanished


def _set_aside(name: StepName, lives: Sequence[Life]) -> HiddenStep:
    """A step beyond repair counts as lost until a newer life has left it behind anyway."""
    life = fenced_by(name, lives)
    reason = HiddenReason.FENCED if life is not None and life.known else HiddenReason.SET_ASIDE
    detail = "`easyckpt repair` set it aside: its data is damaged, and nothing has the right bytes"
    return HiddenStep(name=name, path=quarantine_path(name), reason=reason, detail=detail)


def _read_manifests(
    storage: Storage, root: RootRecord | None, troubles: list[Trouble]
) -> tuple[dict[StepName, Manifest], list[HiddenStep], bool]:
    vanished = False
    sound: dict[StepName, Manifest] = {}
    unusable: list[HiddenStep] = []
    entries = storage.list(MANIFESTS_FOLDER)
    if len(entries) > MANIFESTS_MAX:
        detail = f"{len(entries)} files; only the newest {MANIFESTS_MAX} are looked at"
        troubles.append(Trouble(path=MANIFESTS_FOLDER, detail=detail))
    names = {parse_manifest(entry.path) for entry in entries[-MANIFESTS_MAX:]} | {hinted_step(storage)}
    for name in sorted(name for name in names if name is not None):
        path = manifest_path(name)
        try:
            raw = read_index(storage, path, bytes_max=MANIFEST_BYTES_MAX)
            manifest = Manifest.from_json(raw, where=storage.where(path))
        except StorageMissing:
            vanished = True  # removed since the listing
            continue
        except EasyckptError as error:
            unusable.append(HiddenStep(name=name, path=path, reason=_unusable(error), detail=error.what))
            continue
        if manifest.name != name:
            detail = f"it holds {manifest.name}, and is named like {name}"
            unusable.append(HiddenStep(name=name, path=path, reason=HiddenReason.CORRUPT, detail=detail))
        elif root is not None and manifest.run_id != root.run_id:
            detail = f"it belongs to run {manifest.run_id}, and the folder to {root.run_id}"
            unusable.append(HiddenStep(name=name, path=path, reason=HiddenReason.OTHER_RUN, detail=detail))
        else:
            sound[name] = manifest
    return sound, unusable, vanished


def _unusable(error: EasyckptError) -> HiddenReason:
    if isinstance(error, UnknownFormat):
        return HiddenReason.UNKNOWN_FORMAT
    return HiddenReason.CORRUPT if isinstance(error, CheckpointFault) else HiddenReason.UNREADABLE


def read_lives(
    storage: Storage,
    root: RootRecord | None,
    *,
    manifests: Mapping[StepName, Manifest],
    troubles: list[Trouble],
) -> tuple[Life, ...]:
    """Every generation that left a record or a manifest, oldest first.

    Args:
        storage: where.
        root: whose folder; records of other runs are left out.
        manifests: fill in for records that are damaged or lost.
        troubles: damaged records are added here.
    """
    lives: dict[int, Life] = {}
    for name, manifest in manifests.items():
        lives[name.generation] = Life(
            generation=name.generation, known=True, resumed_step=manifest.resumed_step
        )
    for generation in all_generations(storage):
        path = generation_path(generation)
        try:
            raw = read_index(storage, path, bytes_max=SMALL_BYTES_MAX)
            record = GenerationRecord.from_json(raw, where=storage.where(path))
        except EasyckptError as error:
            troubles.append(Trouble(path=path, detail=error.what))
            lives.setdefault(generation, Life(generation=generation, known=False))
            continue
        if root is not None and record.run_id != root.run_id:
            troubles.append(Trouble(path=path, detail=f"it belongs to run {record.run_id}; it is ignored"))
        elif record.generation != generation:
            detail = f"it holds generation {record.generation}, not its name's"
            troubles.append(Trouble(path=path, detail=detail))
            lives.setdefault(generation, Life(generation=generation, known=False))
        else:
            lives[generation] = Life(generation=generation, known=True, resumed_step=record.resumed_step)
    return tuple(lives[generation] for generation in sorted(lives))


def _read_tombstones(
    storage: Storage, root: RootRecord | None, troubles: list[Trouble]
) -> tuple[Tombstone, ...]:
    found: list[Tombstone] = []
    for entry in storage.list(TOMBSTONES_FOLDER):
        name = parse_tombstone(entry.path)
        if name is None:
            continue
        try:
            raw = read_index(storage, entry.path, bytes_max=SMALL_BYTES_MAX)
            tombstone = Tombstone.from_json(raw, where=storage.where(entry.path))
        except StorageMissing:
            continue
        except EasyckptError as error:
            # Without its anchor it cannot be trusted to take anything away.
            troubles.append(Trouble(path=entry.path, detail=error.what))
            continue
        target = StepName(step=tombstone.step, generation=tombstone.generation)
        if tombstone_path(target, by_generation=tombstone.by_generation) != entry.path:
            troubles.append(Trouble(path=entry.path, detail="it is named for another step than it holds"))
        elif root is None or tombstone.run_id == root.run_id:
            found.append(tombstone)
    return tuple(found)
