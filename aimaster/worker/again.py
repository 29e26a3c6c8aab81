"""`loop`: call `train` again in the same process when a peer has failed, instead of being started anew.

    from aimaster.worker import loop

    def train():
        dist.init_process_group("gloo")
        ...

    loop(train)

A restart of all workers throws away what the healthy ones hold: imports, compiled kernels, data in memory,
device contexts. In here a survivor keeps its process:

    train() ──▶ a peer is gone: an error in a collective, or the agent says that the generation is over
        ▲           │ groups aborted and destroyed, frames of train cleared, progress record begun anew
        │           ▼
        └── the next generation's variables ◀── the agent, once all members are prepared

The agent is reached by a Unix socket (``AIMASTER_LOOP``), read by one thread, a JSON object a line. An error
that looks like the end of a peer is kept back until the agent confirms it, for `ECHO_S`; any other is the
rank's own failure and leaves `loop` as it is, so that the process ends and its agent reports it. A rank that
steps on comes out at its next optimizer step or in its next collective. Where it does not come out in time,
its agent ends the process and starts another one, as without `loop`.

Without an agent, or with one that does not know this process, `train` is called once.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from aimaster.worker import groups, hook

LOOP_VARIABLE = "AIMASTER_LOOP"
ECHO_S = 60.0
"""How long an error that looks like the end of a peer waits for the agent's word that it is one. The agent
of a node that was lost, which nobody hears of before its silence is sure, is what takes longest."""
WHY_CHARS_MAX = 500
"""Of an exception, for the agent's line."""

T = TypeVar("T")


class GenerationOver(Exception):
    """Raised at an optimizer step when the agent has said that the generation is over. `loop` takes it."""


def loop(train: Callable[[], T]) -> T:
    """Call `train`, and again after each failure of a peer.

    Process groups, DDP and FSDP wrappers, and whatever else belongs to one generation must be made in `train`
    and not be kept outside of it; what should survive (data, compiled functions, a model without wrapper) is
    made before. Ranks and world size may be others in each call: read them anew.

    Args:
        train: The training, without arguments. It must continue from its newest checkpoint by itself.

    Returns:
        What `train` returns.

    Raises:
        Exception: What `train` raises by its own fault.
        RuntimeError: The agent hung up while this rank waited for the next generation.
    """
    meeting = _reach()
    if meeting is None:
        return train()
    try:
        while True:
            try:
                return train()
            except Exception as error:
                if not meeting.over(error):
                    raise
                why = _brief(error)
                _clear(error)
            groups.let_go()
            hook.renew()
            meeting.wait(why)
    finally:
        meeting.close()


def _reach() -> _Meeting | None:
    """The way to the agent; None where there is none, or where it does not answer."""
    path = os.environ.get(LOOP_VARIABLE)
    if not path:
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(path)
        return _Meeting(line)
    except OSError as error:
        line.close()
        sys.stderr.write(f"aimaster: this rank will not outlive its peers ({error.strerror}: {path})\n")
        return None


class _Meeting:
    """One process's line to its agent."""

    def __init__(self, line: socket.socket) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._line = line
        self._leaving = threading.Event()
        self._starts: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        self._say({"hello": os.getpid()})
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        threading.Thread(target=self._listen, name="aimaster-loop", daemon=True).start()

    def over(self, error: Exception) -> bool:
        """Whether this exception came from the end of the generation. May wait for the agent's word."""
        if self._leaving.is_set() or isinstance(error, GenerationOver):
            return True
        # Peers that wait for this rank come out when its sockets close, so that happens before the wait.
        if not groups.is_echo(error):
            return False
        _clear(error)
        groups.let_go()
        return self._leaving.wait(ECHO_S)

    def wait(self, why: str) -> None:
        """Say that this rank is out, and take the variables of the next generation."""
        self._say({"left": why})
        env = self._starts.get()
        if env is None:
            raise RuntimeError("the agent of this node is gone; no generation follows")
        self._leaving.clear()
        os.environ.update(env)

    def close(self) -> None:
        """Take leave: this rank is not waited for any more."""
        self._handle.remove()
        self._line.close()

    def _before_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if self._leaving.is_set():
            raise GenerationOver("another rank has failed; this one meets the next generation")

    # torch.compile must not trace it; see `aimaster.worker.hook`.
    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _say(self, message: dict[str, object]) -> None:
        self._line.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        try:
            with self._line.makefile("rb") as lines:
                for line in lines:
                    told = json.loads(line)
                    if "start" in told:
                        self._starts.put(told["start"])
                    else:
                        self._leaving.set()
                        groups.abort()
        except (OSError, ValueError):
            pass  # closed here, or cut by the agent
        self._starts.put(None)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:WHY_CHARS_MAX]


def _clear(error: BaseException | None) -> None:
    """Let go of what the frames of `train` hold: groups, models, and loaders with their processes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
