"""Runs `tests/integration/worker_agent.py` in a process of its own, as an agent is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AGENT = Path(__file__).parent / "integration" / "worker_agent.py"
DEADLINE_S = 170.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """What an agent saw and what came out of it."""

    seen: list[dict[str, Any]]
    stdout: str
    stderr: str


def write_spec(folder: Path, spec: dict[str, Any]) -> Path:
    """Write a specification for the agent; its result lies beside it as ``result.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    spec.setdefault("run_dir", str(folder / "run"))
    spec.setdefault("result", str(folder / "result.json"))
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def start_agent(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start an agent and leave it running. `popen` in the options goes to `subprocess.Popen`."""
    popen = options.pop("popen", {})
    path = write_spec(folder, options)
    return subprocess.Popen([sys.executable, str(AGENT), str(path)], **popen)


def run_agent(folder: Path, *, cwd: Path | None = None, stdin: bytes = b"", **spec: Any) -> AgentRun:
    """Run an agent to its end."""
    path = write_spec(folder, spec)
    done = subprocess.run(
        [sys.executable, str(AGENT), str(path)],
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env=os.environ,
        timeout=DEADLINE_S,
        check=False,
    )
    result = folder / "result.json"
    assert result.exists(), done.stderr.decode()
    return AgentRun(
        seen=json.loads(result.read_text()), stdout=done.stdout.decode(), stderr=done.stderr.decode()
    )
