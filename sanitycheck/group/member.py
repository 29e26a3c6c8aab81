"""A node's side of a group: join, report, do the tests that are asked for, take the facts at the end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from sanitycheck.errors import CodecError
from sanitycheck.facts.codec import decode
from sanitycheck.facts.fleet import GroupFacts
from sanitycheck.group.wire import Lines, send_line
from sanitycheck.group.worker import BOOTSTRAP
from sanitycheck.outcome import Answered, Cannot, Outcome
from sanitycheck.process import probe_environment, search_path

__all__ = ["Member"]

RETRY_S = 0.2
END_WAIT_S = 3.0
TORCH_S = 120.0


class Member:
    """Made in the thread that lives until :meth:`close`: the worker is bound to it."""

    def __init__(self, endpoint: tuple[str, int], *, rank: int, group: str, join_s: float) -> None:
        self._sock: socket.socket | None = None
        self._lines = Lines()
        self._worker: subprocess.Popen[bytes] | None = None
        self._heard = Lines()
        self.problem = ""
        ends = time.monotonic() + join_s
        while self._sock is None and time.monotonic() < ends:
            try:
                self._sock = socket.create_connection(endpoint, timeout=max(0.5, ends - time.monotonic()))
            except OSError as error:
                self.problem = f"{endpoint[0]}:{endpoint[1]}: {error.strerror or error}"
                time.sleep(RETRY_S)
        if self._sock is not None:
            self.problem = ""
            hello = {
                "rank": rank,
                "group": group,
                "host": socket.gethostname(),
                "address": self._sock.getsockname()[0],
            }
            self._say({"hello": hello})

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._sock is not None:
            try:
                send_line(self._sock, message)
            except OSError as error:
                self.problem = f"the connection to node rank 0 broke: {error}"

    def _start_worker(self) -> str:
        """Start it and wait until torch is there; what went wrong, or ""."""
        self._worker = subprocess.Popen(
            [sys.executable, "-I", "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=probe_environment(os.environ, threads=1),
        )
        self._tell_worker({"path": search_path(), "parent": os.getpid()})
        ends = time.monotonic() + TORCH_S
        while time.monotonic() < ends:
            for message in self._from_worker(ends - time.monotonic()) or ():
                return "" if message.get("ready") else str(message.get("problem", "no torch"))
            if self._worker.poll() is not None:
                break
        return "the worker of the tests did not start"

    def _tell_worker(self, message: Mapping[str, Any]) -> None:
        if self._worker is not None and self._worker.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._worker.stdin.write(json.dumps(message).encode() + b"\n")
                self._worker.stdin.flush()

    def _from_worker(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Messages of the worker; None when it has ended."""
        if self._worker is None or self._worker.stdout is None:
            return None
        ready, _, _ = select.select([self._worker.stdout], [], [], max(0.0, timeout_s))
        if not ready:
            return []
        data = os.read(self._worker.stdout.fileno(), 1 << 16)
        return self._heard.feed(data) if data else None

    def take_part(self, report: Mapping[str, Any], *, limit_s: float, stopped: Callable[[], bool]) -> Outcome:
        """Report, do what the lead asks for, and give back the facts, or why there are none.

        Args:
            report: ``alone``, ``blocking`` and ``versions`` of this node.
            limit_s: After which the group is given up.
            stopped: Asked now and then; True ends it.
        """
        if self._sock is None or self.problem:
            return Cannot(kind="child_failed", message=f"the group cannot be joined: {self.problem}")
        trouble = self._start_worker()
        self._say({"report": dict(report)})
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends and not stopped():
            outcome = self._once(self._sock, trouble)
            if outcome is not None:
                return outcome
        return Cannot(kind="child_failed", message="the group did not end in time")

    def _once(self, sock: socket.socket, trouble: str) -> Outcome | None:
        """Wait for one thing to happen and act on it; the outcome when it was the last."""
        reading: list[Any] = [sock]
        if self._worker is not None and self._worker.stdout is not None and self._worker.poll() is None:
            reading.append(self._worker.stdout)
        ready, _, _ = select.select(reading, [], [], 0.5)
        for source in ready:
            if source is not sock:
                for message in self._from_worker(0.0) or ():
                    self._say(message)
                continue
            try:
                data = sock.recv(1 << 16)
                messages = self._lines.feed(data)
            except (OSError, ValueError) as error:
                return Cannot(kind="child_failed", message=f"the connection to node rank 0 broke: {error}")
            if not data:
                return Cannot(kind="child_failed", message="node rank 0 ended the group")
            for message in messages:
                outcome = self._obey(message, trouble)
                if outcome is not None:
                    return outcome
        return None

    def _obey(self, message: Mapping[str, Any], trouble: str) -> Outcome | None:
        if message.get("do") == "end":
            try:
                return Answered(facts=decode(GroupFacts, message["facts"]))
            except CodecError as error:
                return Cannot(kind="broken", message=str(error))
        if message.get("do") == "go":
            return Cannot(kind="child_failed", message=f"node rank 0 refused: {message.get('why', '')}")
        if message.get("do") == "test":
            if trouble:
                self._say({"id": message["id"], "result": {"problem": trouble}})
            else:
                self._tell_worker(message)
        return None

    def close(self) -> None:
        """End the worker and the connection."""
        if self._worker is not None:
            if self._worker.stdin is not None:
                with contextlib.suppress(OSError):
                    self._worker.stdin.close()
            try:
                self._worker.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._worker.pid, signal.SIGKILL)  # ours, not reaped: the number is still its own
                self._worker.wait()
            if self._worker.stdout is not None:
                self._worker.stdout.close()
        if self._sock is not None:
            self._sock.close()
