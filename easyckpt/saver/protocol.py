"""What is said to a saver, by workers, agents and other savers: versioned, typed, bounded.

A frame is 4 bytes of length (little endian, of what follows), 1 byte of protocol version, and one message as
msgpack with its type's name in it. A frame that is longer than `FRAME_BYTES_MAX`, of another version or of an
unknown type ends the connection with a message that says so.

Workers and agents speak over a Unix socket, strictly one question and one answer. Savers speak over TCP
after a handshake (`easyckpt.saver.auth`), in both directions, without waiting.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from easyckpt import errors
from easyckpt.errors import EasyckptError, ProtocolError

__all__ = [
    "FRAME_BYTES_MAX",
    "PROTOCOL_VERSION",
    "decode_frame",
    "encode_frame",
    "frame_length",
    "read_failure",
]

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 128 << 20
"""Layouts are the largest messages: about 150 bytes per tensor."""
HEAD = struct.Struct("<IB")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Key(msgspec.Struct, frozen=True, order=True):
    """A saved step in memory: the generation that saved it, and its number."""

    generation: int
    step: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's sealed piece in a saver's memory."""

    key: Key
    rank: int
    world_size: int
    digest: str


# --- worker or agent to saver, over the Unix socket
# --------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of a connection. Roles: ``owner`` (an agent), ``worker``, ``visitor``."""

    job_id: str
    role: str
    generation: int | None = None
    rank: int = -1


class Welcome(Message, frozen=True, kw_only=True):
    """The saver's answer."""

    pid: int
    node_id: str
    generation: int
    begun: bool
    listen_address: str


class Failure(Message, frozen=True, kw_only=True):
    """The question could not be answered: an error of `easyckpt.errors` by name."""

    kind: str
    what: str
    where: str = ""
    hint: str = ""


class Done(Message, frozen=True, kw_only=True):
    """It is done; nothing to tell."""


class Begin(Message, frozen=True, kw_only=True):
    """From now on this node is part of this generation."""

    generation: int
    node_rank: int
    nodes: int
    first_rank: int
    ranks: int
    world_size: int
    lead_address: str = ""
    progress_expected: bool = False
    secret: bytes | None = None
    replicas: int = 1


class Open(Message, frozen=True, kw_only=True):
    """A rank's checkpointer: where it saves, and how."""

    root: str
    disk_interval_steps: int = 0
    disk_interval_s: float = 0.0
    keep: int = 2
    continuing: bool = False
    """Whether this rank has loaded or saved in this generation already: the saver is a new one."""


class StageAsk(Message, frozen=True, kw_only=True):
    """May this rank copy a step, and where to?"""

    step: int
    layout: bytes
    """JSON of the layout; empty when the saver has it (`layout_digest`)."""
    layout_digest: str
    body_bytes: int
    block: bool = False
    metrics: dict[str, float] = {}


class StageGrant(Message, frozen=True, kw_only=True):
    """Copy into this slot. Its descriptor comes along with the first grant of that slot."""

    slot: int
    capacity: int
    fresh: bool
    """Whether a descriptor comes along."""


class StageRefuse(Message, frozen=True, kw_only=True):
    """Do not copy; the reason is the same on every rank."""

    reason: str


class LayoutUnknown(Message, frozen=True, kw_only=True):
    """Ask again with the layout."""


class Seal(Message, frozen=True, kw_only=True):
    """The copy is complete."""

    step: int


class StageAbort(Message, frozen=True, kw_only=True):
    """The copy failed."""

    step: int
    reason: str


class StageQuery(Message, frozen=True, kw_only=True):
    """How far is a step? With ``stage``: answer when it got there, or not, or ``timeout_s`` is over."""

    step: int
    generation: int
    stage: str = ""
    timeout_s: float = 0.0


class StageInfo(Message, frozen=True, kw_only=True):
    """How far a step is: ``staging``, ``memory``, ``replicated``, ``durable``, ``skipped``, ``abandoned``."""

    step: int
    stage: str
    reason: str = ""


class Load(Message, frozen=True, kw_only=True):
    """The ``index``-th load of this rank in this generation; ``step`` None is the newest."""

    index: int
    step: int | None = None


class LoadReady(Message, frozen=True, kw_only=True):
    """The piece lies in this slot, verified; its descriptor comes along. ``step`` None: there is nothing."""

    step: int | None
    tier: str = ""
    body_bytes: int = 0
    capacity: int = 0
    layout: bytes = b""


