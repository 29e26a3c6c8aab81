"""One status out of what the machine decided, what heartbeats said, and who is connected."""

from __future__ import annotations

import os

from aimaster.core.state import NO_RANK, JobView, NodeView, WaitingFor
from aimaster.ids import JobId
from aimaster.master.options import MasterOptions
from aimaster.master.table import NodeRow, NodeTable
from aimaster.rpc.messages import ProcessInfo, Role
from aimaster.rpc.server import AgentServer
from aimaster.rpc.status import BudgetStatus, IncidentStatus, JobStatus, NodeStatus
from aimaster.rpc.version import software

AWAITED_SHOWN_MAX = 8
"""Names of nodes in a sentence; of the others only the number."""


def draw(
    view: JobView,
    *,
    options: MasterOptions,
    epoch: int,
    table: NodeTable,
    server: AgentServer,
    incidents: tuple[IncidentStatus, ...],
    moment: tuple[float, str],
) -> JobStatus:
    """The whole job at one moment.

    Args:
        view: What the machine knows.
        options: Of this master.
        epoch: Of this life of it.
        table: What heartbeats said.
        server: Who is connected.
        incidents: Newest last.
        moment: The job's time, and why nothing can be journalled (empty if it can).
    """
    now, trouble = moment
    return JobStatus(
        job=JobId(view.job or options.job),
        phase=view.phase.value,
        generation=view.generation,
        attempt=max(0, view.attempt),
        world_size=view.world_size,
        nodes=tuple(_node(node, table.row(node.node, node.incarnation), server, now) for node in view.nodes),
        master=ProcessInfo(role=Role.MASTER, pid=os.getpid()),
        master_node=options.node,
        memory_step=view.memory_step,
        durable_step=view.durable_step,
        budgets=tuple(
            BudgetStatus(cause=one.cause.value, used=one.used, limit=one.limit, window_s=one.window_s)
            for one in view.budgets
        ),
        incidents=incidents,
        waiting_for=trouble or waiting_for(view),
        epoch=epoch,
        software=software(),
    )


def waiting_for(view: JobView) -> str:
    """A sentence without a full stop; empty when the job runs or is over."""
    here = sum(1 for node in view.nodes if not node.gone)
    sentences = {
        WaitingFor.NOTHING: "",
        WaitingFor.JOB: "the first agent",
        WaitingFor.NODES: f"nodes: {here} of at least {view.min_nodes} are here",
        WaitingFor.LAST_CALL: f"more nodes: {here} are here, up to {view.max_nodes} may come",
        WaitingFor.PREPARATION: f"{_names(view)} to get ready",
        WaitingFor.WORKERS: f"{_names(view)} to start workers",
        WaitingFor.GOODBYES: "agents to end",
    }
    return sentences[view.waiting_for]


def _names(view: JobView) -> str:
    shown = ", ".join(view.awaited[:AWAITED_SHOWN_MAX])
    more = len(view.awaited) - AWAITED_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown or "nodes"


def _node(node: NodeView, row: NodeRow | None, server: AgentServer, now: float) -> NodeStatus:
    return NodeStatus(
        node=node.node,
        state="suspect" if node.suspect and not node.gone else node.state.value,
        node_rank=None if node.node_rank == NO_RANK else node.node_rank,
        address=node.address,
        heartbeat_age_s=max(0.0, now - row.heard_s) if row is not None else None,
        connected=server.connected(node.node),
        processes=row.processes if row is not None else (),
        progress=row.progress if row is not None else (),
        saver_address=node.saver_address,
        notes=row.notes if row is not None else (),
    )
