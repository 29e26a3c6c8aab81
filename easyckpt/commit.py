"""The writer's side of the commit protocol: how a step comes to exist.

::

    1  the folder gets its identity              easyckpt.json, created once
    2  a life of the job makes itself known      generations/<g>.json, created once, names where it resumed
    3  each saver writes its bodies, durably     data/g…/s…/node…/rank….safetensors
    4  then its fragment                         data/g…/s…/node….json, created once
    5  the committer checks that all is there    every fragment's hash, every body's length
    6  and creates the manifest                  manifests/s…-g….json, created once: now the step exists

A crash anywhere before 6 leaves data that no reader looks at. Two committers race at 6 and exactly one
creates; the other compares and is content if it meant the same. A life that was replaced is stopped at 5 if
the new life's record is there already, and if it comes a moment later, `easyckpt.survey` fences what slipped
through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from easyckpt.digest import bytes_digest
from easyckpt.envelope import read_index
from easyckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    Misuse,
    StaleGeneration,
    StorageConflict,
    StorageError,
    StorageMissing,
)
from easyckpt.late import all_generations
from easyckpt.manifest import (
    FRAGMENT_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    Fragment,
    FragmentHead,
    FragmentRef,
    Manifest,
)
from easyckpt.paths import (
    LATEST_PATH,
    ROOT_PATH,
    generation_path,
    manifest_path,
)
from easyckpt.records import SMALL_BYTES_MAX, GenerationRecord, LatestHint, RootRecord
from easyckpt.storage.base import Storage
from easyckpt.survey import Life, Trouble, fenced_by, read_lives, read_root

__all__ = [
    "CommitOutcome",
    "CommitResult",
    "commit_manifest",
    "ensure_root",
    "next_generation",
    "read_fragment",
    "read_fragment_head",
    "record_generation",
]


class CommitOutcome(Enum):
    """What became of a commit."""

    COMMITTED = "committed"  # we created the manifest
    ALREADY = "already"  # it was there, with the same content: as good as ours
    LOST = "lost"  # another committer created one with other content
    FENCED = "fenced"  # a newer life resumed from an earlier step: nobody will see this


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """Outcome, and the facts behind it."""

    outcome: CommitOutcome
    path: str
    fenced_by: int | None = None
    hint_error: str = ""
    """Why ``latest.json`` could not be written; it is only a hint, and the step is committed all the same."""

    @property
    def is_visible(self) -> bool:
        """Whether the step can be loaded now."""
        return self.outcome in (CommitOutcome.COMMITTED, CommitOutcome.ALREADY)


def ensure_root(storage: Storage, record: RootRecord) -> RootRecord:
    """Give the folder an identity, or learn the one that it has. Whoever comes first wins.

    Args:
        storage: the folder.
        record: the identity if it has none yet.

    Returns:
        The identity that holds; its ``run_id`` goes into everything that is written here.

    Raises:
        CheckpointFault: the record that is there is damaged or of another format.
        StorageError: the storage refuses.
    """
    found = read_root(storage)
    if found is None:
        try:
            storage.write_durable(ROOT_PATH, record.to_json(), if_absent=True)
        except StorageConflict:
            found = read_root(storage)
        else:
            return record
    if found is None:
        raise StorageMissing(
            "it was there and is gone again",
            where=storage.where(ROOT_PATH),
            hint="is something else cleaning up here?",
        )
    return found


def next_generation(storage: Storage) -> int:
    """One more than the newest generation that has a record; 1 in a new folder.

    Two lives that ask at once get the same answer; `record_generation` lets one of them through.
    """
    return max(all_generations(storage), default=0) + 1


def record_generation(storage: Storage, record: GenerationRecord) -> None:
    """Make a life known: from now on the older ones commit nothing beyond the step that it resumed from.

    Call it when that step is settled and before anything of this generation is committed. Repeating it is
    fine.

    Raises:
        StaleGeneration: a newer life is there already, or another one has this number.
        Misuse: the folder belongs to another run.
        StorageError: the storage refuses.
    """
    _check_run(storage, record.run_id)
    path = generation_path(record.generation)
    newest = next_generation(storage) - 1
    if newest > record.generation:
        raise StaleGeneration(
            f"generation {record.generation} has been replaced by {newest}",
            where=storage.where(path),
            hint="this process belongs to an earlier life of the job and should end",
        )
    try:
        storage.write_durable(path, record.to_json(), if_absent=True)
    except StorageConflict:
        raw = read_index(storage, path, bytes_max=SMALL_BYTES_MAX)
        there = GenerationRecord.from_json(raw, where=storage.where(path))
        if replace(there, created_unix_s=0.0, software="") == replace(
            record, created_unix_s=0.0, software=""
        ):
            return
        raise StaleGeneration(
            f"generation {record.generation} was taken by another life (resumed from {there.resumed_step}, "
            f"life {there.life})",
            where=storage.where(path),
            hint="two jobs are using this folder: give each its own, or end one",
        ) from None


def _check_run(storage: Storage, run_id: str) -> None:
    root = read_root(storage)
    if root is None:
        raise Misuse(
            "the folder has no identity yet", where=storage.where(ROOT_PATH), hint="call ensure_root() first"
        )
    if root.run_id != run_id:
        raise Misuse(
            f"the folder belongs to run {root.run_id}, not {run_id}",
            where=storage.where(),
            hint="give each training run its own checkpoint folder",
        )


def read_fragment(storage: Storage, ref: FragmentRef, manifest: Manifest) -> Fragment:
    """A fragment, proved against its manifest.

    Raises:
        IncompleteCheckpoint: it is not there.
        CorruptCheckpoint: it differs from what the manifest says.
        StorageError: the storage refuses.
    """
    fragment = Fragment.from_json(_fragment_bytes(storage, ref, manifest), where=storage.where(ref.file))
    _check_fragment(fragment, ref, manifest, storage.where(ref.file))
    return fragment


def read_fragment_head(storage: Storage, ref: FragmentRef, manifest: Manifest) -> FragmentHead:
    """The pieces of a fragment, proved as by `read_fragment`, without their layouts: no work per tensor.

    Raises:
        IncompleteCheckpoint: it is not there.
        CorruptCheckpoint: it differs from what the manifest says.
        StorageError: the storage refuses.
    """
    raw = _fragment_bytes(storage, ref, manifest)
    head = FragmentHead.head_from_json(raw, where=storage.where(ref.file))
    _check_fragment(head, ref, manifest, storage.where(ref.file))
    return head


def _fragment_bytes(storage: Storage, ref: FragmentRef, manifest: Manifest) -> bytes:
    where = storage.where(ref.file)
    try:
        raw = read_index(storage, ref.file, bytes_max=FRAGMENT_BYTES_MAX)
    except StorageMissing:
        raise IncompleteCheckpoint(
            f"the fragment of node {ref.node_rank} is not there",
            where=where,
            hint="all nodes have to share this folder; `easyckpt ls` shows the steps that are whole",
        ) from None
    if len(raw) != ref.bytes or bytes_digest(raw) != ref.hash:
        raise CorruptCheckpoint(
            f"the fragment of node {ref.node_rank} differs from what the manifest says",
            where=where,
            hint=f"`easyckpt why {manifest.step}` shows what else is damaged; load an older step",
        )
    return raw


def _check_fragment(fragment: FragmentHead, ref: FragmentRef, manifest: Manifest, where: str) -> None:
    ranks = tuple(piece.rank for piece in fragment.pieces)
    expected = (manifest.run_id, manifest.name, manifest.world_size, ref.node_rank, ref.ranks)
    if (fragment.run_id, fragment.name, fragment.world_size, fragment.node_rank, ranks) != expected:
        raise CorruptCheckpoint("the fragment is of another run, step, node or set of ranks", where=where)


def commit_manifest(storage: Storage, manifest: Manifest) -> CommitResult:
    """Make a step exist, if everything below it is there and this life may.

    Repeating it is fine: after a crash the next committer finds the manifest, or creates it.

    Raises:
        IncompleteCheckpoint: a fragment or a body is missing or too short.
        CorruptCheckpoint: a fragment differs from what the manifest says.
        Misuse: the folder belongs to another run, or this generation was never recorded or resumed elsewhere.
        StorageError: the storage refuses; nothing was committed, or the manifest is there whole.
    """
    path = manifest_path(manifest.name)
    _check_run(storage, manifest.run_id)
    _check_own_record(storage, manifest)
    fence = _fence(storage, manifest)
    if fence is not None:
        return CommitResult(outcome=CommitOutcome.FENCED, path=path, fenced_by=fence.generation)
    if not storage.exists(path):
        _check_data(storage, manifest)
        try:
            storage.write_durable(path, manifest.to_json(), if_absent=True)
        except StorageConflict:
            outcome = _compare(storage, manifest, path)
        else:
            outcome = CommitOutcome.COMMITTED
    else:
        outcome = _compare(storage, manifest, path)
    # A life that began while we were writing has the last word: say so instead of reporting success.
    fence = _fence(storage, manifest)
    if fence is not None:
        return CommitResult(outcome=CommitOutcome.FENCED, path=path, fenced_by=fence.generation)
    hint_error = _write_hint(storage, manifest, path) if outcome is CommitOutcome.COMMITTED else ""
    return CommitResult(outcome=outcome, path=path, hint_error=hint_error)


def _check_own_record(storage: Storage, manifest: Manifest) -> None:
    path = generation_path(manifest.generation)
    try:
        raw = read_index(storage, path, bytes_max=SMALL_BYTES_MAX)
    except StorageMissing:
        raise Misuse(
            f"generation {manifest.generation} has no record",
            where=storage.where(path),
            hint="call record_generation() before the first commit of a generation",
        ) from None
    record = GenerationRecord.from_json(raw, where=storage.where(path))
    if record.resumed_step != manifest.resumed_step:
        raise Misuse(
            f"the manifest says that generation {manifest.generation} resumed from {manifest.resumed_step}, "
            f"and its record says {record.resumed_step}",
            where=storage.where(path),
        )


def _fence(storage: Storage, manifest: Manifest) -> Life | None:
    troubles: list[Trouble] = []
    return fenced_by(manifest.name, read_lives(storage, None, manifests={}, troubles=troubles))


def _check_data(storage: Storage, manifest: Manifest) -> None:
    for ref in manifest.fragments:
        for piece in read_fragment_head(storage, ref, manifest).pieces:
            found = storage.stat(piece.file)
            if found is None or found.bytes != piece.length_of_file:
                has = (
                    "is not there" if found is None else f"has {found.bytes} of {piece.length_of_file} bytes"
                )
                raise IncompleteCheckpoint(
                    f"the body of rank {piece.rank} {has}",
                    where=storage.where(piece.file),
                    hint="the step is not committed; older steps are not affected",
                )


def _compare(storage: Storage, manifest: Manifest, path: str) -> CommitOutcome:
    raw = read_index(storage, path, bytes_max=MANIFEST_BYTES_MAX)
    there = Manifest.from_json(raw, where=storage.where(path))
    return CommitOutcome.ALREADY if there.same_content(manifest) else CommitOutcome.LOST


def _write_hint(storage: Storage, manifest: Manifest, path: str) -> str:
    hint = LatestHint(step=manifest.step, generation=manifest.generation, manifest=path)
    try:
        storage.write_durable(LATEST_PATH, hint.to_json())
    except StorageError as error:
        return str(error)
    return ""
