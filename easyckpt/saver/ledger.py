"""The lead's book of one generation: which steps are saved, how far each is, what may begin. Pure.

One saver, that of node rank 0, keeps it for all ranks. Every decision about a step is made once and holds for
every rank, in whatever order they ask::

    asked ─▶ skipped(reason)
      └────▶ staging ─▶ memory ─▶ replicated ─▶ durable
                └─────────┴──▶ abandoned(reason)

A step is granted if no earlier granted one is in flight (sealed on every rank and, with peers, copied or
known to fail), and if the slot that it would overwrite is not being written to storage: two slots per rank
hold the newest complete step and the one being staged, so a step that is being persisted must be the newest
complete one.

Time is passed in as monotonic seconds; the ledger reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from easyckpt.interval import Pacer
from easyckpt.saver.exposure import Exposure
from easyckpt.saver.protocol import Key

__all__ = ["Answer", "Change", "Ledger", "PersistPolicy", "Stage"]

HISTORY_MAX = 1024
"""Decided steps that are remembered, so that a late rank gets the same answer."""

STAGE_TIMEOUT_S = 300.0
"""From the first rank's question until the step is sealed everywhere; then it is abandoned, naming who
lacks."""

COPY_TIMEOUT_S = 900.0
"""Beyond `STAGE_TIMEOUT_S`, until the peer copies are all reported. Transfers have limits of their own, by
size; this one is for a report that never comes."""

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0


class Stage(Enum):
    """How far a step is."""

    STAGING = "staging"
    MEMORY = "memory"
    REPLICATED = "replicated"
    DURABLE = "durable"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """May this rank copy?"""

    granted: bool
    reason: str = ""
    stage: Stage = Stage.SKIPPED
    """If not granted: skipped, or abandoned already."""
    unprotected: bool = False
    """If not granted: because nothing was durable for too long."""
    not_before: int = 0
    """If not granted: no earlier step than this will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A step got further; everyone is told."""

    step: int
    stage: Stage
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistPolicy:
    """When a complete step goes to storage: all zero means whenever the last one is done."""

    every_steps: int = 0
    every_s: float = 0.0
    max_unprotected_s: float = 0.0
    """From then on without a durable step nothing is granted; 0 is never."""


@dataclass(slots=True, kw_only=True)
class _Step:
    step: int
    stage: Stage
    reason: str = ""
    began_at: float = 0.0
    asked: set[int] = field(default_factory=set)
    sealed: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    copy_error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    unprotected: bool = False
    not_before: int = 0


class Ledger:
    """See the module. ``world_size`` ranks; with ``replicas`` every piece gets a copy on another node."""

    def __init__(self, *, generation: int, world_size: int, replicas: bool, policy: PersistPolicy) -> None:
        self._generation = generation
        self._world_size = world_size
        self._replicas = replicas
        self.policy = policy
        self.pacer = Pacer()
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._in_flight: _Step | None = None
        self._newest_asked = -1
        self.complete: int | None = None
        self.replicated: int | None = None
        self.durable: int | None = None
        self.persisting: int | None = None
        self.skipped = 0
        self.copy_trouble = ""
        self.persist_trouble = ""
        self._persist_wanted = False
        self._not_whole: int | None = None
        self._last_persist: tuple[int, float] | None = None  # step, when it began
        self._retry_at = 0.0
        self._backoff_s = 0.0
        self._exposure = Exposure()

    @property
    def protected(self) -> tuple[Key, ...]:
        """Steps whose slots must not be overwritten."""
        steps = {step for step in (self.complete, self.persisting) if step is not None}
        return tuple(Key(self._generation, step) for step in sorted(steps))

    def trouble(self, now: float, *, storage: str = "") -> str:
        """What keeps steps from getting as safe as they should; empty if nothing does.

        Args:
            now: monotonic seconds.
            storage: what else is known to be wrong with storage.
        """
        torn = self.complete is not None and self.complete == self._not_whole
        lost = f"pieces of step {self.complete} are lost, only a newer one can become durable" if torn else ""
        said = "; ".join(text for text in (storage, self.persist_trouble, lost) if text)
        said += f"; {self._exposure.told(now, durable=self.durable)}" if said else ""
        return "; ".join(text for text in (said, self.copy_trouble) if text)

    def metrics_of(self, step: int) -> dict[str, float]:
        """What rank 0's save() was given."""
        return self._steps[step].metrics if step in self._steps else {}

    def stage_of(self, step: int) -> tuple[Stage, str] | None:
        """How far a step is and why no further; None if it was never asked for (or long ago)."""
        entry = self._steps.get(step)
        return None if entry is None else (entry.stage, entry.reason)

    def ask(
        self,
        rank: int,
        step: int,
        *,
        now: float,
        block: bool = False,
        metrics: dict[str, float] | None = None,
        cost_s: float = 0.0,
    ) -> tuple[Answer | None, tuple[Change, ...]]:
        """A rank wants to save a step. No answer: ask again after the next change (only with ``block``)."""
        self.pacer.note_cost(cost_s)
        changes = (*self.expire(now), *self._give_up_if_left_out(rank, step))
        entry = self._steps.get(step)
        if entry is None:
            exposed = self._exposed(now)
            # Who waits for a slot wants this very step.
            due = step if block else self.pacer.not_before(step, now)
            early = f"not due: no step before {due} is" if due > step else ""
            reason = exposed or early or self._refusal(step)
            if reason.startswith("busy") and block:
                return None, changes
            entry = self._note(step, Stage.SKIPPED if reason else Stage.STAGING, reason, now)
            entry.unprotected = bool(exposed)
            entry.not_before = due if early else 0
            if reason:
                self.skipped += not early
            else:
                self._in_flight = entry
                self.pacer.granted(step, now)
        if rank in entry.asked:
            return Answer(granted=False, reason="this rank saved this step already"), changes
        entry.asked.add(rank)
        if metrics:
            entry.metrics.update(metrics)
        granted = entry.stage not in (Stage.SKIPPED, Stage.ABANDONED)
        answer = Answer(
            granted=granted,
            reason=entry.reason,
            stage=entry.stage,
            unprotected=entry.unprotected,
            not_before=entry.not_before,
        )
        return answer, changes

    def _exposed(self, now: float) -> str:
        """Why training must not go on without a net; empty if it may."""
        self._exposure.begins(now)
        # Where nothing waits to become durable, a refused save would never end the state that it is
        # refused for.
        if self.complete is None or self.complete in (self.durable, self._not_whole):
            return ""
        limit_s, why = self.policy.max_unprotected_s, self.persist_trouble
        return self._exposure.refusal(now, limit_s=limit_s, durable=self.durable, why=why)

    def _give_up_if_left_out(self, rank: int, step: int) -> tuple[Change, ...]:
        """A rank that goes on to a later step without its saver will never save the one in flight."""
        entry = self._in_flight
        if entry is None or step <= entry.step or rank in entry.asked or entry.stage is not Stage.STAGING:
            return ()
        return self._abandon(entry, f"rank {rank} went on to step {step} without saving it")

    def gone(self, ranks: tuple[int, ...]) -> tuple[Change, ...]:
        """Nothing more comes of these ranks: what one of them has not asked for will never be whole."""
        entry = self._in_flight
        if entry is None or entry.stage is not Stage.STAGING or entry.asked.issuperset(ranks):
            return ()
        return self._abandon(entry, "a rank that has not saved it is gone")

    def _refusal(self, step: int) -> str:
        if step <= self._newest_asked:
            return f"older than step {self._newest_asked}, which was asked for or restored before"
        if self._in_flight is not None:
            lacking = self._world_size - len(self._in_flight.sealed)
            doing = f"{lacking} ranks still copy" if lacking else "its peer copies are on the way"
            return f"busy: step {self._in_flight.step} is in flight, {doing}"
        if self.persisting is not None and self.persisting != self.complete:
            return f"busy: step {self.persisting} is being written to storage from the slot that is needed"
        return ""

    def _note(self, step: int, stage: Stage, reason: str, now: float) -> _Step:
        entry = self._steps[step] = _Step(step=step, stage=stage, reason=reason, began_at=now)
        self._newest_asked = max(self._newest_asked, step)
        while len(self._steps) > HISTORY_MAX:
            self._steps.popitem(last=False)
        return entry

    def sealed(self, rank: int, step: int) -> tuple[Change, ...]:
        """A rank's piece is complete and hashed."""
        entry = self._in_flight
        if entry is None or entry.step != step:
            return ()
        entry.sealed.add(rank)
        if len(entry.sealed) < self._world_size or entry.stage is not Stage.STAGING:
            return ()
        entry.stage = Stage.MEMORY
        self.complete = step
        if not self._replicas:
            self._in_flight = None
        return (Change(step=step, stage=Stage.MEMORY), *self._finish_copies())

    def failed(self, rank: int, step: int, *, reason: str, now: float) -> tuple[Change, ...]:
        """A copy will not come. If the step was not asked for yet, it is given up before others begin it."""
        if step not in self._steps and step > self._newest_asked:
            entry = self._note(step, Stage.ABANDONED, f"rank {rank}: {reason}", now)
            return (Change(step=step, stage=entry.stage, reason=entry.reason),)
        current = self._in_flight
        if current is None or current.step != step or current.stage is not Stage.STAGING:
            return ()
        return self._abandon(current, f"rank {rank}: {reason}")

    def replicated_by(self, rank: int, step: int, error: str = "") -> tuple[Change, ...]:
        """A rank's piece has a verified copy on another node, or cannot have one."""
        entry = self._steps.get(step)
        if entry is None or rank in entry.copied:
            return ()
        entry.copied.add(rank)
        if error:
            entry.copy_error = f"no peer copy of rank {rank}: {error}"
        return self._finish_copies()

    def _finish_copies(self) -> tuple[Change, ...]:
        """The newest complete step is replicated when every rank's piece has its copy."""
        step = self.complete
        entry = self._steps.get(step) if step is not None else None
        if entry is None or not self._replicas or len(entry.copied) < self._world_size:
            return ()
        if self._in_flight is entry:
            self._in_flight = None
        self.copy_trouble = entry.copy_error
        if entry.copy_error:
            return ()
        self.replicated = entry.step
        if entry.stage is not Stage.MEMORY:  # durable already
            return ()
        entry.stage = Stage.REPLICATED
        return (Change(step=entry.step, stage=Stage.REPLICATED),)

    def expire(self, now: float) -> tuple[Change, ...]:
        """Give up a step that some rank never sealed, and peer copies that nobody reports."""
        entry = self._in_flight
        if entry is None:
            return ()
        if entry.stage is not Stage.STAGING:
            if now - entry.began_at >= STAGE_TIMEOUT_S + COPY_TIMEOUT_S:
                self.copy_trouble = f"no word of the peer copies of ranks {self._lacking(entry.copied)}"
                self._in_flight = None
            return ()
        if now - entry.began_at < STAGE_TIMEOUT_S:
            return ()
        who = self._lacking(entry.sealed)
        return self._abandon(entry, f"not sealed within {STAGE_TIMEOUT_S:g} s by ranks {who}")

    def _lacking(self, ranks: set[int]) -> str:
        lacking = sorted(set(range(self._world_size)) - ranks)
        return ", ".join(map(str, lacking[:8])) + (" …" if len(lacking) > 8 else "")

    def _abandon(self, entry: _Step, reason: str) -> tuple[Change, ...]:
        entry.stage = Stage.ABANDONED
        entry.reason = reason
        self._in_flight = None
        return (Change(step=entry.step, stage=Stage.ABANDONED, reason=reason),)

    def restored(self, step: int | None, *, durable: bool, now: float, whole: bool = True) -> None:
        """All ranks resume from this step; what was newer never happened. Not ``whole``: pieces are lost."""
        for known in [known for known in self._steps if step is None or known >= step]:
            del self._steps[known]
        self._in_flight = None
        self._newest_asked = -1 if step is None else step
        self.complete = step
        self.replicated = None
        self.durable = step if durable else None
        self._not_whole = None if whole or durable else step
        self.persisting = None
        self._retry_at = 0.0
        self._exposure.ends(now)
        self.pacer.restored()
        if step is not None:
            entry = self._note(step, Stage.DURABLE if durable else Stage.MEMORY, "", now)
            entry.asked, entry.sealed = set(range(self._world_size)), set(range(self._world_size))

    def taken_over(self, step: int, *, whole: bool, now: float) -> None:
        """An earlier lead of this generation was lost; this step is what members hold.

        Args:
            step: newest that is covered.
            whole: whether each rank's own node has its piece, so that it can be written to storage.
            now: monotonic seconds.
        """
        self.restored(step, durable=False, now=now, whole=whole)

    def want_persist(self) -> None:
        """Persist the newest step as soon as possible, whatever the interval says."""
        self._persist_wanted = True
        self._retry_at = 0.0

    def next_persist(self, now: float) -> int | None:
        """The step to write to storage now, if any. The caller begins it."""
        step = self.complete
        if step is None or step == self._not_whole or self.persisting is not None or now < self._retry_at:
            return None
        if self.durable is not None and step <= self.durable:
            # A step in flight is the newest one soon: whoever wants that on storage must not be forgotten.
            self._persist_wanted = self._persist_wanted and self._in_flight is not None
            return None
        if not self._persist_wanted and not self._is_due(step, now):
            return None
        self._persist_wanted = False
        self.persisting = step
        self._last_persist = (step, now)
        return step

    def _is_due(self, step: int, now: float) -> bool:
        if self.policy.every_steps:
            return self.durable is None or step - self.durable >= self.policy.every_steps
        if self.policy.every_s and self._last_persist is not None and not self._backoff_s:
            return now - self._last_persist[1] >= self.policy.every_s
        return True

    def persisted(self, step: int, *, error: str, now: float) -> tuple[Change, ...]:
        """The step's manifest is visible, or persisting it failed; it is retried with growing pauses."""
        if self.persisting != step:
            return ()
        self.persisting = None
        if error:
            self.persist_trouble = error
            self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)
            self._retry_at = now + self._backoff_s
            return ()
        self.persist_trouble = ""
        self._backoff_s = 0.0
        self.durable = step if self.durable is None else max(self.durable, step)
        self._exposure.ends(now)
        entry = self._steps.get(step)
        if entry is not None:
            entry.stage = Stage.DURABLE
        return (Change(step=step, stage=Stage.DURABLE),)

    @property
    def is_settled(self) -> bool:
        """Whether the newest complete step is as durable as it gets, and nothing is on the way."""
        safe = self.complete in (self.durable, self._not_whole)
        return self._in_flight is None and self.persisting is None and safe
