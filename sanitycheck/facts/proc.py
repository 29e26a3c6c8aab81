"""Readers and pure parsers of what the kernel tells as text, used by several families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Mount",
    "cgroup_limits",
    "parse_cgroup",
    "parse_key_values",
    "parse_mountinfo",
    "read_text",
]

READ_BYTES_MAX = 1 << 20
"""The kernel refuses to read a setting below /proc/sys with a buffer of 4 MiB and more."""
CGROUP_ROOT = Path("/sys/fs/cgroup")


def read_text(path: str | Path) -> str | None:
    """The text of a small kernel file, None when it is not there or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(READ_BYTES_MAX)
    except OSError:
        return None


def parse_key_values(text: str) -> Mapping[str, int]:
    """``Name:   123 kB`` lines (``/proc/meminfo``) as bytes, or plain numbers where no unit stands."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            values[name.strip()] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    path: str
    device: str
    fstype: str
    source: str
    options: frozenset[str]


def _unescape(text: str) -> str:
    r"""The kernel writes space, tab, newline and backslash as ``\040`` and the like."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """``/proc/self/mountinfo`` (proc_pid_mountinfo(5)); lines of another form are left out."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, tail = left.split(), right.split(" ")
        if not dash or len(fields) < 6 or len(tail) < 3:
            continue
        mounts.append(
            Mount(
                path=_unescape(fields[4]),
                device=fields[2],
                fstype=tail[0],
                source=_unescape(tail[1]),
                options=frozenset(fields[5].split(",")) | frozenset(f"super:{o}" for o in tail[2].split(",")),
            )
        )
    return tuple(mounts)


def parse_cgroup(text: str) -> Mapping[str, str]:
    """``/proc/self/cgroup``: controller → path; the unified hierarchy has the name ''."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def cgroup_limits(controller: str, *names: str) -> tuple[tuple[str, ...], ...]:
    """The contents of the named files of a controller, from this process's group up to the root.

    Both hierarchies are looked at (version 1 has one folder per controller). A group whose files cannot all
    be read is left out, so that the answer may be empty.
    """
    paths = parse_cgroup(read_text("/proc/self/cgroup") or "")
    found: list[tuple[str, ...]] = []
    for root, path in (
        (CGROUP_ROOT, paths.get("")),
        (CGROUP_ROOT / "unified", paths.get("")),
        (CGROUP_ROOT / controller, paths.get(controller)),
    ):
        if path is None:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            texts = [read_text(place / name) for name in names]
            if all(text is not None for text in texts):
                found.append(tuple((text or "").strip() for text in texts))
            if place == root:
                break
    return tuple(found)
