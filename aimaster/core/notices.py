"""What people want to be told of at once, taken from the steps of the machine; nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from aimaster.core.commands import ENDED_GENERATION, Decision, Facts, FinishJob, Reason
from aimaster.core.events import Event, FirstStepDone
from aimaster.core.sentences import last_words, sentence

__all__ = ["Notice", "NoticeKind", "Notices"]


class NoticeKind(Enum):
    """What happened."""

    INCIDENT = "incident"  # a generation ended that should have gone on
    RECOVERED = "recovered"  # a first step after that
    SLOW = "slow"  # the others wait for a rank
    ENDED = "ended"  # the job is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One of them."""

    kind: NoticeKind
    sentence: str
    exit_code: int | None = None
    """Of the job, where it is over."""
    facts: Facts = field(default_factory=dict)
    """Of the decision."""


class Notices:
    """Picks them out.

    Args:
        in_trouble: whether an incident is not overcome yet, for a master that goes on with a job.
    """

    def __init__(self, *, in_trouble: bool = False) -> None:
        self._in_trouble = in_trouble

    def take(self, event: Event, decision: Decision) -> Notice | None:
        """One step of the machine; costs next to nothing where there is nothing to tell."""
        facts, reason = decision.facts, decision.reason
        end = next((one for one in decision.commands if isinstance(one, FinishJob)), None)
        if end is not None:
            said = last_words(reason, facts)
            return Notice(kind=NoticeKind.ENDED, sentence=said, exit_code=end.exit_code, facts=_plain(facts))
        if ENDED_GENERATION in facts:
            self._in_trouble = True
            return _notice(NoticeKind.INCIDENT, reason, facts)
        if reason is Reason.RANK_SLOW:
            return _notice(NoticeKind.SLOW, reason, facts)
        if isinstance(event, FirstStepDone) and reason is Reason.PROGRESS and self._in_trouble:
            self._in_trouble = False
            said = f"training goes on: step {event.step}"
            return Notice(kind=NoticeKind.RECOVERED, sentence=said, facts=_plain(facts))
        return None


def _notice(kind: NoticeKind, reason: Reason, facts: Facts) -> Notice:
    return Notice(kind=kind, sentence=sentence(reason, facts), facts=_plain(facts))


def _plain(facts: Facts) -> Mapping[str, int | float | str]:
    return dict(facts)
