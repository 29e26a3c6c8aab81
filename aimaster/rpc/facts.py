"""The core's node events as wire messages and back.

Node, incarnation and number of a fact travel in the header, so the bodies hold only what is new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aimaster.core import events
from aimaster.core.events import NodeEvent
from aimaster.rpc import limits
from aimaster.rpc.gen import contract
from aimaster.rpc.limits import clip
from aimaster.rpc.messages import Header
from aimaster.rpc.wire import (
    STOP_KINDS,
    SUSPICIONS,
    TIERS,
    Wire,
    checked,
    checked_generation,
    checked_text,
    findings_from_wire,
    made,
    notes_to_wire,
    or_minus_one,
    or_none,
)


def fact_to_wire(fact: NodeEvent) -> tuple[str, Wire]:
    """Field name and body of a fact.

    Raises:
        TypeError: for an event that agents do not send (those that the master finds out itself).
    """
    row = _TO_WIRE.get(type(fact))
    if row is None:
        raise TypeError(f"{type(fact).__name__} is not a fact that an agent sends")
    field, to_wire = row
    return field, to_wire(fact)


def fact_from_wire(header: Header, field: str, body: Wire) -> NodeEvent:
    """Inverse of `fact_to_wire`.

    Raises:
        BadMessage: if a value is not allowed.
    """
    fact: NodeEvent = _FROM_WIRE[field](header, body)
    return fact


def _prepared_to_wire(fact: events.NodePrepared) -> Wire:
    return contract.NodePrepared(generation=fact.generation, rendezvous_port=fact.rendezvous_port)


def _prepared_from_wire(header: Header, wire: Wire) -> NodeEvent:
    port = checked("rendezvous_port", wire.rendezvous_port, high=limits.PORT_MAX)
    return _made(events.NodePrepared, header, wire, rendezvous_port=port)


def _failed_to_wire(fact: events.NodeFailed) -> Wire:
    return contract.NodeFailed(generation=fact.generation, what=clip(fact.what))


def _failed_from_wire(header: Header, wire: Wire) -> NodeEvent:
    return _made(events.NodeFailed, header, wire, what=checked_text("what", wire.what))


def _node_checked_to_wire(fact: events.NodeChecked) -> Wire:
    return contract.NodeChecked(
        generation=fact.generation,
        why=SUSPICIONS.number(fact.why),
        looked=fact.looked,
        findings=notes_to_wire(fact.findings),
        blocking=fact.blocking,
    )


def _node_checked_from_wire(header: Header, wire: Wire) -> NodeEvent:
    return _made(
        events.NodeChecked,
        header,
        wire,
        why=SUSPICIONS.member(wire.why),
        looked=checked("looked", wire.looked, high=limits.INT32_MAX),
        findings=findings_from_wire(wire.findings),
        blocking=wire.blocking,
    )


def _started_to_wire(fact: events.WorkersStarted) -> Wire:
    return contract.WorkersStarted(generation=fact.generation)


def _started_from_wire(header: Header, wire: Wire) -> NodeEvent:
    return _made(events.WorkersStarted, header, wire)


def _exited_to_wire(fact: events.WorkerExited) -> Wire:
    wire = contract.WorkerExited(
        generation=fact.generation,
        local_rank=fact.local_rank,
        rank=fact.rank,
        step=or_minus_one(fact.step),
        error=clip(fact.error),
        error_digest=clip(fact.error_digest, limits.DIGEST_CHARS_MAX),
        stalled_s=fact.stalled_s,
    )
    if fact.signal is not None:
        wire.signal = fact.signal
    else:
        wire.exit_code = fact.exit_code
    return wire


def _exited_from_wire(header: Header, wire: Wire) -> NodeEvent:
    by_signal = wire.WhichOneof("how") == "signal"
    by_exit = wire.WhichOneof("how") == "exit_code"
    return _made(
        events.WorkerExited,
        header,
        wire,
        local_rank=checked("local_rank", wire.local_rank, high=limits.RANKS_PER_NODE_MAX - 1),
        rank=checked("rank", wire.rank, high=limits.INT32_MAX),
        exit_code=checked("exit_code", wire.exit_code, high=limits.EXIT_CODE_MAX) if by_exit else None,
        signal=checked("signal", wire.signal, high=limits.SIGNAL_MAX, low=1) if by_signal else None,
        step=or_none("step", wire.step, high=limits.INT63_MAX),
        error=checked_text("error", wire.error),
        error_digest=checked_text("error_digest", wire.error_digest, chars_max=limits.DIGEST_CHARS_MAX),
        stalled_s=wire.stalled_s,
    )


def _restored_to_wire(fact: events.Restored) -> Wire:
    tier = TIERS.number(fact.tier)
    return contract.Restored(generation=fact.generation, rank=fact.rank, step=fact.step, tier=tier)


def _restored_from_wire(header: Header, wire: Wire) -> NodeEvent:
    rank = checked("rank", wire.rank, high=limits.INT32_MAX)
    step = checked("step", wire.step, high=limits.INT63_MAX)
    return _made(events.Restored, header, wire, rank=rank, step=step, tier=TIERS.member(wire.tier))


def _first_step_to_wire(fact: events.FirstStepDone) -> Wire:
    return contract.FirstStepDone(
        generation=fact.generation, step=fact.step, load_s=fact.load_s, warm_up_s=fact.warm_up_s
    )


def _first_step_from_wire(header: Header, wire: Wire) -> NodeEvent:
    step = checked("step", wire.step, high=limits.INT63_MAX)
    times = {"load_s": wire.load_s, "warm_up_s": wire.warm_up_s}
    return _made(events.FirstStepDone, header, wire, step=step, **times)


def _committed_to_wire(fact: events.StepCommitted) -> Wire:
    return contract.StepCommitted(
        generation=fact.generation, step=fact.step, durable=fact.durable, stalled_s=fact.stalled_s
    )


def _committed_from_wire(header: Header, wire: Wire) -> NodeEvent:
    step = checked("step", wire.step, high=limits.INT63_MAX)
    return _made(
        events.StepCommitted, header, wire, step=step, durable=wire.durable, stalled_s=wire.stalled_s
    )


def _stop_to_wire(fact: events.StopRequested) -> Wire:
    return contract.StopRequested(kind=STOP_KINDS.number(fact.kind), signal=fact.signal)


def _stop_from_wire(header: Header, wire: Wire) -> NodeEvent:
    signal = checked("signal", wire.signal, high=limits.SIGNAL_MAX)
    return _made(events.StopRequested, header, None, kind=STOP_KINDS.member(wire.kind), signal=signal)


def _left_to_wire(fact: events.NodeLeft) -> Wire:
    return contract.Goodbye(exit_code=fact.exit_code)


def _left_from_wire(header: Header, wire: Wire) -> NodeEvent:
    code = checked("exit_code", wire.exit_code, high=limits.EXIT_CODE_MAX)
    return _made(events.NodeLeft, header, None, exit_code=code)


def _made(event: type[NodeEvent], header: Header, wire: Wire | None, /, **fields: object) -> NodeEvent:
    """Make the event; the generation is the body's own where `wire` is given."""
    checked("header.seq", header.seq, high=limits.INT63_MAX, low=1)
    if wire is not None:
        fields["generation"] = checked_generation("generation", wire.generation)
    fact: NodeEvent = made(
        event.__name__,
        event,
        node=header.node,
        incarnation=header.incarnation,
        seq=header.seq,
        **fields,
    )
    return fact