class Loaded(Message, frozen=True, kw_only=True):
    """The rank has read its piece."""

    index: int


class Close(Message, frozen=True, kw_only=True):
    """The rank is finished; answer when the newest step is durable, or ``timeout_s`` is over."""

    timeout_s: float


class Closed(Message, frozen=True, kw_only=True):
    """What is safe now."""

    memory_step: int | None
    durable_step: int | None
    degraded: str = ""


class PersistNow(Message, frozen=True, kw_only=True):
    """Make the newest step durable, whatever the interval says; answered with `Closed`."""

    timeout_s: float


class StatusAsk(Message, frozen=True, kw_only=True):
    """How are you?"""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that loaded in this generation."""

    rank: int
    step: int
    tier: str


class Status(Message, frozen=True, kw_only=True):
    """All that an agent reports about its saver."""

    pid: int
    generation: int
    listen_address: str
    memory_step: int | None
    replicated_step: int | None
    durable_step: int | None
    restored: tuple[Restored, ...]
    degraded: str
    slot_bytes: int
    skipped: int
    ranks_open: int


class Release(Message, frozen=True, kw_only=True):
    """The owner goes; linger."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Drain and end."""

    drain_timeout_s: float


# --- saver to lead saver
# ------------------------------------------------------------------------------------------


class Register(Message, frozen=True, kw_only=True):
    """A member's first word to the lead, also after a reconnect."""

    generation: int
    node_rank: int
    address: str
    ranks: tuple[int, ...]
    held: tuple[Held, ...]
    progressed: bool
    """Whether a worker of this node loaded or saved in this generation already."""


class Opened(Message, frozen=True, kw_only=True):
    """A worker of the member opened its checkpointer."""

    node_rank: int
    options: Open


class Ask(Message, frozen=True, kw_only=True):
    """`StageAsk` of a rank."""

    rank: int
    step: int
    block: bool
    metrics: dict[str, float] = {}


class Sealed(Message, frozen=True, kw_only=True):
    """A rank's slot is complete and hashed."""

    rank: int
    step: int
    digest: str


class StageFailed(Message, frozen=True, kw_only=True):
    """A granted copy will not come: no memory, an exception, or the worker is gone."""

    rank: int
    step: int
    reason: str


class Replicated(Message, frozen=True, kw_only=True):
    """A rank's piece has a verified copy on another node, or why not."""

    rank: int
    step: int
    error: str = ""


class Persisted(Message, frozen=True, kw_only=True):
    """The member's pieces are on storage, and its fragment (JSON of its reference), or why not."""

    node_rank: int
    key: Key
    life: int
    fragment: bytes = b""
    error: str = ""


class LoadWanted(Message, frozen=True, kw_only=True):
    """A rank wants to load."""

    rank: int
    index: int
    step: int | None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's piece is to be taken from."""

    rank: int
    tier: str
    node_rank: int = -1
    digest: str = ""


class Prepared(Message, frozen=True, kw_only=True):
    """The member's pieces of a restore lie ready and verified; those that do not are named."""

    node_rank: int
    index: int
    attempt: int
    failed: tuple[Source, ...] = ()
    errors: tuple[str, ...] = ()


class RankLoaded(Message, frozen=True, kw_only=True):
    """A rank has read its piece."""

    rank: int
    step: int
    tier: str


class Inventory(Message, frozen=True, kw_only=True):
    """All sealed pieces of a member."""

    node_rank: int
    number: int
    held: tuple[Held, ...]


class DrainWanted(Message, frozen=True, kw_only=True):
    """Make the newest step durable whatever the interval says, and say so (`Drained`)."""

    node_rank: int


# --- lead saver to member
# -----------------------------------------------------------------------------------------


class Members(Message, frozen=True, kw_only=True):
    """Everyone is here."""

    addresses: tuple[str, ...]
    """By node rank."""
    ranks: tuple[tuple[int, ...], ...]
    """By node rank."""


class Verdict(Message, frozen=True, kw_only=True):
    """The answer to `Ask`."""

    rank: int
    step: int
    granted: bool
    reason: str = ""
    misuse: bool = False
    """Whether the calling code must change: then save() raises."""
    protect: tuple[Key, ...] = ()
    """Steps that must not be overwritten."""


class StageReached(Message, frozen=True, kw_only=True):
    """A step got further, or was given up, on all ranks."""

    step: int
    stage: str
    reason: str = ""


