"""What a checkpointer is told, checked once and put into the message that its saver gets."""

from __future__ import annotations

import os
from typing import Literal

from easyckpt.errors import Misuse
from easyckpt.keep import KeepLatest, KeepPolicy, policy_to_text
from easyckpt.saver.protocol import Open

__all__ = ["Interval", "absolute_root", "open_options"]

Interval = int | float | Literal["auto"] | None
"""Steps, seconds, or what loses least; None is every step."""


def absolute_root(root: str | os.PathLike[str] | None) -> str:
    """The checkpoint folder in full, or its URL; None takes ``EASYCKPT_DIR``.

    Raises:
        Misuse: no folder is named.
    """
    text = os.fspath(root) if root is not None else os.environ.get("EASYCKPT_DIR", "")
    if not text:
        raise Misuse(
            "no checkpoint folder is named",
            hint='pass one: Checkpointer("checkpoints/run1"), or set EASYCKPT_DIR',
        )
    if "://" in text:
        return text
    return os.path.abspath(os.path.expanduser(text))


def open_options(
    root: str,
    *,
    interval: Interval,
    disk_interval: int | float | None,
    keep: int | KeepPolicy,
    max_unprotected_s: float | None,
) -> Open:
    """The message.

    Args:
        root: the checkpoint folder.
        interval: steps (int) or seconds (float) between steps that are saved at all; ``"auto"``; None is
            every one.
        disk_interval: steps (int) or seconds (float) between durable steps; None is as often as possible.
        keep: how many durable steps stay, or a policy.
        max_unprotected_s: see `easyckpt.Checkpointer`.

    Raises:
        Misuse: a value is not possible.
    """
    auto = interval == "auto"
    possible = isinstance(interval, (int, float)) and not isinstance(interval, bool) and interval > 0
    if interval is not None and not auto and not possible:
        raise Misuse(f"interval={interval!r} is not possible", hint='steps (int), seconds (float) or "auto"')
    if isinstance(disk_interval, bool) or (disk_interval is not None and not disk_interval > 0):
        raise Misuse(
            f"disk_interval={disk_interval!r} is not possible", hint="steps (int) or seconds (float)"
        )
    seconds = disk_interval if isinstance(disk_interval, float) else 0.0
    if isinstance(max_unprotected_s, bool) or (max_unprotected_s is not None and not max_unprotected_s > 0):
        raise Misuse(f"max_unprotected_s={max_unprotected_s!r} is not possible", hint="seconds, more than 0")
    if max_unprotected_s is not None and seconds >= max_unprotected_s:
        raise Misuse(
            f"disk_interval={seconds} s leaves no step durable within max_unprotected_s={max_unprotected_s}",
            hint="make max_unprotected_s several times the interval",
        )
    return Open(
        root=root,
        interval_s=interval if isinstance(interval, float) else 0.0,
        interval_auto=auto,
        disk_interval_steps=disk_interval if isinstance(disk_interval, int) else 0,
        disk_interval_s=seconds,
        keep=policy_to_text(_policy(keep)),
        max_unprotected_s=float(max_unprotected_s or 0.0),
    )


def _policy(keep: int | KeepPolicy) -> KeepPolicy:
    if isinstance(keep, bool) or (isinstance(keep, int) and keep < 1) or isinstance(keep, float):
        raise Misuse(f"keep={keep!r} is not possible", hint="at least one durable step stays")
    return KeepLatest(keep) if isinstance(keep, int) else keep
