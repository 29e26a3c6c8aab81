"""Whether the kernel killed processes for want of memory in the cgroup of this agent and its workers.

A worker that is killed so leaves no word, only SIGKILL; the kernel counts it. Cgroup v2 counts in
``memory.events`` (children included), v1 in ``memory.oom_control``. Where neither can be read nothing is
said.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
WORD = "oom_kill"
"""Of the kernel's counter; the diagnosis looks for it in a failure's text."""


class OomKills:
    """The kernel's counter of processes that it has killed for want of memory here."""

    def __init__(self, *, root: Path = ROOT, membership: str | None = None) -> None:
        """Find the counter.

        Args:
            root: Where cgroups are mounted.
            membership: Text of ``/proc/self/cgroup``; None reads it.
        """
        self._file = _counter_file(root, _own_membership() if membership is None else membership)
        self._before = self._count()

    def mark(self) -> None:
        """From now on only later kills count."""
        self._before = self._count()

    def since(self) -> int:
        """How many processes were killed since the mark."""
        return max(0, self._count() - self._before)

    def sentence(self) -> str:
        """The same in words; empty where nobody was killed."""
        killed = self.since()
        return f"{WORD}: the memory limit of the cgroup was reached ({killed} killed)\n" if killed else ""

    def _count(self) -> int:
        if self._file is None:
            return 0
        try:
            for line in self._file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == WORD:
                    return int(value)
        except (OSError, ValueError):
            return 0
        return 0


def _own_membership() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _counter_file(root: Path, membership: str) -> Path | None:
    """The first counter that is there; in a container the path may start at the root of what is mounted."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        folder, name = root, "memory.events"
        if "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.oom_control"
        elif number != "0":
            continue
        for place in (folder / path.lstrip("/") / name, folder / name):
            if place.is_file():
                return place
    return None
