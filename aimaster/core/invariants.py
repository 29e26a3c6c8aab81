"""What must hold after every step, whatever was said. Written against the facts, not against the code.

`violations` looks at everything, so it costs time by the number of nodes: the simulator calls it after each
event, a master only when it has replayed its journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aimaster.core.events import RestartScope, TimerKind
from aimaster.core.policy import Cause, Policy
from aimaster.core.state import (
    GONE,
    LIVE_PHASES,
    NO_RANK,
    OVER,
    UNUSABLE,
    JobPhase,
    NodeState,
    State,
)

_MEMBER_STATES = {
    JobPhase.PREPARING: {NodeState.PREPARING, NodeState.PREPARED},
    JobPhase.STARTING: {NodeState.STARTING, NodeState.RUNNING, NodeState.FINISHED},
    JobPhase.RUNNING: {NodeState.RUNNING, NodeState.FINISHED},
}
_STARTED_ALONE = {NodeState.PREPARING, NodeState.STARTING}
"""What a member may be besides while the others run, where the job declares that a node may start alone."""


def violations(state: State, policy: Policy) -> tuple[str, ...]:
    """Every promise that does not hold, as a sentence; empty when all is well."""
    return (*_bookkeeping(state), *_members(state), *_ranks(state), *_bounds(state, policy))


def _bookkeeping(state: State) -> Iterator[str]:
    """What is remembered for speed equals what it stands for."""
    if state.digest() != state.digest_from_scratch():
        yield "the running digest is not the digest of the state"
    usable = {name for name, node in state.nodes.items() if node.state not in UNUSABLE}
    if usable != set(state.usable):
        yield f"usable nodes are {sorted(usable)}, remembered {sorted(state.usable)}"
    present = {name for name, node in state.nodes.items() if node.state not in GONE}
    if present != state.present:
        yield f"nodes that are there: {sorted(present)}, remembered {sorted(state.present)}"
    job = state.job
    if (job.declared is None) != (job.phase is JobPhase.UNDECLARED):
        yield f"phase {job.phase.value} with declaration {job.declared}"
    if (job.exit_code is not None) != (job.phase in OVER):
        yield f"phase {job.phase.value} with exit code {job.exit_code}"


def _members(state: State) -> Iterator[str]:
    """The members of a live generation are its right number, and each does what the phase says."""
    job = state.job
    if job.phase not in LIVE_PHASES:
        if job.awaited:
            yield f"phase {job.phase.value} awaits {sorted(job.awaited)}"
        return
    assert job.declared is not None
    if not job.declared.min_nodes <= len(job.members) <= job.declared.max_nodes:
        yield f"{len(job.members)} members, allowed {job.declared.min_nodes}:{job.declared.max_nodes}"
    alone = job.declared.scope is RestartScope.NODE and job.phase is JobPhase.RUNNING
    allowed = _MEMBER_STATES[job.phase] | (_STARTED_ALONE if alone else set())
    unfinished = 0
    waited_for = {NodeState.PREPARING, NodeState.STARTING}
    for name in job.members:
        node = state.nodes[name]
        done = job.phase is not JobPhase.PREPARING and len(node.finished) > 0
        if node.state not in allowed and not done:
            yield f"member {name} is {node.state.value} while the job is {job.phase.value}"
        told = node.generation <= job.generation if alone else node.generation == job.generation
        if not told and not done:
            yield f"member {name} was told generation {node.generation}, current is {job.generation}"
        if (node.state in waited_for) != (name in job.awaited):
            yield f"member {name} is {node.state.value}, awaited: {name in job.awaited}"
        unfinished += node.state in allowed - {NodeState.FINISHED}
        if alone and (node.unit is not None and node.unit.due_s is not None) != (name in job.awaited):
            yield f"member {name} has unit {node.unit}, awaited: {name in job.awaited}"
    if unfinished != job.unfinished:
        yield f"{unfinished} members are not finished, remembered {job.unfinished}"
    if alone and (TimerKind.UNIT in job.timers) != bool(job.awaited):
        yield f"{len(job.awaited)} members start again, timer: {TimerKind.UNIT in job.timers}"
    for name, node in state.nodes.items():
        outside = name not in job.members
        if outside and node.state not in {NodeState.SPARE, NodeState.ASIDE, NodeState.ENDING, *GONE}:
            yield f"node {name} is {node.state.value} outside the generation"


def _ranks(state: State) -> Iterator[str]:
    """Node ranks and ranks run from 0 without holes or doubles; nobody else has any."""
    job = state.job
    if job.phase not in LIVE_PHASES:
        return
    first_rank = 0
    for node_rank, name in enumerate(job.members):
        node = state.nodes[name]
        if (node.node_rank, node.first_rank) != (node_rank, first_rank) and node.state not in GONE:
            yield f"member {name} has node rank {node.node_rank} and first rank {node.first_rank}"
        first_rank += node.workers
    if first_rank != job.world_size:
        yield f"{first_rank} ranks in a world of {job.world_size}"
    doubles = [name for name, times in Counter(job.members).items() if times > 1]
    if doubles:
        yield f"members with two seats: {doubles}"
    for name, node in state.nodes.items():
        if name not in job.members and node.node_rank != NO_RANK:
            yield f"node {name} has node rank {node.node_rank} outside the generation"


def _bounds(state: State, policy: Policy) -> Iterator[str]:
    """Nothing is spent beyond its budget while the job goes on."""
    job = state.job
    if job.declared is None:
        return
    cap = job.declared.max_restarts
    if cap is not None and job.history.restarts > cap:
        yield f"{job.history.restarts} restarts, at most {cap}"
    if job.phase in OVER:
        return
    if job.history.fruitless >= policy.fruitless_attempts_max:
        yield f"{job.history.fruitless} attempts without progress, and it goes on"
    for cause in Cause:
        limit = policy.budget(cause).limit_for(job.declared.max_nodes)
        newest = max((c.at_s for c in job.history.charges), default=0.0)
        used = job.history.used(cause, now=newest, window_s=policy.budget(cause).window_s)
        if used > limit:
            yield f"{used} charges for {cause.value}, at most {limit}"
