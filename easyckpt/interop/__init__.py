"""Checkpoints to and from other programs' formats, from a folder on storage, without a running job.

===============  ==========================================  =================================
format           outwards                                    inwards
===============  ==========================================  =================================
``torch``        a file for a weights-only ``torch.load``    such a file
``huggingface``  a model's weights as safetensors shards     such a folder, or one such file
``dcp``          a folder of ``dcp.save``                    such a folder
``deepspeed``    a universal checkpoint                      such a folder
===============  ==========================================  =================================

Everything is proved while it is read, what is written appears whole or not at all, and tensors pass
through mapped files, so that no checkpoint has to fit into memory. What comes in is committed as a step
like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyckpt.errors import Misuse
from easyckpt.interop.commit import commit_state, scratch_folder
from easyckpt.interop.dcpfolder import METADATA_FILE, export_dcp, read_dcp
from easyckpt.interop.huggingface import SHARD_BYTES, export_huggingface, read_huggingface
from easyckpt.interop.stored import OnBytes, open_step
from easyckpt.interop.torchfile import export_torch, read_torch
from easyckpt.interop.universal import export_universal, is_universal, read_universal
from easyckpt.paths import StepName
from easyckpt.storage import open_storage

__all__ = ["FORMATS", "ImportOptions", "export_step", "import_state"]

FORMATS = ("torch", "huggingface", "dcp", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What a foreign checkpoint does not say about itself."""

    key: str = "model"
    """Key that a bare model gets in the state."""
    objects: tuple[str, ...] = ()
    """Keys whose values belong to objects with ``load_state_dict``, such as a data loader."""
    parameters: tuple[str, ...] = ()
    """Names of the model's parameters, in the optimizer's order."""


def export_step(
    root: str,
    target: str,
    *,
    to: str,
    step: int | None = None,
    key: str | None = None,
    rank: int = 0,
    on_bytes: OnBytes | None = None,
) -> int:
    """Write a step of a checkpoint folder in another format.

    Args:
        root: the checkpoint folder, or a URL of one.
        target: a local file or folder that is not there yet.
        to: one of `FORMATS`.
        step: which; None is the newest.
        key: of the model in the state, where the format holds a model.
        rank: whose values are taken where ranks differ.
        on_bytes: told (bytes done, bytes to do).

    Returns:
        The step.

    Raises:
        Misuse: the target is there already, or an argument is not possible.
        CheckpointFault: the step is damaged, or not there.
        StorageError: a storage refuses.
    """
    _check_format(to)
    stored = open_step(open_storage(root), step=step, rank=rank)
    if to == "torch":
        export_torch(stored, target, on_bytes=on_bytes)
    elif to == "dcp":
        export_dcp(stored, target, on_bytes=on_bytes)
    elif to == "deepspeed":
        export_universal(stored, target, key=key, on_bytes=on_bytes)
    else:
        export_huggingface(stored, target, key=key, shard_bytes=SHARD_BYTES, on_bytes=on_bytes)
    return stored.step


def import_state(
    source: str,
    root: str,
    *,
    step: int,
    options: ImportOptions | None = None,
    on_bytes: OnBytes | None = None,
) -> StepName:
    """Commit a foreign checkpoint as a step of a checkpoint folder.

    Args:
        source: a local file or folder.
        root: the checkpoint folder, or a URL of one; made if it is not there.
        step: training step that it belongs to.
        options: what the source does not say about itself.
        on_bytes: told (bytes done, bytes to do).

    Returns:
        The step and its generation.

    Raises:
        Misuse: the source is not there, holds what only unpickling could read, or a newer step is there.
        CorruptCheckpoint: the source cannot be read.
        StorageError: a storage refuses.
    """
    storage = open_storage(root)
    chosen = options if options is not None else ImportOptions()
    kind = detect(source)
    tree: dict[str, Any]
    if kind == "torch":
        tree = read_torch(source, objects=chosen.objects, parameters=chosen.parameters)
    elif kind == "dcp":
        tree = read_dcp(
            source, folder=scratch_folder(storage), objects=chosen.objects, parameters=chosen.parameters
        )
    elif kind == "deepspeed":
        tree = read_universal(source, key=chosen.key)
    else:
        tree = {chosen.key: read_huggingface(source)}
    return commit_state(storage, tree, step=step, on_bytes=on_bytes)


def detect(source: str) -> str:
    """The format of what lies there.

    Raises:
        Misuse: it is not there, or not known.
    """
    path = Path(source)
    if path.is_dir():
        if (path / METADATA_FILE).is_file():
            return "dcp"
        if is_universal(path):
            return "deepspeed"
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return "huggingface"
    elif path.is_file():
        return "huggingface" if path.suffix == ".safetensors" else "torch"
    else:
        raise Misuse("there is no such file or folder", where=str(path))
    raise Misuse("the folder is of none of the formats that can be read", where=str(path))


def _check_format(name: str) -> None:
    if name not in FORMATS:
        raise Misuse(f"no format {name!r}", hint=f"one of {', '.join(FORMATS)}")
