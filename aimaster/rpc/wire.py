"""Checks of single wire values, the enums, and the parts that several messages share.

Absent numbers are -1 on the wire where 0 is a value, and None in our dataclasses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from aimaster.core.events import FINDINGS_MAX, AgentPhase, StopKind, Suspicion, Tier
from aimaster.core.sights import (
    COLLECTIVE_CHARS_MAX,
    WHERE_CHARS_MAX,
    Activity,
    Effort,
    Sight,
    Wait,
    WorkerPhase,
)
from aimaster.errors import BadMessage
from aimaster.ids import Generation, Incarnation, JobId, NodeId, is_valid_id
from aimaster.rpc import limits
from aimaster.rpc.gen import contract
from aimaster.rpc.limits import clip
from aimaster.rpc.messages import Header, ProcessInfo, RankProgress, RefusalKind, Role

Wire = Any
"""A generated message; its fields are checked here and nowhere else."""

E = TypeVar("E", bound=Enum)

_ADDRESS = re.compile(r"[A-Za-z0-9._:%\[\]-]*\Z")


class EnumMap(Generic[E]):
    """One of our enums and its wire twin, matched by name; a member without a twin fails at import."""

    def __init__(self, ours: type[E], message: Wire, field: str, prefix: str) -> None:
        numbers = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_name
        self._name = f"{message.DESCRIPTOR.name}.{field}"
        self._to_wire = {member: numbers[prefix + member.name].number for member in ours}
        self._from_wire = {number: member for member, number in self._to_wire.items()}

    def number(self, member: E) -> int:
        """The wire's number."""
        return int(self._to_wire[member])

    def member(self, number: int) -> E:
        """Our member, or `BadMessage` for a number that this version does not know."""
        if number not in self._from_wire:
            raise BadMessage(f"field {self._name} has the unknown value {number}")
        return self._from_wire[number]


AGENT_PHASES = EnumMap(AgentPhase, contract.Heartbeat, "phase", "AGENT_PHASE_")
WORKER_PHASES = EnumMap(WorkerPhase, contract.RankProgress, "phase", "WORKER_PHASE_")
ROLES = EnumMap(Role, contract.Process, "role", "ROLE_")
ACTIVITIES = EnumMap(Activity, contract.Sight, "activity", "ACTIVITY_")
WAITS = EnumMap(Wait, contract.Sight, "wait", "WAIT_")
TIERS = EnumMap(Tier, contract.Restored, "tier", "TIER_")
STOP_KINDS = EnumMap(StopKind, contract.StopRequested, "kind", "STOP_KIND_")
SUSPICIONS = EnumMap(Suspicion, contract.CheckNode, "why", "SUSPICION_")
REFUSALS = EnumMap(RefusalKind, contract.Refused, "kind", "REFUSAL_KIND_")


# Checks of single values ------------------------------------------------------------------------------------


def checked(name: str, value: int, *, high: int, low: int = 0) -> int:
    """An integer within its limits."""
    if not low <= value <= high:
        raise BadMessage(f"field {name} must be from {low} to {high}, got {value}")
    return value


def checked_text(name: str, value: str, *, chars_max: int = limits.TEXT_CHARS_MAX) -> str:
    """A text within its limit."""
    if len(value) > chars_max:
        raise BadMessage(f"field {name} has {len(value)} characters, at most {chars_max} are allowed")
    return value


def checked_id(name: str, value: str) -> str:
    """An id that may name folders."""
    if not is_valid_id(value):
        raise BadMessage(f"field {name} is not a valid id: {value[: limits.DIGEST_CHARS_MAX]!r}")
    return value


def checked_address(name: str, value: str) -> str:
    """A host name, IP address or ``host:port``: it reaches the environment of workers, so it is plain."""
    if len(value) > limits.ADDRESS_CHARS_MAX or not _ADDRESS.match(value):
        raise BadMessage(f"field {name} is not an address: {value[: limits.ADDRESS_CHARS_MAX]!r}")
    return value


def parse(message: Wire, data: bytes) -> Wire:
    """Bytes as a generated message."""
    if len(data) > limits.STATUS_BYTES_MAX:
        raise BadMessage(f"a message of {len(data)} bytes, at most {limits.STATUS_BYTES_MAX} are allowed")
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise BadMessage(f"{len(data)} bytes are not a {message.DESCRIPTOR.name}: {error}") from error


def or_minus_one(value: int | None) -> int:
    """How an absent number travels."""
    return -1 if value is None else value


def or_none(name: str, value: int, *, high: int) -> int | None:
    """Inverse of `or_minus_one`, with the limit checked."""
    return None if value == -1 else checked(name, value, high=high)


def made(name: str, make: Callable[..., Any], **fields: Any) -> Any:
    """Make a dataclass; what its own check refuses is the sender's fault."""
    try:
        return make(**fields)
    except ValueError as error:
        raise BadMessage(f"message {name} breaks the contract: {error}") from error


def checked_seconds(name: str, value: float) -> float:
    """A time that is finite and not negative."""
    if not 0 <= value < math.inf:
        raise BadMessage(f"field {name} must be finite and not negative, got {value}")
    return value


def checked_generation(name: str, value: int) -> Generation:
    return Generation(checked(name, value, high=limits.INT63_MAX))


# Header and parts shared with status ------------------------------------------------------------------------


