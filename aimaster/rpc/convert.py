"""Between wire messages and our own dataclasses: total both ways, and nothing outside `rpc` knows the wire.

Encoding never fails for a valid object: free text is clipped to its limit and made valid UTF-8. Decoding
believes nothing: every number, id, enum and text is checked, and what the contract does not allow becomes a
`BadMessage` that names the field. What a newer peer adds (unknown fields) is ignored, as protobuf does; a new
enum value or kind of message comes with a new protocol version, so an unknown one is an error.

Single values and shared parts are in `wire`, facts in `facts`, status in `status`; this is the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aimaster.core import commands
from aimaster.core.commands import Command, Reason
from aimaster.core.events import NodeEvent, RestartScope
from aimaster.core.sights import STACK_CHARS_MAX
from aimaster.errors import BadMessage
from aimaster.rpc import limits
from aimaster.rpc.facts import fact_from_wire, fact_to_wire
from aimaster.rpc.gen import contract
from aimaster.rpc.limits import clip
from aimaster.rpc.messages import Ack, Header, Heartbeat, Hello, Refused, Welcome
from aimaster.rpc.wire import (
    AGENT_PHASES,
    REFUSALS,
    SUSPICIONS,
    Wire,
    checked,
    checked_address,
    checked_generation,
    checked_seconds,
    checked_text,
    header_from_wire,
    header_to_wire,
    made,
    notes_from_wire,
    notes_to_wire,
    or_minus_one,
    or_none,
    parse,
    process_to_wire,
    processes_from_wire,
    progress_from_wire,
    progress_to_wire,
)

AgentBody = Hello | Heartbeat | NodeEvent
MasterBody = Welcome | Refused | Ack | Command


def encode_from_agent(header: Header, body: AgentBody) -> bytes:
    """Bytes of one message up.

    Raises:
        TypeError: for an event that agents do not send (those that the master finds out itself).
    """
    if isinstance(body, Hello):
        field, inner = "hello", _hello_to_wire(body)
    elif isinstance(body, Heartbeat):
        field, inner = "heartbeat", _heartbeat_to_wire(body)
    else:
        field, inner = fact_to_wire(body)
    data: bytes = contract.AgentMessage(header=header_to_wire(header), **{field: inner}).SerializeToString()
    return data


def decode_from_agent(data: bytes) -> tuple[Header, AgentBody]:
    """Inverse of `encode_from_agent`.

    Raises:
        BadMessage: if the bytes are not such a message.
    """
    wire = parse(contract.AgentMessage, data)
    header = header_from_wire(wire.header)
    field = wire.WhichOneof("body")
    if field is None:
        raise BadMessage("a message whose body this version does not know")
    inner = getattr(wire, field)
    if field == "hello":
        return header, _hello_from_wire(header, inner)
    if field == "heartbeat":
        return header, _heartbeat_from_wire(inner)
    return header, fact_from_wire(header, field, inner)


def encode_from_master(header: Header, body: MasterBody) -> bytes:
    """Bytes of one message down.

    Raises:
        TypeError: for a command that is not for an agent (timers, the end of the master).
    """
    row = _TO_WIRE.get(type(body))
    if row is None:
        raise TypeError(f"{type(body).__name__} is not a message that a master sends")
    field, to_wire = row
    wire = contract.MasterMessage(header=header_to_wire(header), **{field: to_wire(body)})
    data: bytes = wire.SerializeToString()
    return data


def decode_from_master(data: bytes) -> tuple[Header, MasterBody]:
    """Inverse of `encode_from_master`.

    Raises:
        BadMessage: if the bytes are not such a message.
    """
    wire = parse(contract.MasterMessage, data)
    header = header_from_wire(wire.header)
    field = wire.WhichOneof("body")
    if field is None:
        raise BadMessage("a message whose body this version does not know")
    return header, _FROM_WIRE[field](header, getattr(wire, field))


def _hello_to_wire(hello: Hello) -> Wire:
    return contract.Hello(
        protocol_min=hello.protocol_min,
        protocol_max=hello.protocol_max,
        software=clip(hello.software, limits.NOTE_CHARS_MAX),
        address=hello.address,
        workers=hello.workers,
        saver_address=hello.saver_address,
        wanted_node_rank=or_minus_one(hello.wanted_node_rank),
        phase=AGENT_PHASES.number(hello.phase),
        min_nodes=hello.min_nodes,
        max_nodes=hello.max_nodes,
        max_restarts=or_minus_one(hello.max_restarts),
        restarts_by_node=hello.scope is RestartScope.NODE,
        processes=[process_to_wire(process) for process in hello.processes],
        notes=notes_to_wire(hello.notes),
    )


def _hello_from_wire(header: Header, wire: Wire) -> Hello:
    hello: Hello = made(
        "Hello",
        Hello,
        protocol_min=wire.protocol_min,
        protocol_max=wire.protocol_max,
        software=checked_text("hello.software", wire.software, chars_max=limits.NOTE_CHARS_MAX),
        address=checked_address("hello.address", wire.address),
        workers=wire.workers,
        saver_address=checked_address("hello.saver_address", wire.saver_address),
        wanted_node_rank=or_none("hello.wanted_node_rank", wire.wanted_node_rank, high=limits.NODES_MAX - 1),
        phase=AGENT_PHASES.member(wire.phase),
        generation=header.generation,
        min_nodes=wire.min_nodes,
        max_nodes=wire.max_nodes,
        max_restarts=or_none("hello.max_restarts", wire.max_restarts, high=limits.INT32_MAX),
        scope=RestartScope.NODE if wire.restarts_by_node else RestartScope.JOB,
        processes=processes_from_wire(wire.processes),
        notes=notes_from_wire(wire.notes),
    )
    return hello


def _heartbeat_to_wire(beat: Heartbeat) -> Wire:
    return contract.Heartbeat(
        phase=AGENT_PHASES.number(beat.phase),
        progress=[progress_to_wire(progress) for progress in beat.progress],
        processes=[process_to_wire(process) for process in beat.processes or ()],
        processes_set=beat.processes is not None,
        notes=notes_to_wire(beat.notes),
        stacks=[clip(stack, STACK_CHARS_MAX) for stack in beat.stacks],
        generation=beat.generation,
        clock_s=beat.clock_s,
        world_size=beat.world_size,
        base_step=beat.base_step,
    )


def _heartbeat_from_wire(wire: Wire) -> Heartbeat:
    beat: Heartbeat = made(
        "Heartbeat",
        Heartbeat,
        phase=AGENT_PHASES.member(wire.phase),
        progress=progress_from_wire(wire.progress),
        processes=processes_from_wire(wire.processes) if wire.processes_set else None,
        notes=notes_from_wire(wire.notes),
        stacks=tuple(checked_text("stack", stack, chars_max=STACK_CHARS_MAX) for stack in wire.stacks),
        generation=checked_generation("heartbeat.generation", wire.generation),
        clock_s=checked_seconds("heartbeat.clock_s", wire.clock_s),
        world_size=checked("heartbeat.world_size", wire.world_size, high=limits.INT32_MAX),
        base_step=checked("heartbeat.base_step", wire.base_step, high=limits.INT63_MAX),
    )
    return beat


def _welcome_to_wire(welcome: Welcome) -> Wire:
    return contract.Welcome(
        protocol=welcome.protocol,
        heartbeat_interval_s=welcome.heartbeat_interval_s,
        agent_orphan_timeout_s=welcome.agent_orphan_timeout_s,
        software=clip(welcome.software, limits.NOTE_CHARS_MAX),
    )


def _welcome_from_wire(_: Header, wire: Wire) -> Welcome:
    welcome: Welcome = made(
        "Welcome",
        Welcome,
        protocol=wire.protocol,
        heartbeat_interval_s=wire.heartbeat_interval_s,
        agent_orphan_timeout_s=wire.agent_orphan_timeout_s,
        software=checked_text("welcome.software", wire.software, chars_max=limits.NOTE_CHARS_MAX),
    )
    return welcome


def _refused_to_wire(refused: Refused) -> Wire:
    return contract.Refused(kind=REFUSALS.number(refused.kind), message=clip(refused.message))


def _refused_from_wire(_: Header, wire: Wire) -> Refused:
    return Refused(kind=REFUSALS.member(wire.kind), message=checked_text("refused.message", wire.message))


def _ack_to_wire(_: Ack) -> Wire:
    return contract.HeartbeatReply()


def _ack_from_wire(_: Header, __: Wire) -> Ack:
    return Ack()


def _prepare_to_wire(command: commands.Prepare) -> Wire:
    return contract.Prepare(generation=command.generation, reason=command.reason.value)


def _prepare_from_wire(header: Header, wire: Wire) -> commands.Prepare:
    return commands.Prepare(
        node=header.node,
        generation=checked_generation("prepare.generation", wire.generation),
        reason=_reason(wire.reason),
    )


def _start_to_wire(command: commands.StartWorkers) -> Wire:
    return contract.StartWorkers(
        generation=command.generation,
        attempt=command.attempt,
        node_rank=command.node_rank,
        nodes=command.nodes,
        first_rank=command.first_rank,
        world_size=command.world_size,
        master_addr=command.master_addr,
        master_port=command.master_port,
        saver_lead=command.saver_lead,
        progress_expected=command.progress_expected,
        restore_below=command.restore_below,
    )


def _start_from_wire(header: Header, wire: Wire) -> commands.StartWorkers:
    nodes = checked("start.nodes", wire.nodes, high=limits.NODES_MAX, low=1)
    world_size = checked("start.world_size", wire.world_size, high=limits.INT32_MAX, low=1)
    return commands.StartWorkers(
        node=header.node,
        generation=checked_generation("start.generation", wire.generation),
        attempt=checked("start.attempt", wire.attempt, high=limits.INT32_MAX),
        node_rank=checked("start.node_rank", wire.node_rank, high=nodes - 1),
        nodes=nodes,
        first_rank=checked("start.first_rank", wire.first_rank, high=world_size - 1),
        world_size=world_size,
        master_addr=checked_address("start.master_addr", wire.master_addr),
        master_port=checked("start.master_port", wire.master_port, high=limits.PORT_MAX),
        saver_lead=checked_address("start.saver_lead", wire.saver_lead),
        progress_expected=wire.progress_expected,
        restore_below=checked("start.restore_below", wire.restore_below, high=limits.INT63_MAX)
        if wire.HasField("restore_below")
        else None,
    )


def _check_to_wire(command: commands.CheckNode) -> Wire:
    return contract.CheckNode(generation=command.generation, why=SUSPICIONS.number(command.why))


def _check_from_wire(header: Header, wire: Wire) -> commands.CheckNode:
    return commands.CheckNode(
        node=header.node,
        generation=checked_generation("check.generation", wire.generation),
        why=SUSPICIONS.member(wire.why),
    )


def _end_to_wire(command: commands.EndNode) -> Wire:
    return contract.EndNode(
        exit_code=command.exit_code, reason=command.reason.value, sentence=clip(command.sentence)
    )


def _end_from_wire(header: Header, wire: Wire) -> commands.EndNode:
    return commands.EndNode(
        node=header.node,
        exit_code=checked("end.exit_code", wire.exit_code, high=limits.EXIT_CODE_MAX),
        reason=_reason(wire.reason),
        sentence=checked_text("end.sentence", wire.sentence),
    )


def _reason(text: str) -> Reason:
    try:
        return Reason(text)
    except ValueError as error:
        raise BadMessage(f"unknown reason {text[: limits.DIGEST_CHARS_MAX]!r}") from error


_ROWS: tuple[
    tuple[type[MasterBody], str, Callable[[Any], Wire], Callable[[Header, Wire], MasterBody]], ...
] = (
    (Welcome, "welcome", _welcome_to_wire, _welcome_from_wire),
    (Refused, "refused", _refused_to_wire, _refused_from_wire),
    (Ack, "heartbeat_reply", _ack_to_wire, _ack_from_wire),
    (commands.Prepare, "prepare", _prepare_to_wire, _prepare_from_wire),
    (commands.StartWorkers, "start_workers", _start_to_wire, _start_from_wire),
    (commands.CheckNode, "check_node", _check_to_wire, _check_from_wire),
    (commands.EndNode, "end_node", _end_to_wire, _end_from_wire),
)
_TO_WIRE = {kind: (field, to_wire) for kind, field, to_wire, _ in _ROWS}
_FROM_WIRE = {field: from_wire for _, field, _, from_wire in _ROWS}
