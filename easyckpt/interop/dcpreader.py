"""The reading half of `easyckpt.interop.dcp`."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from easyckpt.errors import Misuse
from easyckpt.interop.dcplife import PART, ends_in_number, note_resumed, number_at_end
from easyckpt.interop.stored import StoredStep, open_step
from easyckpt.layout import ChunkSpec
from easyckpt.plain import PartNode
from easyckpt.storage import open_storage

__all__ = ["DcpReader", "prove_weights_only"]


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
            self._step = number_at_end(checkpoint_id)

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
        note_resumed(self._root, stored.step)
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
        return ends_in_number(checkpoint_id)


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
