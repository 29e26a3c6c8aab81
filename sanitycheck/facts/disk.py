"""Space, inodes and read-only state of the file systems that a training writes to: ``host.disk``."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sanitycheck.facts.proc import Mount, parse_mountinfo, read_text
from sanitycheck.facts.request import Request
from sanitycheck.thresholds import GIB

__all__ = [
    "DiskFacts",
    "VolumeFacts",
    "collect",
    "emergency_read_only",
    "existing_ancestor",
    "mount_of",
    "working_folder",
]

EXT4 = Path("/sys/fs/ext4")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeFacts:
    """One file system, seen from one folder on it.

    Attributes:
        used_for: Why it is looked at (``root``, ``temp``, ``checkpoints``, ``working folder``).
        inodes: 0 where the file system does not count them.
        turned_read_only: The kernel made it read-only after an error; plain read-only mounts are not meant.
    """

    path: str = "/"
    used_for: str = "root"
    bytes_total: int = 500 * GIB
    bytes_free: int = 250 * GIB
    inodes: int = 0
    inodes_free: int = 0
    read_only: bool = False
    turned_read_only: bool = False
    errors_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The file systems in use; ``temp_found`` is False when no folder for temporary files can be written."""

    volumes: tuple[VolumeFacts, ...] = (VolumeFacts(),)
    temp_found: bool = True


def mount_of(path: str, *, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that a path lies on: the longest mount point above it, the last mounted where several
    match."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.path or path.startswith(mount.path.rstrip("/") + "/")
        if inside and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


def emergency_read_only(mount: Mount | None) -> bool:
    """Whether the kernel itself turned a file system read-only.

    The mount point is still ``rw`` while the file system below is ``ro``: nobody who asks for a read-only
    mount gets that. Newer kernels say ``emergency_ro``.
    """
    if mount is None:
        return False
    plain = (
        "rw" in mount.options and "super:ro" in mount.options and "super:errors=remount-ro" in mount.options
    )
    return plain or "super:emergency_ro" in mount.options


def existing_ancestor(path: str) -> str:
    """The path itself if it exists, else the nearest folder above it that does."""
    place = os.path.abspath(path)
    while not os.path.lexists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    return place


def working_folder() -> str | None:
    """Where this process works; None when that folder was removed under it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _volume(path: str, *, used_for: str, mounts: tuple[Mount, ...]) -> VolumeFacts:
    stat = os.statvfs(path)
    mount = mount_of(os.path.realpath(path), mounts=mounts)
    errors = ""
    if mount is not None and mount.fstype == "ext4":
        errors = read_text(EXT4 / os.path.basename(mount.source) / "errors_count") or ""
    return VolumeFacts(
        path=path,
        used_for=used_for,
        bytes_total=stat.f_blocks * stat.f_frsize,
        bytes_free=stat.f_bavail * stat.f_frsize,
        inodes=stat.f_files,
        inodes_free=stat.f_favail,
        read_only=bool(stat.f_flag & os.ST_RDONLY),
        turned_read_only=emergency_read_only(mount),
        errors_count=int(errors) if errors.strip().isdigit() else 0,
    )


def collect(request: Request) -> DiskFacts:
    """Look at root, the temporary folder, the working folder and a local checkpoint folder, each device
    once."""
    places: list[tuple[str, str]] = [("/", "root")]
    temp_found = True
    request.tell("finding a folder for temporary files")
    try:
        places.append((tempfile.gettempdir(), "temp"))
    except FileNotFoundError:
        temp_found = False
    ckpt = request.options.ckpt_path
    if ckpt is not None and "://" not in ckpt:
        request.tell(f"looking for {ckpt}")
        places.append((existing_ancestor(ckpt), "checkpoints"))
    folder = working_folder()
    if folder is not None:
        places.append((folder, "working folder"))
    mounts = parse_mountinfo(read_text("/proc/self/mountinfo") or "")
    volumes: dict[int, VolumeFacts] = {}
    for path, used_for in places:
        request.tell(f"looking at {path}")
        device = os.stat(path).st_dev
        if device not in volumes:
            volumes[device] = _volume(path, used_for=used_for, mounts=mounts)
    return DiskFacts(volumes=tuple(volumes.values()), temp_found=temp_found)
