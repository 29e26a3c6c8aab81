"""The agent as parent of what it did not start itself: ends noticed at once, orphans taken in.

The agent is a child subreaper, so every process that descends from it stays in its tree, however often it
forks and whatever session it moves to: descent is the proof that a process is ours. To tell workers and
what they left behind from the agent's own helpers (saver, master, probes) there are three signs, any of
which makes a direct child a helper:

- it was registered with `own`,
- it was executed with the agent's mark in ``AIMASTER_OWNER``, which `os.environ` of the agent carries, so
  that whatever the agent or a library in it starts has it,
- it shares the agent's session.

Workers are executed with another mark. An orphan whose environment was cleared and that left its session
bears no sign at all, and is a worker's: **a helper that is started with an environment of its own in a
session of its own must be registered.**

Zombies are reaped by whoever waits for them; an orphan's, for which nobody does, after `ORPHAN_GRACE_S`.
That is what keeps an agent that is process 1 of a container from filling the process table.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aimaster.agent import prctl, proc

OWNER_VARIABLE = "AIMASTER_OWNER"
AGENT_MARK = "agent"
WORKER_MARK = "worker"
ORPHAN_GRACE_S = 10.0
TRACED_LOOK_S = 0.1

OnEnd = Callable[[int], None]
"""Called in the event loop with the wait status (see `os.waitstatus_to_exitcode`)."""


class Reaper:
    """Watches and reaps children of this process. Made and used in the event loop's thread, the main one."""

    def __init__(self, run_dir: Path) -> None:
        """Become a child subreaper and mark the environment of what this process will start.

        Args:
            run_dir: The node's run directory, locked by this agent: it names the owner, so that two jobs, or
                two agents on one machine, never take each other's processes for their own.
        """
        prctl.become_subreaper()
        self._pid = os.getpid()
        self._session = os.getsid(0)
        digest = hashlib.blake2s(os.fsencode(run_dir.absolute()), digest_size=8).hexdigest()
        self.worker_token = f"{digest}.{WORKER_MARK}"
        self._agent_token = f"{digest}.{AGENT_MARK}"
        os.environ[OWNER_VARIABLE] = self._agent_token
        self._own: set[int] = {self._pid}
        self._watched: dict[int, OnEnd] = {}
        self._zombies: dict[int, float] = {}

    def own(self, pid: int) -> None:
        """Register a helper that somebody else waits for; it and its descendants are never touched here."""
        self._own.add(pid)

    def disown(self, pid: int) -> None:
        """Forget a helper that has been waited for."""
        self._own.discard(pid)

    def watch(self, pid: int, on_end: OnEnd) -> None:
        """Reap a child as soon as it ends, then call `on_end`."""
        self._watched[pid] = on_end
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3, or a sandbox without it
            threading.Thread(target=self._wait_in_thread, args=(pid, loop), daemon=True).start()
            return
        loop.add_reader(fd, self._ended, pid, fd)

    def sweep(self) -> None:
        """Reap orphans that have ended; call every few seconds. Cheap."""
        now = time.monotonic()
        zombies = {}
        for pid in prctl.children(self._pid):
            entry = proc.stat(pid)
            if entry is None or not entry.ended or pid in self._watched or pid in self._own:
                continue
            since = self._zombies.get(pid, now)
            if now - since < ORPHAN_GRACE_S:
                zombies[pid] = since
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        self._zombies = zombies

    def leftovers(self, *, keep: Sequence[int] = ()) -> list[proc.ProcessStat]:
        """Live processes that are workers of this node or come from one, of an earlier agent's too.

        Args:
            keep: Workers that are left alone with all their descendants.
        """
        everything = proc.everything()
        children = [entry for entry in everything.values() if entry.ppid == self._pid]
        helpers = proc.descendants((e.pid for e in children if self._is_helper(e)), everything)
        below = proc.descendants((e.pid for e in children if e.pid not in helpers), everything)
        kept = proc.descendants(keep, everything)
        found = []
        for pid, entry in everything.items():
            if entry.ended or pid in helpers or pid in kept or pid == self._pid:
                continue
            # What an earlier agent's workers left is no descendant any more; only its mark tells.
            if pid in below or proc.variable(pid, OWNER_VARIABLE) == self.worker_token:
                found.append(entry)
        return found

    def _is_helper(self, entry: proc.ProcessStat) -> bool:
        if entry.pid in self._watched:
            return False
        if entry.pid in self._own:
            return True
        mark = proc.variable(entry.pid, OWNER_VARIABLE)
        return mark == self._agent_token or (mark is None and entry.session == self._session)

    def _ended(self, pid: int, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._reap(pid)

    def _wait_in_thread(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            loop.call_soon_threadsafe(self._reap, pid)

    def _reap(self, pid: int) -> None:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            # Somebody else took its status; the only sign that is left is that it has ended.
            done, status = pid, 255 << 8
        if done == 0:
            # It has ended, but a debugger that traces it keeps it: to wait here would stop the agent.
            asyncio.get_running_loop().call_later(TRACED_LOOK_S, self._reap, pid)
            return
        on_end = self._watched.pop(pid, None)
        if on_end is not None:
            on_end(status)
