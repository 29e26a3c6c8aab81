"""The child's side: one probe, run as ``python -I -c BOOTSTRAP`` by :mod:`sanitycheck.process`.

The order comes as one JSON object on stdin, the answer goes as JSON lines to a descriptor of its own:
``{"phase": text}`` any number of times, then ``{"facts": …}`` or ``{"cannot": kind, "message": text}`` or
``{"broken": text}``. stdout and stderr are free for what libraries print; their end is kept for the report
of a crash.

A probe ends by itself a little after its deadline, whatever becomes of the engine.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any

from sanitycheck.errors import CannotLookError
from sanitycheck.facts.codec import decode, encode
from sanitycheck.facts.request import Request
from sanitycheck.lifeline import die_with_parent
from sanitycheck.options import Options
from sanitycheck.result import Level

__all__ = ["BOOTSTRAP", "main"]

BOOTSTRAP = (
    "import json,sys;"
    "order=json.loads(sys.stdin.buffer.read());"
    "sys.path[:]=order['path'];"
    "from sanitycheck.probe import main;"
    "main(order)"
)
"""The caller's search path is set before anything of ours is imported: the working folder, which may hold a
file named like a module of the standard library, is never on it."""

SELF_END_GRACE_S = 5.0
MESSAGE_CHARS_MAX = 500


def _stop(signum: int, frame: types.FrameType | None) -> None:
    """SIGTERM: unwind, so that what the probe made is removed."""
    raise SystemExit(128 + signum)


def main(order: Mapping[str, Any]) -> None:
    """Run the probe that the order names; the process ends after it."""
    die_with_parent(order["parent"])
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, order["deadline_s"] + SELF_END_GRACE_S)
    answer_fd: int = order["answer_fd"]
    os.set_inheritable(answer_fd, False)

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(answer_fd, data) :]

    request = Request(
        check=order["check"],
        level=Level(order["level"]),
        deadline_s=order["deadline_s"],
        options=decode(Options, order["options"]),
        tell=lambda phase: send({"phase": phase}),
    )
    try:
        module = importlib.import_module(order["module"])
        facts = getattr(module, order["function"])(request)
        send({"facts": encode(facts)})
    except CannotLookError as error:
        send({"cannot": error.kind, "message": str(error)[:MESSAGE_CHARS_MAX]})
    except PermissionError as error:
        send({"cannot": "not_permitted", "message": str(error)[:MESSAGE_CHARS_MAX]})
    # The outer loop of the child: whatever else goes wrong is the probe's own fault, and is said.
    except Exception as error:  # noqa: BLE001
        send({"broken": f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX]})
        sys.exit(70)
