"""What collective a rank waits in, asked of torch's flight recorder inside the training process, on demand.

A thread sleeps in the opening of a named pipe, which costs nothing, until the agent opens its other end; then
it writes what the recorder holds of the newest operations to a file beside the pipe. It needs the interpreter
for that, so a rank whose interpreter is held gives no answer; that is known by other witnesses. The thread is
started with the first optimizer step of a rank that has a process group, not with ``import torch``, so that
programs that fork early stay without it.

The recorder's dump has a private name in torch (`_dump_fr_trace_json`, tried with torch 2.13); where that is
missing the rank simply has no recorder. Gloo records collectives, but no send and recv.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

ASK_NAME = "fr-{pid}.ask"
ANSWER_NAME = "fr-{pid}.json"
OPERATIONS_MAX = 8
"""Newest operations of a rank that are told."""


def listen(folder: str) -> None:
    """Start the thread.

    Args:
        folder: The agent's run directory.
    """
    pid = os.getpid()
    ask = os.path.join(folder, ASK_NAME.format(pid=pid))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(ask)  # of an earlier process with this number
    os.mkfifo(ask, 0o600)
    answer = os.path.join(folder, ANSWER_NAME.format(pid=pid))
    threading.Thread(target=_answer, args=(ask, answer), name="aimaster-recorder", daemon=True).start()


def _answer(ask: str, answer: str) -> None:
    while True:
        try:
            with open(ask, "rb") as pipe:
                pipe.read()
            told = json.dumps(newest_operations())
            with open(f"{answer}.draft", "w", encoding="utf-8") as file:
                file.write(told)
            os.replace(f"{answer}.draft", answer)
        except (OSError, ValueError, RuntimeError):
            return  # the run directory is gone, or the recorder speaks another language: nobody is told


def newest_operations() -> list[dict[str, Any]]:
    """The newest operations of this rank, oldest first; empty where there is no recorder."""
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None)
    return [] if dump is None else in_words(json.loads(dump()).get("entries", []))


def in_words(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recorder's entries in the few words that are told."""
    return [
        {
            "op": str(one.get("profiling_name", "")).rpartition(":")[2],
            "seq": int(one.get("p2p_seq_id" if one.get("is_p2p") else "collective_seq_id", 0)),
            "ended": bool(one.get("retired")) or one.get("state") == "completed",
        }
        for one in entries[-OPERATIONS_MAX:]
    ]