def header_to_wire(header: Header) -> Wire:
    """Header as a wire message."""
    return contract.Header(
        job_id=header.job,
        node_id=header.node,
        incarnation=header.incarnation,
        generation=header.generation,
        seq=header.seq,
        ack=header.ack,
        epoch=header.epoch,
    )


def header_from_wire(wire: Wire) -> Header:
    """Inverse of `header_to_wire`."""
    return Header(
        job=JobId(checked_id("header.job_id", wire.job_id)),
        node=NodeId(checked_id("header.node_id", wire.node_id)),
        incarnation=Incarnation(checked_id("header.incarnation", wire.incarnation)),
        generation=checked_generation("header.generation", wire.generation),
        seq=checked("header.seq", wire.seq, high=limits.INT63_MAX),
        ack=checked("header.ack", wire.ack, high=limits.INT63_MAX),
        epoch=checked("header.epoch", wire.epoch, high=limits.INT63_MAX),
    )


def process_to_wire(process: ProcessInfo) -> Wire:
    """One process as a wire message."""
    return contract.Process(role=ROLES.number(process.role), pid=process.pid, rank=or_minus_one(process.rank))


def processes_from_wire(wires: Wire) -> tuple[ProcessInfo, ...]:
    """Inverse of `process_to_wire`, for a list."""
    _check_count("processes", wires, limits.PROCESSES_PER_NODE_MAX)
    return tuple(
        made(
            "Process",
            ProcessInfo,
            role=ROLES.member(wire.role),
            pid=wire.pid,
            rank=or_none("process.rank", wire.rank, high=limits.INT32_MAX),
        )
        for wire in wires
    )


def progress_to_wire(progress: RankProgress) -> Wire:
    """One rank's progress as a wire message."""
    wire = contract.RankProgress(
        local_rank=progress.local_rank,
        rank=or_minus_one(progress.rank),
        phase=WORKER_PHASES.number(progress.phase),
        steps=progress.steps,
        saved_step=or_minus_one(progress.saved_step),
        age_s=progress.age_s,
    )
    if progress.sight is not None:
        wire.sight.CopyFrom(_sight_to_wire(progress.sight))
    effort = progress.effort
    if effort is not None:
        told = contract.Effort(at_s=effort.at_s, awake_s=effort.awake_s, running_s=effort.running_s)
        wire.effort.CopyFrom(told)
    return wire


def _effort_from_wire(wire: Wire) -> Effort:
    effort: Effort = made("Effort", Effort, at_s=wire.at_s, awake_s=wire.awake_s, running_s=wire.running_s)
    return effort


def _sight_to_wire(sight: Sight) -> Wire:
    return contract.Sight(
        still_s=sight.still_s,
        activity=ACTIVITIES.number(sight.activity),
        idle_s=sight.idle_s,
        wait=WAITS.number(sight.wait),
        wait_s=sight.wait_s,
        where=clip(sight.where, WHERE_CHARS_MAX),
        stack=sight.stack,
        collective=clip(sight.collective, COLLECTIVE_CHARS_MAX),
    )


def _sight_from_wire(wire: Wire) -> Sight:
    sight: Sight = made(
        "Sight",
        Sight,
        still_s=wire.still_s,
        activity=ACTIVITIES.member(wire.activity),
        idle_s=wire.idle_s,
        wait=WAITS.member(wire.wait),
        wait_s=wire.wait_s,
        where=checked_text("sight.where", wire.where, chars_max=WHERE_CHARS_MAX),
        stack=checked("sight.stack", wire.stack, low=-1, high=limits.STACKS_MAX - 1),
        collective=checked_text("sight.collective", wire.collective, chars_max=COLLECTIVE_CHARS_MAX),
    )
    return sight


def progress_from_wire(wires: Wire) -> tuple[RankProgress, ...]:
    """Inverse of `progress_to_wire`, for a list."""
    _check_count("progress", wires, limits.RANKS_PER_NODE_MAX)
    return tuple(
        made(
            "RankProgress",
            RankProgress,
            local_rank=wire.local_rank,
            rank=or_none("progress.rank", wire.rank, high=limits.INT32_MAX),
            phase=WORKER_PHASES.member(wire.phase),
            steps=wire.steps,
            saved_step=or_none("progress.saved_step", wire.saved_step, high=limits.INT63_MAX),
            age_s=wire.age_s,
            sight=_sight_from_wire(wire.sight) if wire.HasField("sight") else None,
            effort=_effort_from_wire(wire.effort) if wire.HasField("effort") else None,
        )
        for wire in wires
    )


def notes_to_wire(notes: tuple[str, ...]) -> list[str]:
    """Notes for people, clipped."""
    return [clip(note, limits.NOTE_CHARS_MAX) for note in notes]


def notes_from_wire(wires: Wire) -> tuple[str, ...]:
    """Inverse of `notes_to_wire`."""
    _check_count("notes", wires, limits.NOTES_MAX)
    return tuple(checked_text("notes", note, chars_max=limits.NOTE_CHARS_MAX) for note in wires)


def findings_from_wire(wires: Wire) -> tuple[str, ...]:
    """What a checked node's look found."""
    _check_count("findings", wires, FINDINGS_MAX)
    return tuple(checked_text("findings", line, chars_max=limits.NOTE_CHARS_MAX) for line in wires)


def _check_count(name: str, values: Wire, count_max: int) -> None:
    if len(values) > count_max:
        raise BadMessage(f"field {name} has {len(values)} entries, at most {count_max} are allowed")
