"""Signals that end a job: which ones, and what each of them means.

SIGINT is a person: exit code 130. SIGTERM, SIGQUIT and a scheduler's notice (SIGUSR1, SIGUSR2) are a
preemption, exit code 10: requeue is right. A SIGHUP that was ignored when the agent started (``nohup``) stays
ignored.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from aimaster.core.events import StopKind

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


def watch_signals(names: tuple[str, ...], on_signal: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Have the running event loop call `on_signal` for each of these signals and for the notices.

    Args:
        names: As ``--signals-to-handle`` gives them, checked by the command line.
        on_signal: Called on the event loop.

    Returns:
        Undoes it.
    """
    loop = asyncio.get_running_loop()
    numbers = {signal.Signals[name] for name in names} | {signal.SIGINT, signal.SIGTERM, *NOTICES}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)

    def forget() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    return forget


def meaning(number: signal.Signals) -> StopKind:
    """Who asks for the end with this signal."""
    return StopKind.INTERRUPT if number is signal.SIGINT else StopKind.PREEMPTION
