"""What an agent needs of its node's saver: start it, adopt it, place it, ask it, end it.

Blocking and small; no torch. Use one `SaverClient` from one thread at a time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyckpt import errors
from easyckpt.errors import EasyckptError, SaverUnavailable
from easyckpt.saver.channel import BlockingChannel
from easyckpt.saver.protocol import (
    Begin,
    Closed,
    Done,
    Hello,
    PersistNow,
    Release,
    Shutdown,
    Status,
    StatusAsk,
    Welcome,
)

__all__ = ["SaverClient", "SaverOptions", "SaverProcess", "SaverStatus", "spawn"]

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 30.0
ADOPT_ATTEMPTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOptions:
    """How to start a saver; see ``python -m easyckpt.saver --help``."""

    socket_path: str
    job_id: str
    node_id: str = ""
    linger_s: float = 60.0
    listen: str = ""
    advertise: str = ""
    secret_file: str = ""
    memory_limit: int | None = None
    headroom: int | None = None
    log_path: str = ""
    detached: bool = False
    """Whether it is nobody's child and leaves no log behind if there was nothing to warn of."""
    then: tuple[str, ...] = ()
    """A command that the saver becomes at its end, to clear away what its owner could not; empty for none."""

    def command(self, ready_fd: int) -> list[str]:
        """The command line."""
        command = [sys.executable, "-m", "easyckpt.saver", "--socket", self.socket_path]
        command += ["--job-id", self.job_id, "--node-id", self.node_id, "--linger", repr(self.linger_s)]
        command += ["--listen", self.listen, "--advertise", self.advertise, "--secret-file", self.secret_file]
        command += ["--log", self.log_path, "--ready-fd", str(ready_fd)]
        if self.memory_limit is not None:
            command += ["--memory-limit", str(self.memory_limit)]
        if self.headroom is not None:
            command += ["--headroom", str(self.headroom)]
        if self.detached:
            command.append("--detached")
        if self.then:
            command += ["--then", json.dumps(self.then)]
        return command


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverStatus:
    """A saver's state, as an agent reports it."""

    pid: int
    generation: int
    listen_address: str
    memory_step: int | None
    replicated_step: int | None
    durable_step: int | None
    restored: tuple[tuple[int, int, str], ...]
    """(rank, step, tier) of every rank that loaded in this generation; tier is memory, peer or disk."""
    degraded: str | None
    slot_bytes: int
    skipped: int
    ranks_open: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverProcess:
    """A saver that serves."""

    pid: int
    listen_address: str
    adopted: bool
    """Whether it was there before: an earlier life of this node started it."""
    process: subprocess.Popen[bytes] | None
    """Ours to wait for, unless adopted or detached."""


