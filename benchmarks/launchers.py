"""The launchers that are compared, and how a training is started and surely ended under each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

LOOP = Path(__file__).resolve().with_name("ddp_loop.py")
SCRIPTS = Path(sysconfig.get_path("scripts"))
COMMANDS = {
    "torchrun": [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"],
    "aimaster": [str(SCRIPTS / "aimaster"), "run", "--standalone", "--nproc-per-node", "2"],
    "aimaster-cold": [str(SCRIPTS / "aimaster"), "run", "--standalone", "--no-warm", "--nproc-per-node", "2"],
}
"""Name → command; the script's path is appended. Two ranks each."""

TORCHRUN_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun 2.13 keeps one store over restarts, in which gloo of the next attempt may read the last attempt's
addresses and fail to connect. torchrun must not lose by that; the other launchers do not read this."""

STOP_LIMIT_S = 20.0


def end_on_sigterm() -> None:
    """Let SIGTERM leave through the ``finally`` of whoever has started something."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def start(name: str, environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start the training loop under a launcher, in a session of its own."""
    with open(output, "wb") as file:
        return subprocess.Popen(
            [*COMMANDS[name], str(LOOP)],
            env={**os.environ, **TORCHRUN_OWN_STORE, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], pids: Iterable[int]) -> None:
    """End a launcher, politely first, then its session and the workers that it may have left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pid in pids:
        try:
            if str(LOOP).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue
