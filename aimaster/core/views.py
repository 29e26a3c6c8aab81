"""Frozen pictures of the state, for status and for tests."""

from __future__ import annotations

from aimaster.core.events import TimerKind
from aimaster.core.policy import Cause, Policy
from aimaster.core.state import (
    BudgetView,
    JobPhase,
    JobRecord,
    JobView,
    NodeRecord,
    NodeView,
    State,
    WaitingFor,
)


def job_view(state: State, policy: Policy, now: float) -> JobView:
    """All that readers may know. `now` only says which charges are still in their window."""
    job = state.job
    declared = job.declared
    return JobView(
        job=declared.job if declared else None,
        phase=job.phase,
        generation=job.generation,
        attempt=job.starts - 1,
        min_nodes=declared.min_nodes if declared else 0,
        max_nodes=declared.max_nodes if declared else 0,
        max_restarts=declared.max_restarts if declared else None,
        restarts=job.history.restarts,
        world_size=job.world_size,
        members=job.members,
        nodes=tuple(node_view(node) for node in state.nodes.values()),
        memory_step=job.memory_step,
        durable_step=job.durable_step,
        budgets=_budgets(job, policy, now),
        timers=tuple(sorted(job.timers.items(), key=lambda item: item[0].value)),
        waiting_for=_waiting_for(job),
        awaited=tuple(sorted(job.awaited)),
        exit_code=job.exit_code,
        end_reason=job.end_reason,
        sentence=job.sentence,
    )


def node_view(node: NodeRecord) -> NodeView:
    """One node."""
    return NodeView(
        node=node.id,
        incarnation=node.incarnation,
        state=node.state,
        suspect=node.suspect,
        address=node.address,
        saver_address=node.saver_address,
        workers=node.workers,
        node_rank=node.node_rank,
        first_rank=node.first_rank,
        generation=node.generation,
        finished=len(node.finished),
        strikes=node.strikes,
    )


def _budgets(job: JobRecord, policy: Policy, now: float) -> tuple[BudgetView, ...]:
    max_nodes = job.declared.max_nodes if job.declared else 0
    return tuple(
        BudgetView(
            cause=cause,
            used=job.history.used(cause, now=now, window_s=policy.budget(cause).window_s),
            limit=policy.budget(cause).limit_for(max_nodes),
            window_s=policy.budget(cause).window_s,
        )
        for cause in Cause
    )


def _waiting_for(job: JobRecord) -> WaitingFor:
    if job.phase is JobPhase.WAITING:
        return WaitingFor.LAST_CALL if TimerKind.LAST_CALL in job.timers else WaitingFor.NODES
    return {
        JobPhase.UNDECLARED: WaitingFor.JOB,
        JobPhase.PREPARING: WaitingFor.PREPARATION,
        JobPhase.STARTING: WaitingFor.WORKERS,
        JobPhase.ENDING: WaitingFor.GOODBYES,
    }.get(job.phase, WaitingFor.NOTHING)
