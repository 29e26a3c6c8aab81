"""Bringing damaged steps back, from whatever still has the right bytes.

Every chunk of 64 MiB has a hash, so a candidate needs no trust: it is right or it is not. In this order:

1. what is there and still right;
2. the same bytes elsewhere: another rank's, another step's, or another folder's (a copy of the run,
another tier); 3. what is there, with the tensors that another rank of the step holds too laid over it: in
data-parallel training
   most bytes of a rank are also its neighbours'.

A damaged fragment is taken from another folder. A damaged manifest is made anew if all its fragments are
sound. A body is replaced only when all of it is proved, in one move. What cannot be brought back is set aside
(`easyckpt.setaside`), never deleted; and not if the storage merely refuses, which may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from easyckpt.commit import read_fragment
from easyckpt.envelope import read_index
from easyckpt.errors import CheckpointFault, EasyckptError, IncompleteCheckpoint, StorageError
from easyckpt.fragment import FRAGMENT_BYTES_MAX, Fragment, FragmentRef
from easyckpt.manifest import MANIFEST_BYTES_MAX, Manifest
from easyckpt.paths import StepName, manifest_path, parse_data, step_folder
from easyckpt.salvage import Piece, Salvage
from easyckpt.setaside import set_aside
from easyckpt.storage.base import Storage
from easyckpt.survey import HiddenReason, Survey, survey
from easyckpt.verify import verify_step

__all__ = ["Mended", "MendKind", "repair_steps"]


class MendKind(Enum):
    """What was done about one thing."""

    BODY = "body"  # written anew from proved bytes
    FRAGMENT = "fragment"  # taken from another folder
    MANIFEST = "manifest"  # made anew, or taken from another folder
    SET_ASIDE = "set_aside"  # beyond repair
    UNKNOWN = "unknown"  # the storage refuses: nothing was done


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """One thing that was wrong, and what became of it."""

    kind: MendKind
    name: StepName
    where: str
    detail: str


def repair_steps(
    storage: Storage,
    others: Sequence[Storage] = (),
    *,
    step: int | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] | None = None,
) -> tuple[Mended, ...]:
    """Look at steps whole, and mend what is wrong.

    Args:
        storage: the folder.
        others: folders that may have the same run's files.
        step: only this one; None looks at all.
        dry_run: only say what would be done.
        on_bytes: told (proved so far, to be proved) of the step at hand.

    Raises:
        CheckpointFault: the folder's own record is damaged.
        StorageError: the storage refuses as a whole.
    """
    run = _Repair(storage, tuple(others), dry_run=dry_run)
    found = survey(storage)
    for hidden in found.hidden:
        if hidden.reason is HiddenReason.CORRUPT and step in (None, hidden.name.step):
            run.mend_manifest(hidden.name, found)
    found = survey(storage)
    for item in found.visible:
        if step in (None, item.step):
            run.mend_step(item.manifest, found, on_bytes)
    return tuple(run.done)


class _Repair:
    """One run of `repair_steps`."""

    def __init__(self, storage: Storage, others: tuple[Storage, ...], *, dry_run: bool) -> None:
        self._storage = storage
        self._others = others
        self._dry_run = dry_run
        self._salvage = Salvage(storage, others)
        self.done: list[Mended] = []

    def _note(self, kind: MendKind, name: StepName, path: str, detail: str) -> None:
        self.done.append(Mended(kind=kind, name=name, where=self._storage.where(path), detail=detail))

    def _write(self, path: str, data: bytes | memoryview) -> None:
        if not self._dry_run:
            self._storage.write_durable(path, data)

    # ----- manifests -----

    def mend_manifest(self, name: StepName, found: Survey) -> None:
        """Replace a damaged manifest by a sound one of the same step."""
        path = manifest_path(name)
        for other in self._others:
            try:
                raw = read_index(other, path, bytes_max=MANIFEST_BYTES_MAX)
                manifest = Manifest.from_json(raw, where=other.where(path))
            except EasyckptError:
                continue  # that one has nothing better
            if manifest.name == name and found.root is not None and manifest.run_id == found.root.run_id:
                self._write(path, raw)
                self._note(MendKind.MANIFEST, name, path, f"taken from {other.where()}")
                return
        manifest_made = self._manifest_from_fragments(name, found)
        if manifest_made is None:
            self._set_aside(name, "its manifest is damaged, and the fragments do not make a new one")
            return
        self._write(path, manifest_made.to_json())
        self._note(MendKind.MANIFEST, name, path, "made anew from its fragments; its metrics are lost")

    def _manifest_from_fragments(self, name: StepName, found: Survey) -> Manifest | None:
        refs: list[FragmentRef] = []
        world_size = 0
        for entry in self._storage.list(step_folder(name)):
            data = parse_data(entry.path)
            if data is None or data.rank is not None:
                continue
            try:
                raw = read_index(self._storage, entry.path, bytes_max=FRAGMENT_BYTES_MAX)
                fragment = Fragment.from_json(raw, where=self._storage.where(entry.path))
            except CheckpointFault:
                return None
            refs.append(fragment.ref(raw))
            world_size = fragment.world_size
        life = next((life for life in found.lives if life.generation == name.generation), None)
        if found.root is None or life is None or not life.known or not refs:
            return None
        try:
            return Manifest(
                run_id=found.root.run_id,
                generation=name.generation,
                step=name.step,
                world_size=world_size,
                resumed_step=life.resumed_step,
                fragments=tuple(sorted(refs, key=lambda ref: ref.node_rank)),
                created_unix_s=found.root.created_unix_s,
                software="easyckpt repair",
                metrics={},
            )
        except ValueError:  # a node's fragment is missing
            return None

    # ----- one step -----

    def mend_step(
        self, manifest: Manifest, found: Survey, on_bytes: Callable[[int, int], None] | None
    ) -> None:
        """Prove a step; mend what is damaged; set the step aside if something is beyond repair."""
        verdict = verify_step(self._storage, manifest, on_bytes=on_bytes)
        if verdict.is_good:
            return
        name = manifest.name
        if verdict.is_unknown:
            self._note(MendKind.UNKNOWN, name, manifest_path(name), verdict.findings[0].detail)
            return
        try:
            pieces = self._fragments(manifest)
            mended = self._salvage.bodies(pieces, found)
        except CheckpointFault as error:
            self._set_aside(name, error.what)
            return
        except StorageError as error:
            self._note(MendKind.UNKNOWN, name, manifest_path(name), error.what)
            return
        lost = [rank for rank, body in mended.items() if body is None]
        if lost:
            shown = ", ".join(map(str, lost[:10])) + (" …" if len(lost) > 10 else "")
            self._set_aside(name, f"nothing has the right bytes of ranks {shown}")
            return
        # Only now: the right bytes of one body may lie in the file of another that is written anew too.
        for piece in pieces:
            body = mended[piece.record.rank]
            if body is not None and body.bytes is not None:
                self._write(piece.record.file, memoryview(body.bytes))
                self._note(MendKind.BODY, name, piece.record.file, body.detail)
        if not self._dry_run and not verify_step(self._storage, manifest).is_good:
            self._set_aside(name, "it does not read back well after the repair")

    def _set_aside(self, name: StepName, why: str) -> None:
        path = manifest_path(name)
        if not self._dry_run:
            path = set_aside(self._storage, name, bytes_max=MANIFEST_BYTES_MAX)
        self._note(MendKind.SET_ASIDE, name, path, why)

    def _fragments(self, manifest: Manifest) -> list[Piece]:
        """All pieces of a step; fragments that are damaged here are taken from another folder."""
        pieces: list[Piece] = []
        for ref in manifest.fragments:
            try:
                fragment = read_fragment(self._storage, ref, manifest)
            except CheckpointFault:
                fragment = self._fragment_from_others(ref, manifest)
            pieces += [Piece(fragment=fragment, record=record) for record in fragment.pieces]
        return pieces

    def _fragment_from_others(self, ref: FragmentRef, manifest: Manifest) -> Fragment:
        for other in self._others:
            try:
                fragment = read_fragment(other, ref, manifest)
                raw = read_index(other, ref.file, bytes_max=FRAGMENT_BYTES_MAX)
            except EasyckptError:
                continue  # that one has nothing better
            self._write(ref.file, raw)
            self._note(MendKind.FRAGMENT, manifest.name, ref.file, f"taken from {other.where()}")
            return fragment
        raise IncompleteCheckpoint(
            f"the fragment of node {ref.node_rank} is damaged, and nothing has another"
        )
