"""Starts `aimaster run` as a user does, in folders of the test, and looks at it from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
LOOK_S = 0.05


@dataclass(slots=True)
class Run:
    """One agent, or rather the command that a user typed on one node."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    trouble: Path
    env: dict[str, str]
    sent: list[int] = field(default_factory=list)

    @property
    def stdout(self) -> str:
        """What it wrote to stdout so far."""
        return self._written(self.output)

    @property
    def stderr(self) -> str:
        """What it wrote to stderr so far."""
        return self._written(self.trouble)

    def _written(self, path: Path) -> str:
        """Whole lines only while it runs: `print` writes a line and its end one after the other."""
        ended = self.process.poll() is not None
        text = path.read_text()
        return text if ended else text[: text.rfind("\n") + 1]

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"still running after {timeout_s} s\n{self.stdout}\n{self.stderr}") from None

    def send(self, number: int) -> None:
        """Send a signal to the agent alone."""
        self.sent.append(number)
        self.process.send_signal(number)

    def status(self) -> dict[str, Any]:
        """What `aimaster status --json` says; empty while there is nothing to ask."""
        done = subprocess.run(
            [*AIMASTER, "status", "--json", "--run-dir", str(self.run_dir)],
            capture_output=True,
            env=self.env,
            timeout=DEADLINE_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def pids(self, role: str, **match: Any) -> list[int]:
        """Processes of that role, by `status`."""
        rows = self.status().get("processes", [])
        return [
            row["pid"]
            for row in rows
            if row["role"] == role and all(row[name] == value for name, value in match.items())
        ]


AIMASTER = (sys.executable, "-m", "aimaster")


def start_run(
    folder: Path,
    *words: str | Path,
    name: str = "node",
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    stdin: Any = subprocess.DEVNULL,
) -> Run:
    """Start ``aimaster run WORDS`` with its folders below `folder`, named `name`."""
    run_dir = folder / name
    run_dir.mkdir(parents=True, exist_ok=True)
    full = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **(env or {})}
    output, trouble = folder / f"{name}.out", folder / f"{name}.err"
    words_ = [*prefix, *AIMASTER, "run", "--run-dir", str(run_dir), *(str(word) for word in words)]
    with output.open("wb") as out, trouble.open("wb") as err:
        process = subprocess.Popen(words_, stdin=stdin, stdout=out, stderr=err, env=full, cwd=folder)
    return Run(process=process, run_dir=run_dir, output=output, trouble=trouble, env=full)


def until(true: Callable[[], Any], what: str, *, timeout_s: float = DEADLINE_S) -> Any:
    """Wait until something is so, and return it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(LOOK_S)
    raise AssertionError(f"not so within {timeout_s} s: {what}")


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """Write a training script."""
    path = folder / name
    path.write_text(text)
    return path


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def alive(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def below(folder: Path) -> list[str]:
    """Everything in a folder, for comparison with nothing."""
    try:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []
    except FileNotFoundError as error:  # somebody removes it just now
        return [str(error.filename)]
