"""``python -m aimaster.agent.sweep BASE JOB NODE``: remove a run directory that no agent holds.

The last act of a saver that outlived its agent. If a new agent of the node has come meanwhile, the directory
is that agent's, and nothing happens.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aimaster.agent.rundir import RunDir, claim_run_dir
from aimaster.errors import SetupError
from aimaster.ids import JobId, NodeId


def sweep_command(run_dir: RunDir) -> tuple[str, ...]:
    """The words that start this module for a run directory."""
    job = run_dir.path.parent.name
    return (sys.executable, "-m", "aimaster.agent.sweep", str(run_dir.base), job, run_dir.node)


def main(argv: list[str]) -> int:
    """Remove it if nobody holds it."""
    base, job, node = argv
    if not Path(base, job, node).is_dir():
        return 0
    try:
        run_dir = claim_run_dir(Path(base), JobId(job), wanted=NodeId(node), env=os.environ)
    except SetupError:
        return 0
    run_dir.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
