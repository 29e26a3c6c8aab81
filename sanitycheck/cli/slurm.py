"""This node's place in a group, from what Slurm says (``--nnodes auto``)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sanitycheck.errors import UsageError

__all__ = ["GROUP_PORT", "first_host", "slurm_place"]

GROUP_PORT = 29450
_FIRST = re.compile(r"^([^\[,]+)(?:\[(\d+))?([^\],]*\])?")


def first_host(nodelist: str) -> str:
    """The first node of Slurm's compressed list: ``gpu[03-07,12],login1`` → ``gpu03``."""
    match = _FIRST.match(nodelist.strip())
    if not match:
        raise UsageError(f"Slurm's list of nodes cannot be read: {nodelist!r}")
    return match[1] + (match[2] or "")


def slurm_place(environment: Mapping[str, str]) -> tuple[int, int, str]:
    """(nodes, rank of this node, endpoint).

    Raises:
        UsageError: This is no step of a Slurm job.
    """
    try:
        nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment["SLURM_JOB_NUM_NODES"])
        rank = int(environment["SLURM_NODEID"])
        listed = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"--nnodes auto: this is no step of a Slurm job ({error} is missing); start it with srun, one "
            "task per node, or give --nnodes, --node-rank and --rdzv-endpoint"
        ) from error
    return nodes, rank, f"{first_host(listed)}:{GROUP_PORT}"