def spawn(options: SaverOptions, *, environment: dict[str, str] | None = None) -> SaverProcess:
    """Start the node's saver, or adopt the one that is there. Returns when it serves.

    It gets a session of its own, no standard streams and no descriptors of the caller.

    Raises:
        SaverUnavailable: it did not start in time.
        EasyckptError: it says why it cannot.
    """
    Path(options.socket_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(ADOPT_ATTEMPTS):
        process, answer = _start(options, environment)
        if "pid" in answer:
            if options.detached:
                process.wait(START_TIMEOUT_S)
            return SaverProcess(
                pid=int(answer["pid"]),
                listen_address=str(answer["address"]),
                adopted=False,
                process=None if options.detached else process,
            )
        process.wait(START_TIMEOUT_S)
        if not answer.get("adopt"):
            raise _said(answer, options)
        try:
            with SaverClient(options.socket_path, job_id=options.job_id, role="visitor") as client:
                return SaverProcess(
                    pid=client.welcome.pid,
                    listen_address=client.welcome.listen_address,
                    adopted=True,
                    process=None,
                )
        except SaverUnavailable:  # it is just starting, or just ending
            time.sleep(0.1)
    raise SaverUnavailable(
        "another saver holds the lock and does not answer",
        where=options.socket_path,
        hint=f"look into its log {options.log_path}",
    )


def _start(
    options: SaverOptions, environment: dict[str, str] | None
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            options.command(writer),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
            env=environment,
            cwd="/",
        )
    except OSError as error:
        os.close(reader)
        raise SaverUnavailable(f"cannot be started: {error.strerror}", where=sys.executable) from error
    finally:
        os.close(writer)
    try:
        return process, _read_answer(reader, process, options)
    finally:
        os.close(reader)


def _read_answer(reader: int, process: subprocess.Popen[bytes], options: SaverOptions) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            process.kill()
            process.wait()
            raise SaverUnavailable(
                f"it did not start within {START_TIMEOUT_S:g} s", where=options.socket_path
            )
        part = os.read(reader, 65536)
        if not part:
            code = process.wait()
            raise SaverUnavailable(
                f"it ended at its start with code {code}", where=options.socket_path, hint=options.log_path
            )
        data += part
    answer = json.loads(data)
    assert isinstance(answer, dict)
    return answer


def _said(answer: dict[str, Any], options: SaverOptions) -> EasyckptError:
    kind = getattr(errors, str(answer.get("error")), SaverUnavailable)
    where = str(answer.get("where") or options.socket_path)
    found: EasyckptError = kind(str(answer.get("what")), where=where)
    return found


class SaverClient:
    """A connection to a saver. As ``owner`` it keeps the saver alive for as long as it is open.

    Raises:
        SaverUnavailable: nobody listens there.
        ProtocolError: it is another job's saver, or another version.
    """

    def __init__(self, socket_path: str, *, job_id: str, role: str = "owner") -> None:
        self._channel = BlockingChannel(socket_path, timeout_s=ANSWER_TIMEOUT_S)
        try:
            hello = Hello(job_id=job_id, role=role)
            self.welcome = self._channel.ask(hello, Welcome, timeout_s=ANSWER_TIMEOUT_S)
        except BaseException:
            self._channel.close()
            raise

    def begin(self, place: Begin) -> Welcome:
        """The node is part of this generation from now on. Repeating it with the same place is fine.

        Raises:
            StaleGeneration: a newer generation has begun here.
            ProtocolError: several nodes, and the saver has no address or no secret.
        """
        self.welcome = self._channel.ask(place, Welcome, timeout_s=ANSWER_TIMEOUT_S)
        return self.welcome

    def status(self) -> SaverStatus:
        """How the saver is. Cheap: ask once a second."""
        found = self._channel.ask(StatusAsk(), Status, timeout_s=ANSWER_TIMEOUT_S)
        return SaverStatus(
            pid=found.pid,
            generation=found.generation,
            listen_address=found.listen_address,
            memory_step=found.memory_step,
            replicated_step=found.replicated_step,
            durable_step=found.durable_step,
            restored=tuple((item.rank, item.step, item.tier) for item in found.restored),
            degraded=found.degraded or None,
            slot_bytes=found.slot_bytes,
            skipped=found.skipped,
            ranks_open=found.ranks_open,
        )

    def persist_now(self, timeout_s: float) -> Closed:
        """Make the newest step durable on all nodes, whatever the interval says; what is durable then."""
        question = PersistNow(timeout_s=timeout_s)
        return self._channel.ask(question, Closed, timeout_s=timeout_s + ANSWER_TIMEOUT_S)

    def release(self) -> None:
        """The owner goes and may come back: the saver lingers."""
        self._channel.ask(Release(), Done, timeout_s=ANSWER_TIMEOUT_S)
        self.close()

    def shutdown(self, drain_timeout_s: float = 120.0) -> None:
        """The job is over: the saver makes the newest step durable and ends by itself."""
        self._channel.ask(Shutdown(drain_timeout_s=drain_timeout_s), Done, timeout_s=ANSWER_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """End the connection. May be called twice."""
        self._channel.close()

    def __enter__(self) -> SaverClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
