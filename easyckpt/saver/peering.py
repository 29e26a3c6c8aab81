"""What savers say to each other: member to lead, lead to member, and pieces from one memory to another.

Facts go up, decisions come down, neither waits for the other. Frames are those of `easyckpt.saver.frames`,
after the handshake of `easyckpt.saver.auth`.
"""

from __future__ import annotations

import msgspec

from easyckpt.saver.protocol import Failure, Held, Key, Message, Open

__all__ = [
    "Ask",
    "Describe",
    "Described",
    "DrainWanted",
    "Drained",
    "Go",
    "Health",
    "Inventory",
    "InventoryAsk",
    "Link",
    "LoadWanted",
    "Members",
    "Opened",
    "PersistStep",
    "Persisted",
    "Piece",
    "Prepare",
    "Prepared",
    "Pull",
    "PullRanges",
    "Put",
    "RangesFollow",
    "RankLoaded",
    "Refused",
    "Register",
    "Replicated",
    "Sealed",
    "Send",
    "Share",
    "Source",
    "StageFailed",
    "StageReached",
    "Verdict",
]


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
    metrics: dict[str, float]
    cost_s: float = 0.0


class Sealed(Message, frozen=True, kw_only=True):
    """A rank's slot is complete and hashed."""

    rank: int
    step: int
    digest: str
    layout: str = ""
    """Digest of the layout."""
    data: str = ""
    """Digest of all that is before the plain state; empty if nobody could have the same."""


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
    """Empty if it has no pieces of this step."""
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
    refusal: Failure | None = None
    """A rank cannot take what was saved, whatever the sources."""


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
    gone: tuple[int, ...]
    """Ranks of this node whose workers have left: a step that waits for one of them is given up."""


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
    abandoned: bool = False
    """Whether the step was begun by others, and given up."""
    misuse: bool = False
    """Whether the calling code must change: then save() raises."""
    not_before: int = 0
    """No step before this one will be granted to any rank."""
    unprotected: bool = False
    """Whether nothing was durable for too long: then save() raises."""
    protect: tuple[Key, ...] = ()
    """Steps that must not be overwritten."""


class StageReached(Message, frozen=True, kw_only=True):
    """A step got further, or was given up, on all ranks."""

    step: int
    stage: str
    reason: str = ""
    roster: str = ""
    """Of a step that reached memory: see `Held`."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose bytes, but for its plain state, another rank stores."""

    rank: int
    by_rank: int
    by_node: int


class PersistStep(Message, frozen=True, kw_only=True):
    """Write your pieces of this step."""

    key: Key
    life: int
    """The generation that the storage knows this life of the job by."""
    run_id: str
    root: str
    """The checkpoint folder; the order may come before a rank of this node has named it."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """By node: whose pieces it writes. Empty: those of its own ranks."""
    shares: tuple[Share, ...] = ()


class Prepare(Message, frozen=True, kw_only=True):
    """Get the pieces of your ranks ready.

    Where the step was saved by another number of ranks (``saved_ranks``), the sources are all that can be had
    of each saved rank, on any node, the better ones first. Then the order comes twice: first each node proves
    what it holds of them, then (``assemble``) each node puts together what its own ranks want.
    """

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
    saved_ranks: int = 0
    """0: by as many as now."""
    assemble: bool = False


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


class Describe(Message, frozen=True, kw_only=True):
    """How are your pieces of this step laid out? Answered by `Described`."""

    generation: int
    key: Key


class Described(Message, frozen=True, kw_only=True):
    """The layouts of a saver's sealed pieces of a step, each once."""

    layouts: tuple[bytes, ...]
    ranks: tuple[tuple[int, ...], ...]
    """By layout: who has it."""


class PullRanges(Message, frozen=True, kw_only=True):
    """Give these bytes (begin, length) of a piece; answered by `RangesFollow` and the bytes, one behind the
    other."""

    generation: int
    key: Key
    rank: int
    ranges: tuple[tuple[int, int], ...]


class RangesFollow(Message, frozen=True, kw_only=True):
    """So many bytes follow, and this is their digest."""

    byte_count: int
    digest: str


class Link(Message, frozen=True, kw_only=True):
    """This connection carries a member's messages; the next one is `Register`."""
