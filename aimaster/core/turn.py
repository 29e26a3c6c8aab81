"""One turn of the machine: what a handler works with while it answers one event.

A turn holds the state, the policy and the time, and collects commands, reason and facts. Every change of a
phase or a node's state goes through it, and so through the tables.
"""

from __future__ import annotations

from aimaster.core.commands import CancelTimer, Command, Decision, Reason, SetTimer
from aimaster.core.events import RestartScope, TimerKind
from aimaster.core.policy import Policy
from aimaster.core.state import JobPhase, JobRecord, NodeRecord, NodeState, State, Timer
from aimaster.core.transitions import JobTrigger, NodeTrigger, move_job, move_node
from aimaster.ids import Generation, NodeId


class Turn:
    """What one call of `Machine.step` works with. Made for one event, then thrown away."""

    def __init__(self, state: State, policy: Policy, now: float) -> None:
        self.state = state
        self.policy = policy
        self.now = now
        self.commands: list[Command] = []
        self.reason = Reason.NOTHING_TO_DO
        self.facts: dict[str, int | float | str] = {}

    @property
    def job(self) -> JobRecord:
        """The job's record."""
        return self.state.job

    @property
    def min_nodes(self) -> int:
        """The job's minimum; only when it is declared."""
        assert self.job.declared is not None
        return self.job.declared.min_nodes

    @property
    def max_nodes(self) -> int:
        """The job's maximum; only when it is declared."""
        assert self.job.declared is not None
        return self.job.declared.max_nodes

    @property
    def by_node(self) -> bool:
        """Whether a node's workers may be started again while the others go on."""
        return self.job.declared is not None and self.job.declared.scope is RestartScope.NODE

    def generation_of(self, node: NodeRecord) -> Generation:
        """The generation that counts for a node: a member that may be started again alone has its own."""
        own = self.by_node and self.job.phase is JobPhase.RUNNING and self.is_member(node.id)
        return node.generation if own else self.job.generation

    def say(self, reason: Reason, **facts: int | float | str | None) -> None:
        """Set the reason and add facts; a fact that is None is left out."""
        self.reason = reason
        self.facts.update({name: value for name, value in facts.items() if value is not None})

    def send(self, command: Command) -> None:
        """Add a command."""
        self.commands.append(command)

    def move_job(self, trigger: JobTrigger) -> None:
        """Move the job by its table."""
        self.job.phase = move_job(self.job.phase, trigger)

    def move_node(self, node: NodeRecord, trigger: NodeTrigger) -> None:
        """Move a node by its table."""
        node.state = move_node(node.state, trigger, node=node.id)
        self.state.touch(node)

    def set_timer(self, kind: TimerKind, after_s: float) -> None:
        """Start a timer for the current generation, or start it anew."""
        generation = self.job.generation
        self.job.timers[kind] = Timer(generation=generation, deadline_s=self.now + after_s)
        self.send(SetTimer(timer=kind, generation=generation, after_s=after_s))

    def cancel_timers(self, *kinds: TimerKind) -> None:
        """Stop those timers that run."""
        for kind in kinds:
            if self.job.timers.pop(kind, None) is not None:
                self.send(CancelTimer(timer=kind))

    def members(self) -> list[NodeRecord]:
        """The members of the generation, by node rank."""
        return [self.state.nodes[name] for name in self.job.members]

    def is_member(self, node: NodeId) -> bool:
        """Whether the node has a seat in the generation."""
        record = self.state.nodes.get(node)
        rank = -1 if record is None else record.node_rank
        return 0 <= rank < len(self.job.members) and self.job.members[rank] == node

    def legal(self, node: NodeRecord, trigger: NodeTrigger) -> NodeState:
        """Where the trigger would lead; raises `IllegalEvent` before anything has changed."""
        return move_node(node.state, trigger, node=node.id)

    def decision(self) -> Decision:
        """What the turn came to."""
        return Decision(commands=tuple(self.commands), reason=self.reason, facts=dict(self.facts))
