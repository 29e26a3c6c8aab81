"""``torch.distributed.checkpoint`` through our storage: existing ``dcp.save`` and ``dcp.load`` calls go on.

::

    dcp.save(state_dict, storage_writer=DcpWriter("ckpt", step=100))
    dcp.load(state_dict, storage_reader=DcpReader("ckpt"))

Theory of operation. Each rank writes one body and one fragment, as a node of one rank; the coordinator
commits the manifest in `DcpWriter.finish`, when all have. So a step is there whole or not at all, every byte
is proved when it is read, and ``easyckpt ls``, ``verify`` and ``prune`` work. What the ranks have to know of
each other (generation, run) rides on the plans that DCP sends around anyway.

DCP stores what is no tensor as pickles (byte items). They are kept as they are, under ``foreign``, and
before a planner gets one to unpickle it is proved that a weights-only load takes it, so loading runs no code
from the checkpoint.

Several saves of one process to one folder are one life of the job, as long as the steps grow. `DcpReader`
notes the step that this process resumed from; what an earlier life saved beyond it is left behind.

A reader also takes steps that `Checkpointer.save` wrote, by the names of their tensors.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from easyckpt.commit import commit_manifest, ensure_root, next_generation, record_generation
from easyckpt.errors import Misuse, SaveNotDone, UnsupportedValue
from easyckpt.interop.stored import StoredStep, open_step
from easyckpt.layout import STATE_LENGTH_BYTES, ChunkSpec, Layout, build_layout
from easyckpt.manifest import FragmentRef, Manifest
from easyckpt.plain import PartNode, pack
from easyckpt.records import GenerationRecord, RootRecord
from easyckpt.saver.persist import PieceMeta, make_fragment, persist_piece, write_fragment
from easyckpt.state import check_tensor
from easyckpt.storage import Storage, open_storage
from easyckpt.survey import survey

__all__ = ["DcpReader", "DcpWriter"]

PART = "dcp"
"""Key of the only part in the state, and name of its adapter."""

SOFTWARE = "easyckpt dcp"
_REF_FQN = "__easyckpt_fragment__"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """What all ranks of a save have in common."""

    run_id: str
    generation: int
    resumed_step: int | None
    step: int
    world_size: int


_lives: dict[str, _Life] = {}
"""Root → the life of this process, with the last step that it began to save."""
_resumed: dict[str, int] = {}
"""Root → the step that this process has loaded."""


class DcpWriter(StorageWriter):
    """Writes a ``dcp.save`` or ``dcp.async_save`` as a step of a checkpoint folder.

    Args:
        root: the checkpoint folder, or a URL of one; shared by all ranks.
        step: training step; None takes the number at the end of ``checkpoint_id`` (``"step-100"``).

    Raises:
        Misuse: the step is not possible.
    """

    def __init__(self, root: str | os.PathLike[str], *, step: int | None = None) -> None:
        super().__init__()
        self._root = os.fspath(root)
        self._step = step
        self._life: _Life | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageWriter.reset`."""
        self._life = None
        if checkpoint_id is not None:
            self._step = _number_at_end(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter.set_up_storage_writer`."""
        if not kwargs.get("use_collectives", True):
            raise Misuse("a save without collectives has nobody who commits", hint="use_collectives=True")
        if self._step is None:
            raise Misuse("which step?", hint='DcpWriter(root, step=100), or checkpoint_id="step-100"')

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: begin the life, and tell each rank what it has to know."""
        storage = open_storage(self._root)
        assert self._step is not None
        self._life = _begin(storage, self._root, step=self._step, world_size=len(plans))
        paths: dict[str, Any] = {}
        holders: dict[str, int] = {}
        for rank, plan in enumerate(plans):
            paths.update(plan.planner_data or {})
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    holders[item.index.fqn] = rank
        index = {"paths": paths, "bytes": holders}
        return [
            replace(plan, storage_data={"life": asdict(self._life), "rank": rank,
                                        "index": index if rank == 0 else None})
            for rank, plan in enumerate(plans)
        ]  # fmt: skip

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's body and fragment durably."""
        life = _Life(**plan.storage_data["life"])
        if life.step != self._step:
            raise Misuse("this plan was made for another step", hint="enable_plan_caching=False")
        rank = plan.storage_data["rank"]
        chunks, foreign = _resolve(plan.items, planner)
        plain = {"schema": 1, "foreign": foreign, "index": plan.storage_data["index"]}
        state = _pack(tuple(chunks), plain)
        layout = build_layout([spec for spec, _ in chunks.values()], state_bytes=len(state))
        body = _body(layout, [tensor for _, tensor in chunks.values()], state)
        piece = PieceMeta(
            generation=life.generation, step=life.step, node_rank=rank, rank=rank, layout=layout, digest=""
        )
        storage = open_storage(self._root)
        record = persist_piece(storage, body=memoryview(body), piece=piece)
        fragment = make_fragment([(piece, record)], run_id=life.run_id, world_size=life.world_size)
        ref = write_fragment(storage, fragment)
        mark = MetadataIndex(_REF_FQN)
        results = [WriteResult(index=mark, size_in_bytes=record.bytes, storage_data=asdict(ref))]
        results += [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: make the step visible.

        Raises:
            SaveNotDone: a newer life of the job has taken over.
            StorageError: the storage refuses.
        """
        life = self._life
        assert life is not None
        refs = [FragmentRef(**result.storage_data) for written in results for result in written
                if result.index.fqn == _REF_FQN]  # fmt: skip
        manifest = Manifest(
            run_id=life.run_id,
            generation=life.generation,
            step=life.step,
            world_size=life.world_size,
            resumed_step=life.resumed_step,
            fragments=tuple(sorted(refs, key=lambda ref: ref.node_rank)),
            created_unix_s=time.time(),
            software=SOFTWARE,
        )
        done = commit_manifest(open_storage(self._root), manifest)
        if not done.is_visible:
            raise SaveNotDone(
                f"step {life.step} is not visible: {done.outcome.value}",
                where=self._root,
                hint="another job is using this folder",
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it ends in a step's number."""
        return _NUMBER.search(os.fspath(checkpoint_id)) is not None


_NUMBER = re.compile(r"(\d{1,15})/?\Z", re.ASCII)


def _number_at_end(checkpoint_id: str | os.PathLike[str]) -> int:
    found = _NUMBER.search(os.fspath(checkpoint_id))
    if found is None:
        raise Misuse("checkpoint_id has to end in the step's number", where=os.fspath(checkpoint_id))
    return int(found[1])


def _begin(storage: Storage, root: str, *, step: int, world_size: int) -> _Life:
    """This process's life, or another one if it cannot go on with it."""
    known = _lives.get(root)
    if known is not None and known.step < step and known.world_size == world_size:
        _lives[root] = replace(known, step=step)
        return _lives[root]
    found = survey(storage)
    newest = found.visible[0].step if found.visible else None
    resumed = _resumed.get(root, newest) if known is None else newest
    if resumed is not None and resumed >= step:
        raise Misuse(
            f"step {resumed} is there already, and step {step} is not newer",
            where=storage.where(),
            hint="load the step to go on from with DcpReader(root, step=…) first, or use another folder",
        )
    record = ensure_root(
        storage, RootRecord(run_id=secrets.token_hex(8), created_unix_s=time.time(), software=SOFTWARE)
    )
    generation = next_generation(storage)
    record_generation(
        storage,
        GenerationRecord(
            run_id=record.run_id,
            generation=generation,
            resumed_step=resumed,
            world_size=world_size,
            life=f"dcp-{secrets.token_hex(8)}",
            created_unix_s=time.time(),
            software=SOFTWARE,
        ),
    )
    _lives[root] = _Life(
        run_id=record.run_id, generation=generation, resumed_step=resumed, step=step, world_size=world_size
    )
    return _lives[root]


def _resolve(
    items: list[WriteItem], planner: SavePlanner
) -> tuple[dict[str, tuple[ChunkSpec, torch.Tensor]], dict[str, bytes]]:
    """DCP's name → chunk and tensor, and DCP's name → pickled bytes."""
    chunks: dict[str, tuple[ChunkSpec, torch.Tensor]] = {}
    foreign: dict[str, bytes] = {}
    for item in items:
        fqn = item.index.fqn
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            foreign[fqn] = data.getvalue()
            continue
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        if fqn in chunks:
            raise UnsupportedValue("one rank has two separate parts of this tensor", where=fqn)
        spec = ChunkSpec(
            name=f"{PART}.{fqn}",
            dtype=str(data.dtype).removeprefix("torch."),
            global_shape=tuple(item.tensor_data.size),
            offsets=tuple(item.tensor_data.chunk.offsets),
            sizes=tuple(item.tensor_data.chunk.sizes),
        )
        check_tensor(data, fqn)
        chunks[fqn] = (spec, data.detach())
    return chunks, foreign


def _pack(names: tuple[str, ...], plain: dict[str, Any]) -> bytes:
    marker = object()
    node = PartNode(adapter=PART, tensors=names, plain=plain)
    return pack({PART: marker}, hook=lambda value, path: node if value is marker else NotImplemented)


def _body(layout: Layout, tensors: list[torch.Tensor], state: bytes) -> mmap.mmap:
    body = mmap.mmap(-1, layout.body_bytes)
    view = memoryview(body)
    view[: len(layout.header)] = layout.header
    for chunk, tensor in zip(layout.chunks, tensors, strict=True):
        if chunk.end > chunk.begin:
            room = torch.frombuffer(view[chunk.begin : chunk.end], dtype=torch.uint8)
            room.view(tensor.dtype).view(chunk.sizes).copy_(tensor)
    begin = layout.state_begin + STATE_LENGTH_BYTES
    view[layout.state_begin : begin] = len(state).to_bytes(STATE_LENGTH_BYTES, "little")
    view[begin : begin + len(state)] = state
    return body


class DcpReader(StorageReader):
    """Reads a step of a checkpoint folder for ``dcp.load``, and proves every byte.

    Args:
        root: the checkpoint folder, or a URL of one.
        step: which; None is the newest, or the number at the end of ``checkpoint_id``.
        trust_pickles: hand byte items to the planner unproved. Unpickling runs code from the checkpoint.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, step: int | None = None, trust_pickles: bool = False
    ) -> None:
        super().__init__()
        self._root = os.fspath(root)
        self._step = step
        self._trust_pickles = trust_pickles
        self._stored: StoredStep | None = None
        self._index: dict[str, Any] = {}
        self._prefix = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader.reset`."""
        self._stored = None
        if checkpoint_id is not None:
            self._step = _number_at_end(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the step holds, in DCP's words.

        Raises:
            CheckpointFault: it is damaged, or not there.
            StorageError: the storage refuses.
        """
        stored = open_step(open_storage(self._root), step=self._step)
        tree = stored.tree(0)
        node = tree.get(PART) if isinstance(tree, dict) else None
        if isinstance(node, PartNode) and node.adapter == PART:
            self._index, prefix = node.plain["index"], f"{PART}."
        else:
            self._index, prefix = {"paths": None, "bytes": {}}, ""
        entries: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in self._index["bytes"]}
        for name, tensor in stored.tensors.items():
            fqn = name.removeprefix(prefix)
            whole = ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))
            entries[fqn] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[whole],
            )
        self._stored, self._prefix = stored, prefix
        return Metadata(state_dict_metadata=entries, planner_data=self._index["paths"], storage_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader.set_up_storage_reader`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader.prepare_global_plan`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors in one pass over the bodies.

        Raises:
            Misuse: a byte item holds what only unpickling could read.
            CheckpointFault: bytes are damaged or missing.
        """
        stored = self._stored
        assert stored is not None
        wanted: list[tuple[ChunkSpec, memoryview]] = []
        moves: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        trees: dict[int, Any] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_bytes(item, planner, trees)
                continue
            target = planner.resolve_tensor(item).detach()
            tensor = stored.tensors[self._prefix + item.storage_index.fqn]
            dtype = getattr(torch, tensor.dtype)
            direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
            room = target if direct else torch.empty(tuple(item.lengths), dtype=dtype)
            if room.numel():
                spec = ChunkSpec(
                    name=tensor.name,
                    dtype=tensor.dtype,
                    global_shape=tensor.shape,
                    offsets=tuple(item.storage_offsets),
                    sizes=tuple(item.lengths),
                )
                wanted.append((spec, memoryview(room.reshape(-1).view(torch.uint8).numpy())))  # type: ignore[arg-type]
            moves.append((item, target, room))
        stored.fill(wanted)
        for item, target, room in moves:
            if room is not target:
                target.copy_(room)
            planner.commit_tensor(item, target)
        _resumed[self._root] = stored.step
        _lives.pop(self._root, None)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load_bytes(self, item: ReadItem, planner: LoadPlanner, trees: dict[int, Any]) -> None:
        assert self._stored is not None
        fqn = item.storage_index.fqn
        rank = self._index["bytes"][fqn]
        if rank not in trees:
            trees[rank] = self._stored.tree(rank)
        data = trees[rank][PART].plain["foreign"][fqn]
        if not self._trust_pickles:
            prove_weights_only(data, where=f"step {self._stored.step}: {fqn}")
        planner.load_bytes(item, io.BytesIO(data))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it ends in a step's number."""
        return _NUMBER.search(os.fspath(checkpoint_id)) is not None


def prove_weights_only(data: bytes, *, where: str) -> Any:
    """What a byte item holds, if loading it runs no code.

    Raises:
        Misuse: it would.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # pickle's, without importing pickle
            raise
        raise Misuse(
            f"it holds what only unpickling could read: {str(error).strip().partition(chr(10))[0][:300]}",
            where=where,
            hint="DcpReader(root, trust_pickles=True) unpickles it, if you trust who wrote this folder",
        ) from error
