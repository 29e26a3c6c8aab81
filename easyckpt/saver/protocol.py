"""What workers and agents say to a saver, and what it answers: one question, one answer.

All messages are frozen structs with their type's name on the wire (`easyckpt.saver.frames`). Fields are
only added, with a default.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Begin",
    "Close",
    "Closed",
    "Done",
    "Failure",
    "Held",
    "Hello",
    "Key",
    "LayoutUnknown",
    "Load",
    "LoadOffer",
    "LoadReady",
    "LoadReshape",
    "LoadWant",
    "Loaded",
    "Message",
    "Open",
    "PersistNow",
    "Release",
    "Reserve",
    "Reserved",
    "Restored",
    "Seal",
    "Shutdown",
    "StageAbort",
    "StageAsk",
    "StageGrant",
    "StageInfo",
    "StageQuery",
    "StageRefuse",
    "Status",
    "StatusAsk",
    "TensorKnown",
    "WantedChunk",
    "Welcome",
]


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
    data: str = ""
    """Digest of all that is before the plain state; empty if it is not known."""
    roster: str = ""
    """What `easyckpt.saver.shares.roster_of` gave for the data of all ranks that saved the step; empty if no
    two ranks had the same, or not every rank's is known."""


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
    restore_below: int | None = None
    """Whoever asks for the newest step gets the newest that is older than this one, else the oldest there is:
    the launcher has seen training break soon after newer ones."""
    replicas: int = 1
    life: str = ""
    """Names whoever counts the generations. A requeued job may count from 1 again: with another life this is
    another generation, whatever its number."""


class Open(Message, frozen=True, kw_only=True):
    """A rank's checkpointer: where it saves, and how."""

    root: str
    interval_s: float = 0.0
    """Seconds between two steps that are saved at all; 0: every step that a slot is free for."""
    interval_auto: bool = False
    disk_interval_steps: int = 0
    disk_interval_s: float = 0.0
    keep: str = '[["latest", 2]]'
    """See `easyckpt.keep.policy_to_text`."""
    max_unprotected_s: float = 0.0
    """From then on without a durable step saves are refused with an error; 0 is never."""
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
    cost_s: float = 0.0
    """What the rank's last save cost its training; 0: not known."""


class StageGrant(Message, frozen=True, kw_only=True):
    """Copy into this slot. Its descriptor comes along with the first grant of that slot."""

    slot: int
    capacity: int
    fresh: bool
    """Whether a descriptor comes along."""
    slots: tuple[int, ...] = ()
    """All slots of the rank that there are. Others are gone, and their memory is when nobody maps them."""


class StageRefuse(Message, frozen=True, kw_only=True):
    """Do not copy; the reason is the same on every rank."""

    reason: str
    not_before: int = 0
    """No step before this one will be granted to any rank."""


class LayoutUnknown(Message, frozen=True, kw_only=True):
    """Ask again with the layout."""


class Reserve(Message, frozen=True, kw_only=True):
    """Make the slot that this rank's next save will need, if it lacks one."""

    body_bytes: int


class Reserved(Message, frozen=True, kw_only=True):
    """A free slot; its descriptor comes along if ``fresh``. Negative: nothing is lacking, or there is no
    memory."""

    slot: int = -1
    capacity: int = 0
    fresh: bool = False
    slots: tuple[int, ...] = ()
    """As in `StageGrant`."""


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
    not_before: int = 0
    """See `StageRefuse`."""


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


class TensorKnown(msgspec.Struct, frozen=True, array_like=True):
    """A logical tensor of a saved step."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]


class LoadOffer(Message, frozen=True, kw_only=True):
    """The step was saved in another layout: say with `LoadWant` which chunks this rank needs."""

    attempt: int
    step: int
    tensors: tuple[TensorKnown, ...]
    plain: bytes
    """Plain state of the saved rank that this rank takes after."""
    saved_ranks: int
    seed: int
    """The same on every rank, for what cannot be cut anew."""
    borrowed: bool = False
    """Whether the plain state is another rank's since this rank's own is lost."""


class WantedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that a rank needs."""

    name: str
    kind: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class LoadWant(Message, frozen=True, kw_only=True):
    """The answer to `LoadOffer`. With ``refusal`` the rank cannot take the step, and no rank does."""

    index: int
    attempt: int
    chunks: tuple[WantedChunk, ...] = ()
    refusal: Failure | None = None


class LoadReshape(Message, frozen=True, kw_only=True):
    """The rank's own piece does not have all that it needs: offer what all pieces have."""

    index: int


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
