"""``python -m easyckpt.saver``: started by an agent, or by the first rank of a node; not by hand.

Prints one line of JSON to the descriptor given with ``--ready-fd`` when it serves: ``{"pid": …, "address":
…}``, or ``{"error": …, "what": …}``. Two savers for one socket never run: the second finds the lock taken
and says so with ``"adopt": true``, and its caller uses the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import logging.handlers
import os
import signal
import sys
from pathlib import Path

import psutil

from easyckpt.errors import EasyckptError, Misuse, SaverUnavailable
from easyckpt.saver.service import DRAIN_TIMEOUT_S, Saver, SaverConfig
from easyckpt.slots import HEADROOM_BYTES

__all__ = ["main"]

LOG_BYTES_MAX = 1 << 20
NICENESS = 5
"""Training comes first. Not more: on busy processors a saver that hardly runs makes steps durable late, and
takes as much time from training."""

IO_PRIORITY = 7
"""Lowest of the ordinary class. Not the idle class: some schedulers let that starve for as long as anybody
else reads, and a job that is being stopped has seconds to make its memory durable."""


def main(arguments: list[str] | None = None) -> int:
    """Run a saver to its end. Returns the exit code."""
    options = _parse(arguments)
    if options.detached and os.fork():
        os._exit(0)
    try:
        lock = _lock(options.socket + ".lock")
        if lock is None:
            _tell(options.ready_fd, {"adopt": True})
            return 0
        _set_up_log(options.log)
        config = SaverConfig(
            socket_path=options.socket,
            job_id=options.job_id,
            node_id=options.node_id,
            linger_s=options.linger,
            listen=options.listen,
            advertise=options.advertise,
            secret=_read_secret(options.secret_file),
            memory_limit=options.memory_limit,
            headroom=options.headroom,
        )
        _step_back()
        try:
            asyncio.run(_serve(config, options.ready_fd))
        finally:
            Path(options.socket + ".lock").unlink(missing_ok=True)
    except EasyckptError as error:
        _tell(options.ready_fd, {"error": type(error).__name__, "what": error.what, "where": error.where})
        logging.getLogger("easyckpt.saver").error("%s", error)
        return error.exit_code
    _put_log_away(options)
    if options.then:
        os.execv(options.then[0], options.then)
    return 0


def _step_back() -> None:
    """Leave processors and devices to training. Threads that begin later inherit it."""
    os.nice(NICENESS)
    with contextlib.suppress(psutil.Error, OSError, AttributeError):  # a wish, where the system knows it
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, IO_PRIORITY)


async def _serve(config: SaverConfig, ready_fd: int) -> None:
    saver = Saver(config)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, saver.shutdown, DRAIN_TIMEOUT_S)
    # Ctrl-C in a terminal goes to the agent, which decides what happens to us.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    saver.listen()
    _tell(ready_fd, {"pid": os.getpid(), "address": saver.listen_address})
    await saver.run()


def _lock(path: str) -> int | None:
    """Hold the lock for as long as this process lives; None if another one does.

    The file is removed at the end, so what was locked must still be what the name stands for.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SaverUnavailable(f"cannot be locked: {error.strerror}", where=path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        try:
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _read_secret(path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise Misuse(f"the secret cannot be read: {error.strerror}", where=path) from error


def _set_up_log(path: str) -> None:
    logger = logging.getLogger("easyckpt.saver")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Loudness(logging.WARNING))
    if path:
        try:
            handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
        except OSError as error:
            raise Misuse(f"the log cannot be written: {error.strerror}", where=path) from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    else:
        logger.addHandler(logging.NullHandler())


class _Loudness(logging.Handler):
    """Remembers whether anything was worth a warning."""

    heard = False

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        _Loudness.heard = True


def _put_log_away(options: argparse.Namespace) -> None:
    logging.shutdown()
    if options.log and options.detached and not _Loudness.heard:
        Path(options.log).unlink(missing_ok=True)


def _tell(fd: int, message: dict[str, object]) -> None:
    if fd < 0:
        return
    try:
        os.write(fd, json.dumps(message).encode() + b"\n")
        os.close(fd)
    except OSError:  # whoever started us is gone; we linger for the next one
        pass


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m easyckpt.saver", description="The saver process of a node."
    )
    parser.add_argument("--socket", required=True, help="path of the Unix socket")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--node-id", default="")
    parser.add_argument("--linger", type=float, default=60.0, help="seconds to stay when nobody is connected")
    parser.add_argument("--listen", default="", help="host:port for other savers; none by default")
    parser.add_argument("--advertise", default="", help="host that other nodes reach this one under")
    parser.add_argument("--secret-file", default="")
    parser.add_argument("--memory-limit", type=int, default=None, help="bytes that slots may take")
    parser.add_argument("--headroom", type=int, default=HEADROOM_BYTES, help="bytes that slots leave free")
    parser.add_argument("--log", default="")
    parser.add_argument(
        "--detached", action="store_true", help="be nobody's child; leave no log if all went well"
    )
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--then", type=json.loads, default=(), help="JSON list: what to execute at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads that still hang in storage must not keep the process; all that matters is closed.
    os._exit(code)
