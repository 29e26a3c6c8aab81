"""Whether something that happened casts a suspicion on a node, and when a suspicion is worth another look.

A look costs a node some processes and a second. So it follows what may lie in the node, not every failure: a
traceback of the script's own, or a kill without a word, says nothing about the machine.
"""

from __future__ import annotations

from aimaster.core.diagnosis import Blame, Finding
from aimaster.core.events import Suspicion

__all__ = ["PAUSE_S", "falls_on_node", "worth_a_look"]

PAUSE_S = 60.0
"""At least so long between two looks at a node whose workers go on, however often it is suspected."""

_OF_THE_NODE = frozenset({Blame.NODE, Blame.DEVICE, Blame.NETWORK, Blame.STORAGE})


def falls_on_node(finding: Finding | None) -> bool:
    """Whether a failure may have its cause in the node on which it was seen."""
    return finding is not None and finding.rule.blame in _OF_THE_NODE


def worth_a_look(why: Suspicion, *, since_last_s: float | None) -> bool:
    """Whether to look now.

    Args:
        why: What the suspicion is.
        since_last_s: Since the last look began; None where there was none.
    """
    if why in (Suspicion.FAILURE, Suspicion.HANG):
        return True  # the workers have ended, and start again only after it
    return since_last_s is None or since_last_s >= PAUSE_S