class PersistStep(Message, frozen=True, kw_only=True):
    """Write your pieces of this step."""

    key: Key
    life: int
    """The generation that the storage knows this life of the job by."""
    run_id: str


class Prepare(Message, frozen=True, kw_only=True):
    """Get the pieces of your ranks ready."""

    index: int
    attempt: int
    key: Key
    """What the step will be called in memory from now on."""
    from_key: Key | None
    """What it is called in the memory that it comes from."""
    sources: tuple[Source, ...]
    manifest: bytes = b""
    """JSON of the manifest, for pieces from storage."""
    root: str = ""


class Go(Message, frozen=True, kw_only=True):
    """All pieces of the restore are ready: workers may read. ``step`` None: there is nothing to load."""

    index: int
    step: int | None
    durable: bool = False
    failure: Failure | None = None
    asked: int | None = None
    """The step that the round's first rank asked for."""


class InventoryAsk(Message, frozen=True, kw_only=True):
    """What do you hold?"""

    number: int


class Refused(Message, frozen=True, kw_only=True):
    """The member does not fit to the others; its ranks get this error."""

    failure: Failure


class Drained(Message, frozen=True, kw_only=True):
    """The newest step is as durable as it gets."""

    memory_step: int | None
    durable_step: int | None
    degraded: str = ""


class Health(Message, frozen=True, kw_only=True):
    """The lead's view, told to all members when it changes."""

    memory_step: int | None
    replicated_step: int | None
    durable_step: int | None
    degraded: str = ""


# --- saver to saver: pieces
# ---------------------------------------------------------------------------------------


class Put(Message, frozen=True, kw_only=True):
    """Keep a copy of this piece; its bytes follow the answer `Send`."""

    generation: int
    held: Held
    layout: bytes
    body_bytes: int
    protect: tuple[Key, ...]


class Send(Message, frozen=True, kw_only=True):
    """Send the bytes, unless the very piece is here already."""

    wanted: bool


class Pull(Message, frozen=True, kw_only=True):
    """Give this piece; answered by `Piece` and its bytes, or `Failure`."""

    generation: int
    key: Key
    rank: int


class Piece(Message, frozen=True, kw_only=True):
    """What follows is a piece's bytes."""

    held: Held
    layout: bytes
    body_bytes: int


class Link(Message, frozen=True, kw_only=True):
    """This connection carries a member's messages; the next one is `Register`."""


Inbound: TypeAlias = (
    Hello | Begin | Open | StageAsk | Seal | StageAbort | StageQuery | Load | Loaded | Close | PersistNow
    | StatusAsk | Release | Shutdown | Welcome | Failure | Done | StageGrant | StageRefuse | LayoutUnknown
    | StageInfo | LoadReady | Closed | Status | Register | Opened | Ask | Sealed | StageFailed | Replicated
    | Persisted | LoadWanted | Prepared | RankLoaded | DrainWanted | Members | Verdict | StageReached
    | PersistStep | Prepare | Go | InventoryAsk | Inventory | Refused | Drained | Health | Put | Send | Pull
    | Piece | Link
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Inbound)


def encode_frame(message: Message) -> bytes:
    """The bytes of a frame."""
    body = _encoder.encode(message)
    if len(body) + 1 > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return HEAD.pack(len(body) + 1, PROTOCOL_VERSION) + body


def frame_length(head: bytes) -> int:
    """How many bytes follow the head.

    Raises:
        ProtocolError: another version, or too long.
    """
    length, version = HEAD.unpack(head)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the saver's protocol, this one {PROTOCOL_VERSION}",
            hint="use one version of easyckpt everywhere",
        )
    if not 1 <= length <= FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {length} bytes is not within 1 to {FRAME_BYTES_MAX}")
    return int(length) - 1


def decode_frame(body: bytes | bytearray) -> Message:
    """The message of a frame's body.

    Raises:
        ProtocolError: it is none of ours.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from error


def make_failure(error: EasyckptError) -> Failure:
    """An error as a message."""
    return Failure(kind=type(error).__name__, what=error.what, where=error.where, hint=error.hint)


def read_failure(failure: Failure) -> EasyckptError:
    """The error that a message stands for."""
    kind = getattr(errors, failure.kind, EasyckptError)
    if not (isinstance(kind, type) and issubclass(kind, EasyckptError)):
        kind = EasyckptError
    return kind(failure.what, where=failure.where, hint=failure.hint)
