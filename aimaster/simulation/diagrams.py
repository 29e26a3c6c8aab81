"""The page ``docs/explain/state-machines.md``, written from the tables of the core.

Run ``python -m aimaster.simulation.diagrams > docs/explain/state-machines.md`` after a change of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from aimaster.core.state import JobPhase, NodeState
from aimaster.core.transitions import JOB_MOVES, NODE_MOVES, SUSPICION_MOVES, Suspicion

S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=Enum)

_INTRO = """\
# State machines of the core

Written from the tables in `aimaster/core/transitions.py` by `python -m aimaster.simulation.diagrams`; a test
fails when this page is older than they are. What a state or a trigger means stands beside its name in
`aimaster/core/state.py` and `aimaster/core/transitions.py`. A pair without a row is an error that names the
state, the trigger and the node, and changes nothing.
"""


def page() -> str:
    """The documentation page, as Markdown with Mermaid diagrams."""
    parts = [_INTRO]
    parts.append(_section("Job", JOB_MOVES, JobPhase.UNDECLARED))
    parts.append(_section("Node", NODE_MOVES, NodeState.SPARE))
    parts.append(_section("Suspicion about a node", SUSPICION_MOVES, Suspicion.TRUSTED))
    return "\n".join(parts)


def _section(title: str, moves: Mapping[tuple[S, T], S], start: Enum) -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), target in moves.items():
        if state is not target:
            arrows.setdefault((state.value, target.value), []).append(trigger.value)
    diagram = [f"    [*] --> {start.value}"]
    diagram += [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in arrows.items()]
    table = [f"| {s.value} | {t.value} | {target.value} |" for (s, t), target in moves.items()]
    return "\n".join(
        [
            f"## {title}\n",
            "```mermaid\nstateDiagram-v2",
            *diagram,
            "```\n",
            "| state | trigger | next state |\n| --- | --- | --- |",
            *table,
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
