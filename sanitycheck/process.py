"""One probe process as the engine sees it: start, listen, end, reap.

The caller may be a process with threads and gRPC in it, so a probe is never a bare fork: ``subprocess``
forks and execs in C. The probe is the leader of a session of its own, and only that process group is ever
signalled, and only while its leader is our child that nobody has reaped yet, so that the number cannot have
gone to somebody else. A caller that reaps all its children (an agent that is a child subreaper) may take our
exit status from us; the answer comes over a pipe and does not need it.

Ending: SIGTERM to the group, so that a probe removes what it made; SIGKILL after a grace; and if even that
does not help (uninterruptible sleep), the process is given up after a bounded wait and reported as stuck in
the kernel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sanitycheck.check import Check
from sanitycheck.errors import CodecError
from sanitycheck.facts.codec import decode, encode
from sanitycheck.options import Options
from sanitycheck.outcome import Answered, Cannot, Crashed, Hung, Outcome
from sanitycheck.probe import BOOTSTRAP
from sanitycheck.result import Level

__all__ = ["ProbeProcess", "probe_environment", "search_path"]

ANSWER_BYTES_MAX = 1 << 20
ORDER_BYTES_MAX = 48 << 10
"""Less than a pipe holds, so that writing the order never waits for the probe."""
STDERR_BYTES_KEPT = 4096
READS_MAX = 64
TERM_GRACE_S = 0.5
KILL_WAIT_S = 2.0

_DROPPED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_KEPT = ("AIMASTER_OWNER",)
"""Says to an agent whose process this is: without it, its probes would be ended as leftovers of a worker."""
_DROPPED_PREFIXES = ("TORCHELASTIC_", "AIMASTER_", "EASYCKPT_")
_FORCED = {
    # A probe is not a worker: hooks that torch would load from entry points stay out.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # Asking torch for devices must not start CUDA: probes fork one child per device after it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_UNLESS_SET = {
    # MKL then gives equal bits for equal input of equal alignment, from run to run.
    "MKL_CBWR": "AUTO",
}


def probe_environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The caller's environment without what makes a process a worker, with BLAS set to ``threads``."""
    kept = {
        key: value
        for key, value in environment.items()
        if key in _KEPT or (key not in _DROPPED and not key.startswith(_DROPPED_PREFIXES))
    }
    blas = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**_UNLESS_SET, **kept, **blas, **_FORCED}


def search_path() -> list[str]:
    """The caller's search path, absolute entries only, with the place of this package at the end."""
    return [*(entry for entry in sys.path if os.path.isabs(entry)), str(Path(__file__).resolve().parents[1])]


