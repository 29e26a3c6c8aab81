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
    "torchrun": [str(SCRIPTS / "torchrun"), "--standalone", "--max-restarts", "3"],
    "aimaster": [str(SCRIPTS / "aimaster"), "run", "--standalone"],
    "aimaster-cold": [str(SCRIPTS / "aimaster"), "run", "--standalone", "--no-warm"],
}
"""Name → command; the number of ranks and the script's path are appended."""

TORCHRUN_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun 2.13 keeps one store over restarts, in which gloo of the next attempt may read the last attempt's
addresses and fail to connect. torchrun must not lose by that; the other launchers do not read this."""

STOP_LIMIT_S = 20.0


def end_on_sigterm() -> None:
    """Let SIGTERM leave through the ``finally`` of whoever has started something."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def start(
    name: str, environment: dict[str, str], output: Path, *, ranks: int = 2, core: int | None = None
) -> subprocess.Popen[bytes]:
    """Start the training loop under a launcher, in a session of its own; on one core alone if it is named."""
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    with open(output, "wb") as file:
        return subprocess.Popen(
            [*pinned, *COMMANDS[name], "--nproc-per-node", str(ranks), str(LOOP)],
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
