"""Notifications: a webhook and a command are told what people want to know at once.

```
journalled step ─▶ Notices (pure) ─▶ one bounded queue and one thread per target ─▶ POST, or a command
```

Nothing here can hold a decision up: `put` never waits, a full queue drops what is new, and each target has a
thread of its own, so that one that hangs keeps no other from being told. A try that fails is repeated with
growing pauses, `TRIES_MAX` times; an answer that says that it will never do (4xx but 408 and 429) is not.
When the master ends it waits `DRAIN_S` for what is queued. A notice on its way when a master dies is lost:
the next life does not say again what is in its journal already.

What a target is told is one JSON object. A webhook's address often is its own password: it is never logged,
redirects are not followed, and of the address only the host is named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shlex
import signal
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aimaster.core.notices import Notice
from aimaster.errors import UsageError
from aimaster.ids import JobId

__all__ = ["CommandTarget", "Notifier", "Target", "Undelivered", "WebhookTarget", "body_of"]

SCHEMA = 1
QUEUE_MAX = 100
TRIES_MAX = 6
FIRST_PAUSE_S = 1.0
PAUSE_MAX_S = 30.0
TRY_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0
DRAIN_S = 5.0
"""How long the end of a job may wait for its notices; the agent waits longer for its master."""
ABORT_S = 1.0
"""For a try that was given up to end."""
SECRET_VARIABLES = ("AIMASTER_JOB_SECRET", "AIMASTER_METRICS_TOKEN", "AIMASTER_NOTIFY_WEBHOOK")
"""A command is not given these."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undelivered:
    """A try that failed."""

    why: str
    """Names no secret."""
    for_good: bool = False
    """Whether another try cannot help."""


class Target(Protocol):
    """Whom to tell. Used by one thread, but for `abort`."""

    name: str
    """For the log, without a secret."""

    def send(self, body: bytes) -> Undelivered | None:
        """One try, bounded in time."""

    def abort(self) -> None:
        """Give up a try that is under way, as far as that is possible. Any thread."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """A redirected POST becomes a GET, or goes to somebody else: neither was asked for."""


class WebhookTarget:
    """POSTs the object to an address.

    Raises:
        UsageError: it is no address.
    """

    def __init__(self, url: str) -> None:
        self.name, self._url = f"webhook at {_host_of(url)}", url
        self._opener = urllib.request.build_opener(_NoRedirect())

    def send(self, body: bytes) -> Undelivered | None:
        """See `Target`."""
        headers = {"Content-Type": "application/json", "User-Agent": "aimaster"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=TRY_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                for_good = error.code < 500 and error.code not in (408, 429)
                return Undelivered(why=f"HTTP {error.code}", for_good=for_good)
        except OSError as error:
            # The text of a lower error may hold the address; its kind and reason do not.
            reason = getattr(error, "reason", error)
            return Undelivered(why=getattr(reason, "strerror", None) or type(reason).__name__)
        except ValueError:  # http.client refuses control characters, and quotes them
            return Undelivered(why="the address cannot be used", for_good=True)

    def abort(self) -> None:
        """A socket that is waited for is bounded by its time-out, and its thread ends with the process."""


def _host_of(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not host or any(c.isspace() for c in url):
        raise UsageError(
            "this is no address of a webhook", next_step="give --notify-webhook https://HOST/PATH"
        )
    return host


class CommandTarget:
    """Runs a command with the object on its standard input; its output is dropped.

    Raises:
        UsageError: the words cannot be taken apart.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"this is no command line: {error}", where="--notify-command") from None
        if not self._words:
            raise UsageError("this is no command line", where="--notify-command")
        self.name = f"command {os.path.basename(self._words[0])}"
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, body: bytes) -> Undelivered | None:
        """See `Target`."""
        env = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            return Undelivered(why=error.strerror or "cannot be started", for_good=True)
        self._process = process
        try:
            process.communicate(body, timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.abort()
            process.communicate()
            return Undelivered(why=f"not done after {COMMAND_TIMEOUT_S:g} s")
        finally:
            self._process = None
        return Undelivered(why=f"exit code {process.returncode}") if process.returncode else None

    def abort(self) -> None:
        """Kill it and what it started in its session; it is our child and not waited for yet."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def body_of(notice: Notice, *, job: JobId, at_wall_s: float) -> bytes:
    """What a target is told. ``text`` is what chat services show of an object."""
    plain = {
        "schema": SCHEMA,
        "text": f"aimaster job {job}: {notice.sentence}",
        "job_id": job,
        "kind": notice.kind.value,
        "at_wall_s": at_wall_s,
        "exit_code": notice.exit_code,
        "facts": dict(notice.facts),
    }
    return json.dumps(plain).encode()


class Notifier:
    """Tells all targets. Any thread.

    Args:
        targets: whom to tell.
        first_pause_s: between the first try and the second; each later one is twice as long.
    """

    def __init__(self, targets: Sequence[Target], *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._channels = [_Channel(target, first_pause_s) for target in targets]

    def put(self, body: bytes) -> None:
        """Have it said; never waits."""
        for channel in self._channels:
            channel.put(body)

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Wait a while for what is queued, then give up."""
        for channel in self._channels:
            channel.finish()
        for channel in self._channels:
            channel.join(drain_s)


class _Channel:
    """One target, its queue and its thread."""

    def __init__(self, target: Target, first_pause_s: float) -> None:
        self._target = target
        self._first_pause_s = first_pause_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_MAX)
        self._given_up = threading.Event()
        self._dropping = False
        self._thread = threading.Thread(target=self._run, name=f"notify-{target.name}", daemon=True)
        self._thread.start()

    def put(self, body: bytes) -> None:
        try:
            self._queue.put_nowait(body)
            self._dropping = False
        except queue.Full:
            if not self._dropping:
                log.warning(
                    "%s: %d notices wait already; newer ones are dropped", self._target.name, QUEUE_MAX
                )
            self._dropping = True

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):  # then `join` gives up
            self._queue.put_nowait(None)

    def join(self, drain_s: float) -> None:
        self._thread.join(drain_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._target.abort()
            self._thread.join(ABORT_S)
            log.warning("%s: not everything could be said before the end", self._target.name)

    def _run(self) -> None:
        while not self._given_up.is_set():
            body = self._queue.get()
            if body is None:
                return
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        pause_s = self._first_pause_s
        for attempt in range(1, TRIES_MAX + 1):
            trouble = self._target.send(body)
            if trouble is None:
                return
            last = trouble.for_good or attempt == TRIES_MAX
            log.warning("%s: %s%s", self._target.name, trouble.why, "; given up" if last else "")
            if last or self._given_up.wait(pause_s):
                return
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