class ProbeProcess:
    """A running probe. All methods are for the thread that made it, which must live until :meth:`outcome`."""

    def __init__(self, check: Check, options: Options, *, level: Level, deadline_s: float) -> None:
        self.check = check
        self.deadline_s = deadline_s
        self._phase = ""
        self._answer: dict[str, Any] | None = None
        self._buffer = b""
        self._stderr = b""
        self._status: str | None = None
        self._code: int | None = None
        self._cut: tuple[float, bool] | None = None
        self._killed_at: float | None = None
        self.started = time.monotonic()
        self._start(options, level)

    def _start(self, options: Options, level: Level) -> None:
        answer_read, answer_write = os.pipe()
        error_read, error_write = os.pipe()
        order_read, order_write = os.pipe()
        order = {
            "path": search_path(),
            "parent": os.getpid(),
            "check": self.check.id,
            "module": self.check.module,
            "function": self.check.function,
            "level": level.value,
            "deadline_s": self.deadline_s,
            "answer_fd": answer_write,
            "options": encode(options),
        }
        try:
            data = json.dumps(order).encode()
            if len(data) > ORDER_BYTES_MAX:
                raise OSError(
                    f"the order for {self.check.id} has {len(data)} bytes, more than {ORDER_BYTES_MAX}"
                )
            os.write(order_write, data)
            os.close(order_write)
            order_write = -1
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", BOOTSTRAP],
                stdin=order_read,
                stdout=error_write,
                stderr=error_write,
                pass_fds=(answer_write,),
                start_new_session=True,
                env=probe_environment(os.environ, threads=self.check.threads or len(os.sched_getaffinity(0))),
            )
        except BaseException:
            os.close(answer_read)
            os.close(error_read)
            raise
        finally:
            for fd in (answer_write, error_write, order_read, order_write):
                if fd >= 0:
                    os.close(fd)
        self.pid = self._process.pid
        self.answer_fd, self.error_fd = answer_read, error_read
        for fd in (answer_read, error_read):
            os.set_blocking(fd, False)

    def fds(self) -> tuple[int, ...]:
        """Descriptors to wait on for reading."""
        return tuple(fd for fd in (self.answer_fd, self.error_fd) if fd >= 0)

    def read(self) -> None:
        """Take in what the probe has said; never waits."""
        for fd in self.fds():
            # A bounded number of reads: a probe that never stops talking must not keep its deadline from us.
            for _ in range(READS_MAX):
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    self._close(fd)
                    break
                if fd == self.answer_fd:
                    self._take(data)
                else:
                    self._stderr = (self._stderr + data)[-STDERR_BYTES_KEPT:]

    def _close(self, fd: int) -> None:
        os.close(fd)
        if fd == self.answer_fd:
            self.answer_fd = -1
        else:
            self.error_fd = -1

    def _take(self, data: bytes) -> None:
        """The first answer counts; what comes after it is dropped."""
        if self._answer is not None:
            return
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = {"broken": "the probe's answer is not JSON"}
            if "phase" in message:
                self._phase = str(message["phase"])
            else:
                self._answer = message
        if len(self._buffer) > ANSWER_BYTES_MAX:
            self._buffer, self._answer = (
                b"",
                {"broken": f"the answer is longer than {ANSWER_BYTES_MAX} bytes"},
            )

    def step(self, now: float, *, run_ends: float) -> bool:
        """Move on: notice the end, enforce the deadline. True when nothing more is to come."""
        if self._ended():
            return True
        if self._cut is None:
            full_time = now >= self.started + self.deadline_s
            if full_time or now >= run_ends or self._answer is not None:
                # An answer that is complete ends the probe too: it may wait for a grandchild for ever.
                self._cut = (now, full_time)
                if self._answer is None:
                    self._signal(signal.SIGTERM)
            return False
        if self._killed_at is None:
            if now - self._cut[0] >= TERM_GRACE_S:
                self._signal(signal.SIGKILL)
                self._killed_at = now
            return False
        return now - self._killed_at >= KILL_WAIT_S

    def kill(self) -> None:
        """Ask to end at once (the run is over or was cancelled): SIGTERM now, SIGKILL after the grace."""
        if self._cut is None:
            self._cut = (time.monotonic(), False)
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._state() != "gone":
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass  # not a leader yet: the exec has not happened; the next signal will find it
            except PermissionError:
                pass  # a member of the group changed its user; the leader's own deadline remains

    def _state(self) -> str:
        """``running``, ``zombie`` (ended, ours, not reaped) or ``gone`` (reaped by somebody else)."""
        if self._status is not None:
            return "gone"
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return "gone"
        return "running" if info is None else "zombie"

    def _ended(self) -> bool:
        """Whether the probe has ended; its group is cleaned up and it is reaped then."""
        if self._status is not None:
            return True
        state = self._state()
        if state == "running":
            return False
        if state == "zombie":
            # While the leader is a zombie, its number and so its group's cannot be anybody else's.
            self._signal(signal.SIGKILL)
            self._reap()
        else:
            self._status, self._process.returncode = "gone", 0
        self.read()
        return True

    def _reap(self) -> None:
        try:
            _, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            self._status, self._process.returncode = "gone", 0
            return
        self._code = os.waitstatus_to_exitcode(status)
        self._status, self._process.returncode = "reaped", self._code

    def outcome(self) -> Outcome:
        """What came of it; closes what is open. Call once, after :meth:`step` said True."""
        for fd in self.fds():
            self._close(fd)
        took_s = time.monotonic() - self.started
        if self._answer is not None:
            return self._answered(took_s)
        if self._cut is not None:
            stuck = self._status is None
            if stuck:
                self._process.returncode = -signal.SIGKILL  # no longer ours to wait for
            return Hung(
                phase=self._phase,
                after_s=self._cut[0] - self.started,
                full_time=self._cut[1],
                unkillable=stuck,
                pid=self.pid if stuck else 0,
            )
        by_signal = self._code is not None and self._code < 0
        return Crashed(
            signal=signal.Signals(-self._code).name if by_signal and self._code else "",
            code=self._code,
            phase=self._phase,
            message=_last_line(self._stderr),
            duration_s=took_s,
        )

    def _answered(self, took_s: float) -> Outcome:
        answer = self._answer or {}
        if "cannot" in answer:
            return Cannot(
                kind=str(answer["cannot"]), message=str(answer.get("message", "")), duration_s=took_s
            )
        if "facts" not in answer:
            text = str(answer.get("broken", "the probe's answer holds no facts"))
            return Cannot(kind="broken", message=text, duration_s=took_s)
        try:
            return Answered(facts=decode(self.check.facts, answer["facts"]), duration_s=took_s)
        except CodecError as error:
            return Cannot(kind="broken", message=str(error), duration_s=took_s)


def _last_line(data: bytes) -> str:
    lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
