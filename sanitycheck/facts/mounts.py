"""Mounts that can hang, each asked by a child of its own: ``store.mounts``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sanitycheck.facts.disk import mount_of, working_folder
from sanitycheck.facts.forked import run_forked
from sanitycheck.facts.proc import Mount, parse_mountinfo, read_text
from sanitycheck.facts.request import Request

__all__ = ["MountFacts", "MountsFacts", "can_hang", "collect"]

NETWORK_TYPES = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "9p",
        "afs",
        "pvfs2",
        "wekafs",
        "fuse",
    )
)
LOCAL_FUSE = frozenset(
    ("fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuse.snapfuse", "fuse.fuse-overlayfs")
)
ANSWER_TIMEOUT_S = 5.0
MOUNTS_MAX = 32
"""More are named but not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFacts:
    """One mount and how it answered.

    Attributes:
        needed_for: Why this run needs it (``checkpoints``, ``working folder``); empty for the others.
        state: ``alive``, ``hung``, ``error`` or ``not asked``.
    """

    path: str
    fstype: str = "nfs4"
    needed_for: str = ""
    state: str = "alive"
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountsFacts:
    """The mounts that can hang."""

    mounts: tuple[MountFacts, ...] = ()
    timeout_s: float = ANSWER_TIMEOUT_S


def can_hang(mount: Mount) -> bool:
    """Whether another machine or process must answer for this mount."""
    kind = mount.fstype
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


def _ask(path: str) -> dict[str, Any]:
    try:
        os.statvfs(path)
        os.stat(path)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {}


def collect(request: Request) -> MountsFacts:
    """Ask every mount that can hang, all at the same time."""
    mounts = parse_mountinfo(read_text("/proc/self/mountinfo") or "")
    by_device = {mount.device: mount for mount in mounts if can_hang(mount)}
    needed: dict[str, str] = {}
    ckpt = request.options.ckpt_path
    for path, reason in ((working_folder(), "working folder"), (ckpt, "checkpoints")):
        # No realpath and no lstat here: either would hang where the mount does.
        if path is not None and "://" not in path:
            mount = mount_of(os.path.abspath(path), mounts=mounts)
            if mount is not None:
                needed[mount.device] = reason
    order = sorted(by_device.values(), key=lambda mount: (mount.device not in needed, mount.path))
    asked = order[:MOUNTS_MAX]
    request.tell(f"asking {len(asked)} mounts")
    timeout_s = min(ANSWER_TIMEOUT_S, request.deadline_s / 2)
    answers = run_forked(lambda index: _ask(asked[index].path), count=len(asked), deadline_s=timeout_s)
    found = []
    for mount, answer in zip(
        order, [*answers, *([{"state": "not asked"}] * (len(order) - len(asked)))], strict=True
    ):
        if answer is None:
            state = "hung"
        else:
            state = answer.get("state") or ("error" if "error" in answer else "alive")
        found.append(
            MountFacts(
                path=mount.path,
                fstype=mount.fstype,
                needed_for=needed.get(mount.device, ""),
                state=state,
                error=(answer or {}).get("error", ""),
            )
        )
    return MountsFacts(mounts=tuple(found), timeout_s=timeout_s)
