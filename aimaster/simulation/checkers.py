"""What must never happen, looked for after every event by code that shares nothing with the core's.

The checkers know the contract only: events in, commands out. They keep their own small books and compare.
The one exception is `aimaster.core.invariants`, which looks at the machine from inside, and is asked as well.
"""

from __future__ import annotations

from collections.abc import Callable

from aimaster.core.commands import Decision, EndNode, FinishJob, Prepare, Reason, StartWorkers
from aimaster.core.events import (
    Event,
    JobDeclared,
    NodeEvent,
    NodeFailed,
    NodeJoined,
    NodePrepared,
    RestartScope,
    StepCommitted,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkersStarted,
)
from aimaster.core.invariants import violations
from aimaster.core.machine import Machine
from aimaster.core.policy import Cause, Policy
from aimaster.core.state import OVER, NodeState
from aimaster.ids import Generation, Incarnation, NodeId
from aimaster.journal.codec import decode_decision, decode_event, encode

TRACE_MAX = 400
"""How many steps are kept for the report of a failure."""


class Violation(AssertionError):
    """A promise was broken. Says which, after which event, and how it came to that."""


class Checkers:
    """Books over one run. `aimaster.simulation.master.SimMaster` shows it every step."""

    def __init__(self, policy: Policy, *, inside_every: int = 1) -> None:
        self.trace: list[str] = []
        self.steps = 0
        self.starts: dict[Generation, dict[NodeId, StartWorkers]] = {}
        self.exit_code: int | None = None
        self.failures = 0
        """How often a worker failed or a node went, as far as it was said."""
        self._policy = policy
        self._inside_every = inside_every
        self._shadow = Machine(policy)
        self._cap: int | None = None
        self._alone = False
        self._newest: dict[NodeId, Generation] = {}
        """The generation that each node was told last."""
        self._seats: dict[int, StartWorkers] = {}
        """By node rank, the newest start of a job whose nodes start alone."""
        self._generation = Generation(0)
        self._lives: dict[NodeId, Incarnation] = {}
        self._prepared: dict[Generation, dict[NodeId, int]] = {}
        self._ended_well: dict[Generation, set[int]] = {}
        self._addresses: dict[NodeId, tuple[str, str]] = {}
        self._digest_before = ""
        self._durable = -1
        self._told: dict[Generation, set[NodeId]] = {}
        self._started: dict[Generation, set[NodeId]] = {}
        self._failed: dict[NodeId, int] = {}
        self._late: set[NodeId] = set()

    def before(self, event: Event, machine: Machine) -> None:
        """Remember the state that an old event must not change."""
        self._digest_before = machine.digest()

    def after(self, event: Event, decision: Decision, *, machine: Machine, at_s: float) -> None:
        """Look at one step."""
        self.steps += 1
        self._note(event, decision, at_s)
        self._learn(event, decision)
        checks: tuple[Callable[[Event, Decision, Machine], None], ...] = (
            self._old_changes_nothing,
            self._reasoned,
            self._commands_fit,
            self._end_is_the_end,
            self._durable_never_back,
        )
        for check in checks:
            check(event, decision, machine)
        self._replays(event, decision, machine, at_s)
        if self.steps % self._inside_every == 0:
            for broken in violations(machine.state, machine.policy):
                raise self._violation(broken)
            self._blame_has_evidence(machine)
            self._budgets_kept(machine, at_s)

    def _note(self, event: Event, decision: Decision, at_s: float) -> None:
        kinds = [f"{type(c).__name__}({getattr(c, 'node', '')})" for c in decision.commands[:6]]
        fields = " ".join(
            f"{name}={getattr(event, name)}"
            for name in ("node", "incarnation", "generation", "rank", "exit_code", "signal", "timer")
            if hasattr(event, name)
        )
        self.trace.append(
            f"{at_s:9.3f} {type(event).__name__:15} {fields} -> {decision.reason.value} {' '.join(kinds)}"
        )
        del self.trace[:-TRACE_MAX]

    def _violation(self, what: str) -> Violation:
        return Violation("\n".join([what, "the last steps were:", *self.trace[-40:]]))

    def _old_changes_nothing(self, event: Event, decision: Decision, machine: Machine) -> None:
        """An older generation or an earlier life changes nothing and leads to nothing."""
        if not isinstance(event, NodeEvent) or isinstance(event, NodeJoined):
            return
        life = self._lives.get(event.node)
        old_life = life is not None and life != event.incarnation
        counts = self._newest.get(event.node, self._generation) if self._alone else self._generation
        old_generation = getattr(event, "generation", counts) < counts
        kept = isinstance(event, StepCommitted) and event.durable
        # A node that was late is no danger: that it is clean at last may be said of an old generation.
        clean = isinstance(event, NodePrepared) and decision.reason is not Reason.STALE
        if old_life or (old_generation and not kept and not clean):
            if machine.digest() != self._digest_before:
                raise self._violation("an old event changed the state")
            if decision.commands or decision.reason is not Reason.STALE:
                raise self._violation(f"an old event led to {decision}")

    def _reasoned(self, event: Event, decision: Decision, machine: Machine) -> None:
        """Nothing is commanded without a reason."""
        if decision.commands and decision.reason in (Reason.NOTHING_TO_DO, Reason.STALE):
            raise self._violation(f"commands without a reason: {decision}")
        if decision.reason is Reason.NOTHING_TO_DO and machine.digest() != self._digest_before:
            raise self._violation("nothing to do, but the state is another one")

    def _commands_fit(self, event: Event, decision: Decision, machine: Machine) -> None:
        fresh: dict[NodeId, StartWorkers] = {}
        for command in decision.commands:
            if isinstance(command, Prepare):
                if command.generation < self._generation and decision.reason is not Reason.RESENT:
                    raise self._violation(f"back to an older generation: {command}")
                self._generation = max(self._generation, command.generation)
                newest = self._newest.get(command.node, command.generation)
                self._newest[command.node] = max(newest, command.generation)
            elif isinstance(command, StartWorkers):
                self._start_fits(command, fresh)
        self._others_go_on(event, decision)
        if fresh and self._alone:
            self._seats_fit(fresh)
        elif fresh:
            self._starts_fit_together(fresh)

    def _start_fits(self, command: StartWorkers, fresh: dict[NodeId, StartWorkers]) -> None:
        counts = self._newest[command.node] if self._alone else self._generation
        if command.generation != counts:
            raise self._violation(f"start of a generation that is not the newest: {command}")
        before = self.starts.get(command.generation)
        if before is not None:
            if before.get(command.node) != command:
                raise self._violation(f"sent again with other content: {command}, {before.get(command.node)}")
            return
        fresh[command.node] = command

    def _starts_fit_together(self, fresh: dict[NodeId, StartWorkers]) -> None:
        """Ranks are complete and disjoint, all are prepared, survivors keep their place."""
        commands = sorted(fresh.values(), key=lambda c: c.node_rank)
        first = commands[0]
        if [c.node_rank for c in commands] != list(range(first.nodes)):
            raise self._violation(f"node ranks {[c.node_rank for c in commands]} of {first.nodes} nodes")
        shared = {
            (c.generation, c.attempt, c.world_size, c.master_addr, c.master_port, c.saver_lead)
            for c in commands
        }
        if len(shared) != 1:
            raise self._violation(f"members were told different things: {shared}")
        starts = [c.first_rank for c in commands]
        if starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= first.world_size:
            raise self._violation(f"first ranks {starts} of {first.world_size}")
        prepared = self._prepared.get(first.generation, {})
        missing = set(fresh) - set(prepared)
        if missing:
            raise self._violation(f"started before they were prepared: {sorted(missing)}")
        lead = commands[0].node
        told = (first.master_addr, first.master_port, first.saver_lead)
        if told != (self._addresses[lead][0], prepared[lead], self._addresses[lead][1]):
            raise self._violation(f"members were sent to {told}, the lead is at {self._addresses[lead]}")
        self._attempt_fits(first)
        newest = max(self.starts, default=None)
        if newest is not None:
            for node, old in self.starts[newest].items():
                new = fresh.get(node)
                if new is not None and new.node_rank != old.node_rank and old.node_rank < new.nodes:
                    raise self._violation(f"survivor {node} moved from {old.node_rank} to {new.node_rank}")
        self.starts[first.generation] = fresh

    def _others_go_on(self, event: Event, decision: Decision) -> None:
        """Where one node starts again alone, no other one that has a seat hears of it."""
        if "unit" not in decision.facts:
            return
        meant = {decision.facts["unit"], getattr(event, "node", ""), decision.facts.get("node", "")}
        others = {c.node for c in decision.commands if isinstance(c, Prepare | StartWorkers)} - meant
        if others:
            raise self._violation(f"{sorted(others)} were told of the restart of {decision.facts['unit']}")

    def _seats_fit(self, fresh: dict[NodeId, StartWorkers]) -> None:
        """Nodes that start alone are prepared, lead themselves, and start the ranks of their seat."""
        commands = sorted(fresh.values(), key=lambda c: c.node_rank)
        if len(commands) > 1 or commands[0].nodes == 1:
            self._seats = {}  # the whole job
            if [c.node_rank for c in commands] != list(range(commands[0].nodes)):
                raise self._violation(f"node ranks {[c.node_rank for c in commands]}")
        for command in commands:
            port = self._prepared.get(command.generation, {}).get(command.node)
            address, saver = self._addresses[command.node]
            if (command.master_addr, command.master_port, command.saver_lead) != (address, port, saver):
                raise self._violation(f"a node that does not lead itself: {command}")
            old = self._seats.get(command.node_rank)
            seat = (command.first_rank, command.world_size, command.nodes)
            if old is not None and seat != (old.first_rank, old.world_size, old.nodes):
                raise self._violation(f"another seat than before: {command}, was {old}")
            self._seats[command.node_rank] = command
        self._attempt_fits(commands[0])
        self.starts[commands[0].generation] = fresh

    def _attempt_fits(self, first: StartWorkers) -> None:
        if first.attempt != len(self.starts):
            raise self._violation(f"attempt {first.attempt} after {len(self.starts)} starts")
        if self._cap is not None and first.attempt > self._cap:
            raise self._violation(f"attempt {first.attempt} with at most {self._cap} restarts")
        if first.attempt > self.failures:
            raise self._violation(f"attempt {first.attempt} after {self.failures} failures")

    def _end_is_the_end(self, event: Event, decision: Decision, machine: Machine) -> None:
        for command in decision.commands:
            if isinstance(command, Prepare | StartWorkers) and self.exit_code is not None:
                raise self._violation(f"after the end of the job: {command}")
            if isinstance(command, FinishJob):
                if self.exit_code is not None:
                    raise self._violation("the job ended twice")
                self.exit_code = command.exit_code
                if command.exit_code == 0:
                    self._all_ranks_finished(event)
        if self.exit_code is not None:
            codes = {c.exit_code for c in decision.commands if isinstance(c, EndNode)}
            if not codes <= {0, self.exit_code}:
                raise self._violation(f"nodes end with {codes}, the job with {self.exit_code}")

    def _durable_never_back(self, event: Event, decision: Decision, machine: Machine) -> None:
        """What was durable once stays so."""
        durable = machine.state.job.durable_step
        now = -1 if durable is None else durable
        if now < self._durable:
            raise self._violation(f"the durable step went back from {self._durable} to {now}")
        self._durable = now

    def _blame_has_evidence(self, machine: Machine) -> None:
        """A node is set aside only after failures as often as the policy says, or when it was late."""
        aside = {name for name, node in machine.state.nodes.items() if node.state is NodeState.ASIDE}
        for name in aside - self._late:
            failed = self._failed.get(name, 0)
            if failed < self._policy.node_strikes_max:
                raise self._violation(f"{name} was set aside after {failed} failures")

    def _budgets_kept(self, machine: Machine, at_s: float) -> None:
        """A job that goes on has spent no more than its budgets."""
        job = machine.state.job
        if job.declared is None or job.phase in OVER:
            return
        for cause in Cause:
            budget = self._policy.budget(cause)
            used = job.history.used(cause, now=at_s, window_s=budget.window_s)
            if used > budget.limit_for(job.declared.max_nodes):
                raise self._violation(f"{used} charges of {cause.value}, and the job goes on")

    def _all_ranks_finished(self, event: Event) -> None:
        newest = max(self.starts)
        world_size = next(iter(self.starts[newest].values())).world_size
        if self._alone:
            ends = [self._ended_well.get(c.generation, set()) for c in self._seats.values()]
            if len(set().union(*ends)) != world_size:
                raise self._violation(f"finished with {ends} of {world_size} ranks")
            return
        ended = set(self._ended_well.get(newest, set()))
        if isinstance(event, WorkerExited) and event.ok:
            ended.add(event.rank)
        if ended != set(range(world_size)):
            raise self._violation(f"finished with {len(ended)} of {world_size} ranks")

    def _replays(self, event: Event, decision: Decision, machine: Machine, at_s: float) -> None:
        """A machine that only reads what was written down stands where the real one stands."""
        again = self._shadow.step(decode_event(encode(event)), at_s)
        if again != decision or decode_decision(encode(decision)) != decision:
            raise self._violation(f"a replay decides otherwise: {again}, was {decision}")
        if self._shadow.digest() != machine.digest():
            raise self._violation("a replay leads to another state")

    def _learn_evidence(self, event: Event, decision: Decision) -> None:
        """What speaks against a node: that it said it could not, or that it was waited for in vain."""
        for command in decision.commands:
            if isinstance(command, Prepare):
                self._told.setdefault(command.generation, set()).add(command.node)
        if isinstance(event, NodeFailed):
            self._failed[event.node] = self._failed.get(event.node, 0) + 1
        elif isinstance(event, TimerFired) and event.timer is TimerKind.PREPARE:
            told = self._told.get(event.generation, set())
            self._late |= told - self._prepared.get(event.generation, {}).keys()
        elif isinstance(event, TimerFired) and event.timer is TimerKind.UNIT:
            self._late.add(NodeId(str(decision.facts.get("node", ""))))
        elif isinstance(event, TimerFired) and event.timer is TimerKind.START:
            started = self._started.get(event.generation, set())
            self._late |= self.starts.get(event.generation, {}).keys() - started

    def _learn(self, event: Event, decision: Decision) -> None:
        """Bring the books up to date."""
        if "ended_generation" in decision.facts:
            self.failures += 1
        self._learn_evidence(event, decision)
        if isinstance(event, JobDeclared):
            self._cap = event.max_restarts
            self._alone = event.scope is RestartScope.NODE
        if decision.reason is Reason.STALE:
            return
        if isinstance(event, NodeJoined):
            self._lives[event.node] = event.incarnation
            self._addresses[event.node] = (event.address, event.saver_address)
        elif isinstance(event, NodePrepared):
            self._prepared.setdefault(event.generation, {})[event.node] = event.rendezvous_port
        elif isinstance(event, WorkersStarted):
            self._started.setdefault(event.generation, set()).add(event.node)
        elif isinstance(event, WorkerExited) and event.ok:
            self._ended_well.setdefault(event.generation, set()).add(event.rank)
