"""What goes wrong, and when: drawn from the seed, some kinds left out so that others come out clearly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from aimaster.simulation.clock import Timeline
from aimaster.simulation.master import SimMaster
from aimaster.simulation.nodes import SimNode


class FaultKind(Enum):
    """Kinds of faults."""

    KILL_WORKER = "kill_worker"
    KILL_NODE = "kill_node"  # for good
    RESTART_NODE = "restart_node"  # the agent comes back as a new life
    FREEZE_NODE = "freeze_node"  # stopped, then goes on
    CUT_LINK = "cut_link"  # both ends notice
    STICK_LINK = "stick_link"  # nobody notices
    SLOW_PREPARE = "slow_prepare"
    FAIL_PREPARE = "fail_prepare"
    NEW_NODE = "new_node"  # one more spare
    CRASH_MASTER = "crash_master"
    CRASH_BEFORE_EFFECTS = "crash_before_effects"  # journalled, not carried out
    STALL_MASTER = "stall_master"
    HANG_WORKERS = "hang_workers"  # they make no step any more, and the master finds that out


SPLITTING = frozenset(
    {
        FaultKind.FREEZE_NODE,
        FaultKind.CUT_LINK,
        FaultKind.STICK_LINK,
        FaultKind.STALL_MASTER,
        FaultKind.SLOW_PREPARE,
    }
)
"""Kinds after which a node may go on with an old generation for a while: nobody can tell it to stop."""


OF_THE_MASTER = frozenset(
    {
        FaultKind.NEW_NODE,
        FaultKind.CRASH_MASTER,
        FaultKind.CRASH_BEFORE_EFFECTS,
        FaultKind.STALL_MASTER,
    }
)
"""Kinds that strike no node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: FaultKind
    at_s: float
    node: int
    """Index of the node that it strikes, where it strikes one."""
    lasts_s: float


def draw(random: Random, *, nodes: int, horizon_s: float, most: int) -> tuple[Fault, ...]:
    """Draw a plan of faults: some kinds at all, then some of these, then times, nodes and durations."""
    kinds = [kind for kind in FaultKind if random.random() < 0.5] or [FaultKind.KILL_WORKER]
    return tuple(
        Fault(
            kind=random.choice(kinds),
            at_s=random.uniform(0.0, horizon_s),
            node=random.randrange(nodes),
            lasts_s=random.choice((0.3, 2.0, 5.0, 9.0, 30.0)) * random.uniform(0.5, 1.5),
        )
        for _ in range(random.randint(0, most))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that found somebody to strike."""

    fault: Fault
    at_s: float
    training: bool
    """Whether workers ran on the node."""


class Striker:
    """Carries faults out."""

    def __init__(
        self,
        timeline: Timeline,
        master: SimMaster,
        nodes: Sequence[SimNode],
        *,
        add_node: Callable[[], SimNode],
        random: Random,
    ) -> None:
        self._timeline = timeline
        self._master = master
        self._nodes = nodes
        self._add_node = add_node
        self._random = random
        self.struck: list[Strike] = []
        """What was carried out, in the order of time."""
        self._strikes: Mapping[FaultKind, Callable[[SimNode, Fault], None]] = {
            FaultKind.KILL_WORKER: lambda node, fault: node.kill_worker(0),
            FaultKind.KILL_NODE: lambda node, fault: self._power_off(node),
            FaultKind.RESTART_NODE: self._restart,
            FaultKind.FREEZE_NODE: self._freeze,
            FaultKind.CUT_LINK: self._cut,
            FaultKind.STICK_LINK: self._stick,
            FaultKind.SLOW_PREPARE: self._slow,
            FaultKind.FAIL_PREPARE: self._fail_to_prepare,
            FaultKind.NEW_NODE: lambda node, fault: self._add_node().boot(self._master),
            FaultKind.CRASH_MASTER: self._crash,
            FaultKind.CRASH_BEFORE_EFFECTS: self._crash_before_effects,
            FaultKind.STALL_MASTER: lambda node, fault: self._master.stall(fault.lasts_s),
            FaultKind.HANG_WORKERS: self._hang,
        }

    def plan(self, faults: Sequence[Fault]) -> None:
        """Let them strike when it is time."""
        for fault in faults:
            self._timeline.at(fault.at_s, lambda f=fault: self._strike(f))  # type: ignore[misc]

    def _strike(self, fault: Fault) -> None:
        node = self._nodes[fault.node]
        if fault.kind not in OF_THE_MASTER and not node.alive:
            return
        self.struck.append(Strike(fault=fault, at_s=self._timeline.now_s, training=node.command is not None))
        self._strikes[fault.kind](node, fault)

    def _power_off(self, node: SimNode) -> None:
        """Half of the time the other end is told by a reset, else there is only silence."""
        if self._random.random() < 0.5:
            self._master.cut(node)
        node.die()

    def _restart(self, node: SimNode, fault: Fault) -> None:
        node.die()
        self._timeline.after(fault.lasts_s, lambda: None if node.alive else node.boot(self._master))

    def _freeze(self, node: SimNode, fault: Fault) -> None:
        node.freeze()
        self._timeline.after(fault.lasts_s, node.thaw)

    def _cut(self, node: SimNode, fault: Fault) -> None:
        node.link.broken = True
        self._master.cut(node)
        self._timeline.after(fault.lasts_s, lambda: setattr(node.link, "broken", False))

    def _stick(self, node: SimNode, fault: Fault) -> None:
        node.link.stick()
        self._timeline.after(fault.lasts_s, node.link.free)

    def _slow(self, node: SimNode, fault: Fault) -> None:
        node.temper.prepare_s = fault.lasts_s * 10

    def _fail_to_prepare(self, node: SimNode, fault: Fault) -> None:
        node.temper.fails_to_prepare = 1 if fault.lasts_s < 5 else 3

    def _crash(self, node: SimNode, fault: Fault) -> None:
        self._master.crash()
        self._timeline.after(min(fault.lasts_s, 5.0), self._boot_master)

    def _crash_before_effects(self, node: SimNode, fault: Fault) -> None:
        last = self._master.journal.last()
        self._master.crash_before_effects_of.add((last.seq if last else 0) + self._random.randint(1, 4))

    def _hang(self, node: SimNode, fault: Fault) -> None:
        """The verdict may come late: by then another generation may have begun."""
        generation = self._master.machine.state.job.generation
        self._timeline.after(fault.lasts_s, lambda: self._master.find_hang(node, generation))

    def _boot_master(self) -> None:
        if not self._master.up:
            self._master.boot()
