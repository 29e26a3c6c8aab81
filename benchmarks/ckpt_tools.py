"""What `ckpt_rank.py` compares: one small class per tool, each used as its own documentation says.

A tool is left out, by name, where its package is not installed. All of them save and load the same tensors;
who takes modules and optimizers gets those, who takes a dict gets the dict.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

__all__ = ["TOOLS", "State", "Tool"]

WAIT_S = 300.0


class State(Protocol):
    """What is saved: the objects, and the same tensors as nested dicts."""

    model: nn.Module
    optimizer: Optimizer
    rank: int

    def tree(self) -> dict[str, dict[str, torch.Tensor]]: ...


class Tool:
    """Nothing at all: what it seems to lose is the noise of the machine."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder

    def save(self, step: int) -> None:
        """Return as soon as training may go on."""

    def in_memory(self) -> None:
        """Wait until the last save would survive this process; without such a stage: until it is durable."""
        self.durable()

    def durable(self) -> None:
        """Wait until the last save is safe on the file system."""

    def load(self, step: int) -> bool:
        """Bring it back in place. False: this tool has nothing to load."""
        return False

    def close(self) -> None:
        """Let go of everything."""


class EasyCkpt(Tool):
    """This project, through its public interface."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        import easyckpt

        self._checkpointer = easyckpt.Checkpointer(folder)
        self._parts: dict[str, Any] = {"model": state.model, "optimizer": state.optimizer}
        self._handle: Any = None

    def save(self, step: int) -> None:
        self._handle = self._checkpointer.save(self._parts, step=step)

    def in_memory(self) -> None:
        self._handle.wait("memory", timeout=WAIT_S)

    def durable(self) -> None:
        self._handle.wait("durable", timeout=WAIT_S)

    def load(self, step: int) -> bool:
        found = self._checkpointer.load(self._parts)
        assert found == step, f"step {found} came back instead of {step}"
        return True

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave(Tool):
    """`torch.save`, one file per rank, synced."""

    def save(self, step: int) -> None:
        with open(self._file(step), "wb") as file:
            torch.save(self.state.tree(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, step: int) -> bool:
        _copy_into(self.state.tree(), torch.load(self._file(step), mmap=False))
        return True

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}.rank{self.state.rank}.pt"


class DcpSync(Tool):
    """`torch.distributed.checkpoint.save`."""

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state.tree(), checkpoint_id=str(self.folder / str(step)))

    def load(self, step: int) -> bool:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state.tree(), checkpoint_id=str(self.folder / str(step)))
        return True


class DcpAsync(DcpSync):
    """`torch.distributed.checkpoint.async_save` in a thread, as without any option."""

    process = False

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        # Its collectives run beside those of training: on one group they would meet.
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.durable()
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        self._future = dcp.async_save(
            self.state.tree(),
            checkpoint_id=str(self.folder / str(step)),
            process_group=self._group,
            async_checkpointer_type=kind,
        )

    def durable(self) -> None:
        if self._future is not None:
            getattr(self._future, "upload_completion", self._future).result(WAIT_S)
            self._future = None


class DcpAsyncProcess(DcpAsync):
    """The same with a process that writes."""

    process = True


class TorchSnapshot(Tool):
    """`torchsnapshot.Snapshot.async_take`."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._pending: Any = None

    def _app(self) -> dict[str, Any]:
        from torchsnapshot import StateDict

        return {"app": StateDict(**self.state.tree())}

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot

        self.durable()
        self._pending = Snapshot.async_take(str(self.folder / str(step)), self._app())

    def durable(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def load(self, step: int) -> bool:
        from torchsnapshot import Snapshot

        app = self._app()
        Snapshot(str(self.folder / str(step))).restore(app)
        _copy_into(self.state.tree(), dict(app["app"]))
        return True


class TorchCheckpointing(Tool):
    """`torch_checkpointing.CheckpointManager`, with the configuration that it asks for on a CPU."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        # Its direct writes fail with EINVAL on tensors whose bytes are no multiple of a block.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging), storage_config=storage
            )
        )
        self._future: Any = None

    def save(self, step: int) -> None:
        self.durable()
        self._future = self._manager.save(str(self.folder / str(step)), self.state.tree())

    def durable(self) -> None:
        if self._future is not None:
            self._future.result(WAIT_S)
            self._future = None

    def load(self, step: int) -> bool:
        loaded = self._manager.load(str(self.folder / str(step)), into=self.state.tree())
        _copy_into(self.state.tree(), dict(loaded))
        return True

    def close(self) -> None:
        self._manager.close()


def _copy_into(live: dict[str, dict[str, torch.Tensor]], loaded: dict[str, Any]) -> None:
    """For tools that hand out new tensors: training needs them in the old ones."""
    for part, tensors in live.items():
        for name, tensor in tensors.items():
            if tensor.data_ptr() != loaded[part][name].data_ptr():
                tensor.copy_(loaded[part][name])


TOOLS: dict[str, type[Tool]] = {
    "none": Tool,
    "easyckpt": EasyCkpt,
    "torch_save": TorchSave,
    "dcp_sync": DcpSync,
    "dcp_async": DcpAsync,
    "dcp_async_process": DcpAsyncProcess,
    "torchsnapshot": TorchSnapshot,
    "torch_checkpointing": TorchCheckpointing,
}
"""Name → tool. ``none`` shows the noise."""
