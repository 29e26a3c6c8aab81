"""Sentences for people, rendered from a decision's reason and facts. Nothing decides by them.

A template may name facts that are not there; such a part is left out, so that a sentence never fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from aimaster.core.commands import Facts, Reason

SENTENCE_CHARS_MAX = 500

_TEMPLATES: Mapping[Reason, tuple[str, ...]] = {
    Reason.NOTHING_TO_DO: ("nothing to do",),
    Reason.STALE: ("ignored: it belongs to an older generation or an earlier life",),
    Reason.JOB_DECLARED: ("job declared", " for {min}:{max} nodes"),
    Reason.JOB_REQUEUED: (
        "the job goes on",
        " after generation {generation}",
        ", restarted {restarts} times",
    ),
    Reason.WAITING_FOR_NODES: ("waiting for nodes", ": {have} here, {min} needed", ", {max} wanted"),
    Reason.NODE_IS_SPARE: ("node {node} is a spare",),
    Reason.ENOUGH_NODES: ("enough nodes", ": generation {generation}", " with {nodes} nodes"),
    Reason.NODE_REFUSED: ("node {node} was refused",),
    Reason.NODE_PREPARED: ("node {node} is prepared",),
    Reason.NODE_STARTED: ("workers run on node {node}",),
    Reason.GENERATION_PREPARED: ("all nodes are prepared", ": attempt {attempt}", " of {world_size} ranks"),
    Reason.WORKERS_RUNNING: ("workers run on all nodes",),
    Reason.PROGRESS: ("progress", ": step {step}"),
    Reason.WORKER_FAILED: (
        "worker failed",
        ": rank {rank}",
        " on {node}",
        " by signal {signal}",
        " with exit code {worker_exit_code}",
        " at step {last_step}",
    ),
    Reason.WORKERS_HUNG: (
        "the workers hang ({kind})",
        ": rank {culprits}",
        " on {node}",
        ", no step for {stalled_s} s",
        " after step {last_step}",
    ),
    Reason.EXIT_HUNG: (
        "all other ranks have finished, and rank {culprits} has done nothing for {stalled_s} s",
    ),
    Reason.RANK_SLOW: (
        "the others wait for rank {ranks}",
        " on {node}",
        ": busy {awake} of the time",
        ", {starved} of it waiting for a processor",
        " (others {others_awake})",
    ),
    Reason.RANK_SLOW_NO_MORE: ("the others do not wait for rank {ranks} any more",),
    Reason.NODE_SUSPECT: ("node {node} is silent", " for {silent_s} s"),
    Reason.NODE_HEARD_AGAIN: ("node {node} is heard again",),
    Reason.NODE_LOST: ("node {node} is lost", ", silent for {silent_s} s"),
    Reason.NODE_LEFT: ("node {node} left",),
    Reason.NODE_RESTARTED: ("the agent of node {node} started anew",),
    Reason.NODE_FAILED: (
        "node {node} could not do what it was told",
        ": {what}",
        " (the same on {same_fault} nodes, so that it is held against none of them)",
    ),
    Reason.NODE_CHECKED: (
        "node {node} was checked ({why})",
        ": {looked} checks looked",
        "; {found}",
    ),
    Reason.PREPARE_TIMED_OUT: ("{late} nodes were not prepared in time",),
    Reason.START_TIMED_OUT: ("{late} nodes did not start their workers in time",),
    Reason.BUDGET_SPENT: (
        "the restart budget is spent",
        " ({budget}",
        ": {limit} allowed",
        " in {window_s} s",
    ),
    Reason.NO_PROGRESS: ("{attempts} attempts in a row got no further",),
    Reason.SAME_ERROR_TWICE: ("the same error came again", " at step {step}"),
    Reason.NO_HEALTHY_NODES: ("not enough healthy nodes", ": {have} here", ", {min} needed"),
    Reason.STOP_REQUESTED: ("stopped", " by signal {signal}", " on {node}"),
    Reason.WORKER_FINISHED: ("rank {rank} finished",),
    Reason.JOB_FINISHED: ("all ranks finished",),
    Reason.RESENT: ("node {node} is back; what it may have missed was sent again",),
}


_GIVING_UP = frozenset({Reason.BUDGET_SPENT, Reason.NO_PROGRESS, Reason.SAME_ERROR_TWICE})


def last_words(reason: Reason, facts: Facts) -> str:
    """Why a job ends; where it was given up, also what failed last."""
    text = sentence(reason, facts)
    if reason in _GIVING_UP and "rank" in facts:
        text = f"{sentence(Reason.WORKER_FAILED, facts)}; {text}"
    elif reason in _GIVING_UP and "stalled_s" in facts:
        text = f"{sentence(Reason.WORKERS_HUNG, facts)}; {text}"
    elif reason in _GIVING_UP and "same_fault" in facts:
        text = f"{sentence(Reason.NODE_FAILED, facts)}; {text}"
    return text[:SENTENCE_CHARS_MAX]


def sentence(reason: Reason, facts: Facts) -> str:
    """One sentence without a full stop, at most `SENTENCE_CHARS_MAX` long."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in facts.items()}
    parts: list[str] = []
    for part in _TEMPLATES[reason]:
        try:
            parts.append(part.format_map(shown))
        except KeyError:
            continue
    text = "".join(parts) or reason.value.replace("_", " ")
    if text.count("(") > text.count(")"):
        text += ")"
    return text[:SENTENCE_CHARS_MAX]