_ROWS: tuple[tuple[type[NodeEvent], str, Callable[[Any], Wire], Callable[[Header, Wire], NodeEvent]], ...] = (
    (events.NodePrepared, "node_prepared", _prepared_to_wire, _prepared_from_wire),
    (events.NodeFailed, "node_failed", _failed_to_wire, _failed_from_wire),
    (events.NodeChecked, "node_checked", _node_checked_to_wire, _node_checked_from_wire),
    (events.WorkersStarted, "workers_started", _started_to_wire, _started_from_wire),
    (events.WorkerExited, "worker_exited", _exited_to_wire, _exited_from_wire),
    (events.Restored, "restored", _restored_to_wire, _restored_from_wire),
    (events.FirstStepDone, "first_step_done", _first_step_to_wire, _first_step_from_wire),
    (events.StepCommitted, "step_committed", _committed_to_wire, _committed_from_wire),
    (events.StopRequested, "stop_requested", _stop_to_wire, _stop_from_wire),
    (events.NodeLeft, "goodbye", _left_to_wire, _left_from_wire),
)
_TO_WIRE = {kind: (field, to_wire) for kind, field, to_wire, _ in _ROWS}
_FROM_WIRE = {field: from_wire for _, field, _, from_wire in _ROWS}

FACT_KINDS: tuple[type[NodeEvent], ...] = tuple(_TO_WIRE)
"""Events that agents send; all others are found out by the master itself."""
