"""Facts that an agent has to tell, kept until the master has them in its journal.

Facts are numbered from 1 and sent in order. After a cut everything that is not acknowledged is sent again, so
a fact arrives once or more, and the master takes each number once. Numbers may have gaps, never go back.

A committed step is said with the next heartbeat rather than at once, and a newer one replaces an older one
that still waits: training may commit faster than a journal should write, and only the newest counts.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from aimaster.core.events import NodeEvent, StepCommitted

FACTS_KEPT_MAX = 4096
"""Beyond it the oldest is given up: an agent without a master for so long ends anyway."""


class PendingFacts:
    """The queue. Not thread-safe."""

    def __init__(self, kept_max: int = FACTS_KEPT_MAX) -> None:
        self._facts: OrderedDict[int, NodeEvent] = OrderedDict()
        self._kept_max = kept_max
        self._last_seq = 0
        self._sent_seq = 0
        self.given_up = 0
        """How many facts were lost to the limit."""

    def __len__(self) -> int:
        return len(self._facts)

    def add(self, fact: NodeEvent) -> bool:
        """Number and keep a fact; whether it should be sent at once."""
        patient = isinstance(fact, StepCommitted)
        if isinstance(fact, StepCommitted):
            self._drop_older(fact)
        self._last_seq += 1
        self._facts[self._last_seq] = dataclasses.replace(fact, seq=self._last_seq)
        if len(self._facts) > self._kept_max:
            self._facts.popitem(last=False)
            self.given_up += 1
        return not patient

    def acknowledge(self, seq: int) -> None:
        """The master has journalled everything up to this number."""
        while self._facts and next(iter(self._facts)) <= seq:
            self._facts.popitem(last=False)

    def start_again(self, acknowledged: int) -> None:
        """A new session: what the master does not have yet is unsent again."""
        self.acknowledge(acknowledged)
        self._sent_seq = acknowledged

    def take_unsent(self) -> tuple[NodeEvent, ...]:
        """What to send now, in order; it counts as sent in this session."""
        if not self._facts or next(reversed(self._facts)) <= self._sent_seq:
            return ()
        unsent = tuple(fact for seq, fact in self._facts.items() if seq > self._sent_seq)
        self._sent_seq = unsent[-1].seq
        return unsent

    def _drop_older(self, newer: StepCommitted) -> None:
        """Forget a waiting commit of the same kind; at most one of each kind waits, so this is short."""
        for seq in reversed(self._facts):
            fact = self._facts[seq]
            if (
                isinstance(fact, StepCommitted)
                and fact.durable == newer.durable
                and fact.generation == newer.generation
            ):
                del self._facts[seq]
                return
