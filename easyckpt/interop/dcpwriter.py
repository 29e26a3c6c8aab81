"""The writing half of `easyckpt.interop.dcp`."""

from __future__ import annotations

import io
import mmap
import os
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from easyckpt.commit import commit_manifest
from easyckpt.digest import digest_body
from easyckpt.errors import Misuse, SaveNotDone, UnsupportedValue
from easyckpt.interop.dcplife import PART, SOFTWARE, Life, begin_life, ends_in_number, number_at_end
from easyckpt.layout import STATE_LENGTH_BYTES, ChunkSpec, Layout, build_layout
from easyckpt.manifest import FragmentRef, Manifest
from easyckpt.plain import PartNode, pack
from easyckpt.saver.persist import PieceMeta, make_fragment, persist_piece, write_fragment
from easyckpt.state import check_tensor
from easyckpt.storage import open_storage

__all__ = ["DcpWriter"]

_REF_FQN = "__easyckpt_fragment__"


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
        self._life: Life | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageWriter.reset`."""
        self._life = None
        if checkpoint_id is not None:
            self._step = number_at_end(checkpoint_id)

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
        self._life = begin_life(storage, self._root, step=self._step, world_size=len(plans))
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
        life = Life(**plan.storage_data["life"])
        if life.step != self._step:
            raise Misuse("this plan was made for another step", hint="enable_plan_caching=False")
        rank = plan.storage_data["rank"]
        chunks, foreign = _resolve(plan.items, planner)
        plain = {"schema": 1, "foreign": foreign, "index": plan.storage_data["index"]}
        state = _pack(tuple(chunks), plain)
        layout = build_layout([spec for spec, _ in chunks.values()], state_bytes=len(state))
        body = _body(layout, [tensor for _, tensor in chunks.values()], state)
        piece = PieceMeta(
            generation=life.generation,
            step=life.step,
            node_rank=rank,
            rank=rank,
            layout=layout,
            seal=digest_body(memoryview(body)),
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
        return ends_in_number(checkpoint_id)


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
