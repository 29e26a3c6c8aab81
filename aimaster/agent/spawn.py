"""Cold starts: a worker or a command that is executed, not forked from a template.

It is executed by way of a few lines of Python that bind its life to the agent's before they execute the real
program (the parent-death signal outlives an exec): the agent has threads of its own, and code that runs
between fork and exec of such a process may hang. That costs some 20 ms, once, beside an import of torch of
seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

LIFE_LINE = """\
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9), 0, 0, 0)
if os.getppid() != parent:
    os._exit(70)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"aimaster: cannot execute {sys.argv[2]}: {error.strerror}\\n")
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
"""PR_SET_PDEATHSIG is 1 and SIGKILL 9 on every Linux; Python had set the two signals to be ignored."""


def spawn(
    argv: Sequence[str], env: Mapping[str, str], *, fds: tuple[int, int, int]
) -> subprocess.Popen[bytes]:
    """Execute a program in a session of its own. Call from the main thread, which must outlive it.

    Args:
        argv: Program and arguments; the program is searched in the ``PATH`` of `env`.
        env: Environment in full.
        fds: Standard input, output and error output of the program; they stay open here.

    Raises:
        OSError: No more processes, or our own interpreter is gone. (A program that cannot be executed ends
            with 126 or 127 as under a shell, and says so on its error output.)
    """
    stdin, stdout, stderr = fds
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LIFE_LINE, str(os.getpid()), *argv],
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def spawn_all(
    lines: Sequence[Sequence[str]],
    envs: Sequence[Mapping[str, str]],
    fds: Sequence[tuple[int, int, int]],
) -> list[int]:
    """Execute several programs, all or none; their process ids. Somebody else waits for them.

    Raises:
        OSError: As `spawn`; none of them is left.
    """
    pids: list[int] = []
    try:
        for line, env, streams in zip(lines, envs, fds, strict=True):
            process = spawn(line, env, fds=streams)
            pids.append(process.pid)
            process.returncode = 0  # the reaper waits for it, not this object
    except OSError:
        for pid in pids:  # not reaped yet: the numbers are still theirs
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    return pids
