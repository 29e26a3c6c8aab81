"""A state that came from elsewhere, as a committed step: our layout, our commit protocol, one rank.

The body is built in a mapped file, so a checkpoint larger than the memory can be imported; then it is hashed,
persisted, listed in a fragment and made visible by a manifest, by the same functions as a job's saver uses.
Another life of the folder begins with it, as with every start of a job: what it resumed from is the newest
step that is offered, so that older steps stay where they are.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from easyckpt.adapters.base import TensorPart
from easyckpt.commit import CommitResult, commit_manifest, ensure_root, next_generation, record_generation
from easyckpt.digest import digest_body
from easyckpt.errors import Misuse, SaveNotDone
from easyckpt.interop.scratch import mapped
from easyckpt.interop.statedict import ImportedPart
from easyckpt.interop.stored import OnBytes
from easyckpt.layout import STATE_LENGTH_BYTES, Layout
from easyckpt.manifest import Manifest
from easyckpt.paths import StepName
from easyckpt.plain import PartNode, TensorRef, pack
from easyckpt.records import GenerationRecord, RootRecord
from easyckpt.saver.persist import PieceMeta, make_fragment, persist_piece, write_fragment
from easyckpt.snapshot import fit_layout
from easyckpt.state import Capture, LiveTensor, check_tensor, memory_identity, spec_of
from easyckpt.storage import LocalStorage, Storage
from easyckpt.survey import survey

__all__ = ["commit_state", "scratch_folder"]

SOFTWARE = "easyckpt import"


def commit_state(
    storage: Storage, tree: dict[str, Any], *, step: int, on_bytes: OnBytes | None = None
) -> StepName:
    """Store a state as a step of a checkpoint folder.

    Args:
        storage: the folder; made if it is not there.
        tree: with text keys; its leaves are tensors, plain values and `ImportedPart`.
        step: training step that it belongs to.
        on_bytes: told how far reading is.

    Returns:
        The step and the generation that it was committed in.

    Raises:
        Misuse: there is a newer step already.
        UnsupportedValue: a value cannot be stored; its key path is named.
        StorageError: the storage refuses.
    """
    captured = _capture(tree)
    found = survey(storage)
    newest = found.visible[0].step if found.visible else None
    if newest is not None and newest >= step:
        raise Misuse(
            f"step {newest} is there already, and step {step} is not newer",
            where=storage.where(),
            hint="give a later step, or import into another folder",
        )
    root = ensure_root(
        storage,
        RootRecord(run_id=secrets.token_hex(8), created_unix_s=time.time(), software=SOFTWARE),
    )
    generation = next_generation(storage)
    record_generation(
        storage,
        GenerationRecord(
            run_id=root.run_id,
            generation=generation,
            resumed_step=newest,
            world_size=1,
            life=f"import-{secrets.token_hex(8)}",
            created_unix_s=time.time(),
            software=SOFTWARE,
        ),
    )
    name = StepName(step=step, generation=generation)
    layout = fit_layout(captured, None)
    body = mapped(layout.body_bytes, scratch_folder(storage))
    _fill(memoryview(body), layout, captured, on_bytes)
    piece = PieceMeta(
        generation=generation,
        step=step,
        node_rank=0,
        rank=0,
        layout=layout,
        seal=digest_body(memoryview(body)),
    )
    result = _persist(storage, memoryview(body), piece, run_id=root.run_id, resumed_step=newest)
    if not result.is_visible:
        raise SaveNotDone(
            f"{name} is not visible: {result.outcome.value}",
            where=storage.where(),
            hint="a job is using this folder: import into another one",
        )
    return name


def _fill(body: memoryview, layout: Layout, captured: Capture, on_bytes: OnBytes | None) -> None:
    """Write a body that is all zeros."""
    body[: len(layout.header)] = layout.header
    done = 0
    for item, chunk in zip(captured.tensors, layout.chunks, strict=True):
        if chunk.alias_of is None and chunk.end > chunk.begin:
            room = torch.frombuffer(body[chunk.begin : chunk.end], dtype=torch.uint8)
            room.view(item.tensor.dtype).view(chunk.sizes).copy_(item.tensor)
            done += chunk.end - chunk.begin
        if on_bytes is not None:
            on_bytes(done, layout.body_bytes)
    begin = layout.state_begin + STATE_LENGTH_BYTES
    body[layout.state_begin : begin] = len(captured.plain).to_bytes(STATE_LENGTH_BYTES, "little")
    body[begin : begin + len(captured.plain)] = captured.plain


def _persist(
    storage: Storage, body: memoryview, piece: PieceMeta, *, run_id: str, resumed_step: int | None
) -> CommitResult:
    record = persist_piece(storage, body=body, piece=piece)
    fragment = make_fragment([(piece, record)], run_id=run_id, world_size=1)
    manifest = Manifest(
        run_id=run_id,
        generation=piece.generation,
        step=piece.step,
        world_size=1,
        resumed_step=resumed_step,
        fragments=(write_fragment(storage, fragment),),
        created_unix_s=time.time(),
        software=SOFTWARE,
    )
    return commit_manifest(storage, manifest)


def scratch_folder(storage: Storage) -> Path:
    """Where mapped files for a storage may lie: on its own file system, if it has one."""
    if not isinstance(storage, LocalStorage):
        return Path(tempfile.gettempdir())
    folder = Path(storage.root)
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _capture(tree: dict[str, Any]) -> Capture:
    collector = _Collector()
    plain = pack(tree, hook=collector.hook)
    return Capture(tensors=tuple(collector.tensors), plain=plain)


class _Collector:
    """The packer's hook: gathers tensors, and finds those that share memory."""

    def __init__(self) -> None:
        self.tensors: list[LiveTensor] = []
        self._owners: dict[tuple[Any, ...], str] = {}

    def hook(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            self._add(value, path)
            return TensorRef(name=path)
        if isinstance(value, ImportedPart):
            for name, tensor in value.tensors.items():
                self._add(tensor, f"{path}.{name}")
            return PartNode(adapter=value.adapter, tensors=tuple(value.tensors), plain=value.plain)
        return NotImplemented

    def _add(self, tensor: torch.Tensor, name: str) -> None:
        tensor = tensor.detach()
        check_tensor(tensor, name)
        identity = memory_identity(tensor)
        owner = self._owners.setdefault(identity, name) if identity else name
        spec = spec_of(TensorPart(name=name, tensor=tensor), name, alias_of=None if owner == name else owner)
        self.tensors.append(LiveTensor(spec=spec, tensor=tensor, original=tensor))
