"""Timers that the core asks for: at most one of each kind, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aimaster.core.commands import CancelTimer, SetTimer
from aimaster.core.events import TimerFired, TimerKind


class Timers:
    """Hands `TimerFired` to `fire` when time is up."""

    def __init__(self, fire: Callable[[TimerFired], None]) -> None:
        self._fire = fire
        self._running: dict[TimerKind, asyncio.TimerHandle] = {}

    def set(self, command: SetTimer) -> None:
        """Start a timer; one of that kind that runs is forgotten."""
        self.cancel(CancelTimer(timer=command.timer))
        event = TimerFired(timer=command.timer, generation=command.generation)
        loop = asyncio.get_running_loop()
        self._running[command.timer] = loop.call_later(max(0.0, command.after_s), self._expired, event)

    def cancel(self, command: CancelTimer) -> None:
        """Forget the timer of that kind, if any."""
        handle = self._running.pop(command.timer, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        """Forget all."""
        for kind in tuple(self._running):
            self.cancel(CancelTimer(timer=kind))

    def _expired(self, event: TimerFired) -> None:
        self._running.pop(event.timer, None)
        self._fire(event)
