"""Standard streams of the workers, as under torchrun, with the last lines of every rank kept.

A stream goes one of these ways:

- **console**: a pseudo-terminal where the agent's own stream is a terminal, else a pipe; the agent passes the
  bytes on. No prefix unless asked for. stdout and stderr share a pseudo-terminal, so that their order stays.
- **file** (``--redirects``): the worker writes the file itself.
- **tee** (``--tee``): a pipe; the agent writes the file and the console, with torchrun's prefix.
- **nowhere** (``--local-ranks-filter`` leaves this rank out): a pipe, of which only the last lines are kept.

stdin is the agent's own descriptor, shared by all workers. Workers never get the agent's stdout and stderr,
so no process that they leave behind can hold the caller's streams open.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from aimaster.agent.lane import Lane
from aimaster.agent.logdirs import LogDirs, RankFiles
from aimaster.agent.sink import Sink
from aimaster.agent.tails import Tail, file_tail
from aimaster.config import Std, StdioConfig

READ_BYTES = 64 * 1024
DRAIN_BYTES_MAX = 2 * 1024 * 1024
"""What an ended worker has left in its pipes, at most; more is from a process that it left behind."""
PIPE_BYTES = 256 * 1024
STREAMS = {Std.OUT: 1, Std.ERR: 2}
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

Output = Callable[[bytes], None]


class Pump:
    """Reads one descriptor of a worker in the event loop, and holds still while a sink is full."""

    def __init__(self, fd: int, outputs: Sequence[Output], sink: Sink | None) -> None:
        self._fd = fd
        self._outputs = tuple(outputs)
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)

    def drain(self) -> None:
        """Take in what is there, past a full sink: a worker has ended, and its words count."""
        taken = 0
        while self._fd >= 0 and taken < DRAIN_BYTES_MAX:
            count = self._read()
            if count == 0:
                return
            taken += count

    def close(self) -> None:
        """Stop reading. May be called twice."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        self._read()
        if self._fd >= 0 and self._sink is not None and self._sink.full:
            self._loop.remove_reader(self._fd)
            self._sink.when_room(self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._readable)

    def _read(self) -> int:
        """Read once and pass it on; 0 if there was nothing."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody has the other side of the pseudo-terminal open any more
            data = b""
        if not data:
            self.close()
            return 0
        for output in self._outputs:
            output(data)
        return len(data)


class RankIO:
    """The streams of one worker. `fds` are the worker's ends; close them here once it has started."""

    def __init__(self, files: RankFiles) -> None:
        self.error_file = files.error
        self.fds: list[int] = []
        self.tails = {Std.OUT: Tail(), Std.ERR: Tail()}
        self.written_files: dict[Std, Path] = {}
        self._pumps: list[Pump] = []
        self._at_end: list[Callable[[], None]] = []

    def add_pump(self, pump: Pump) -> None:
        """Take over a pump."""
        self._pumps.append(pump)

    def at_end(self, action: Callable[[], None]) -> None:
        """Do this when the streams are closed."""
        self._at_end.append(action)

    def close_worker_ends(self) -> None:
        """The worker has its own copies now (or will never have any)."""
        for fd in set(self.fds):
            os.close(fd)
        self.fds = []

    def text(self, std: Std) -> str:
        """The last lines of one stream."""
        path = self.written_files.get(std)
        return file_tail(path) if path is not None else self.tails[std].text()

    def drain(self) -> None:
        """Take in what the ended worker has left in its pipes."""
        for pump in self._pumps:
            pump.drain()

    def close(self) -> None:
        """Drain and close everything. May be called twice."""
        self.close_worker_ends()
        self.drain()
        for pump in self._pumps:
            pump.close()
        self._pumps = []
        for action in self._at_end:
            action()
        self._at_end = []


class Stdio:
    """Makes the streams of workers. One per agent; use in the event loop of the main thread."""

    def __init__(self, config: StdioConfig, *, run_id: str, run_dir: Path, nproc: int, role: str) -> None:
        self._config = config
        self._nproc = nproc
        self._role = role
        self._prefix = os.environ.get(PREFIX_VARIABLE)
        self.log_dirs = LogDirs(config, run_id=run_id, run_dir=run_dir)
        self._terminal = {std: os.isatty(fd) for std, fd in STREAMS.items()}
        self._masters: list[int] = []
        sink = Sink("stdout", spill_dir=run_dir)
        # One thread for both where they are one file: else `2>&1` could mix lines up.
        other = sink if _same_file(1, 2) else Sink("stderr", spill_dir=run_dir)
        self._sinks = {Std.OUT: sink, Std.ERR: other}
        if any(self._terminal.values()):
            asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, self._resize)

    def open(self, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankIO]:
        """Streams for every worker of an attempt, given as pairs of local and global rank.

        Raises:
            FolderUnusable: A log file cannot be made.
            OSError: No more descriptors.
        """
        folder = self.log_dirs.attempt(attempt)
        filtered = {
            Std.OUT: (self._config.stdout_filters, folder / "filtered_stdout.log"),
            Std.ERR: (self._config.stderr_filters, folder / "filtered_stderr.log"),
        }
        made: list[RankIO] = []
        try:
            for local_rank, rank in ranks:
                made.append(self._open_rank(folder, local_rank, rank, filtered))
        except BaseException:
            for io in made:
                io.close()
            raise
        return made

    async def close(self, idle_s_max: float) -> bool:
        """Write what is queued for the caller; False if its streams are broken or took nothing."""
        whole = True
        for sink in dict.fromkeys(self._sinks.values()):
            whole = await sink.close(idle_s_max) and whole
        if any(self._terminal.values()):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGWINCH)
        return whole

    def _open_rank(
        self,
        folder: Path,
        local_rank: int,
        rank: int,
        filtered: dict[Std, tuple[tuple[str, ...], Path]],
    ) -> RankIO:
        files = self.log_dirs.rank(folder, local_rank)
        io = RankIO(files)
        if self.log_dirs.ours:
            io.at_end(lambda: self.log_dirs.forget(files))
        try:
            io.fds.append(_stdin())
            shared: int | None = None
            for std, path in ((Std.OUT, files.stdout), (Std.ERR, files.stderr)):
                tee = bool(self._config.tee.of(local_rank) & std) and path is not None
                chosen = self._config.local_ranks_filter
                shown = not chosen or local_rank in chosen
                if path is not None and not tee:
                    io.fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
                    io.written_files[std] = path
                    continue
                if shared is not None and not tee and shown and self._terminal[std]:
                    io.fds.append(os.dup(shared))
                    continue
                outputs: list[Output] = [io.tails[std].feed]
                if tee and path is not None:
                    outputs.append(_file_output(path, io))
                    if filtered[std][0]:
                        outputs.append(_filter_output(*filtered[std], io))
                if shown:
                    lane = self._lane(std, local_rank, rank, tee)
                    outputs.append(lane.feed)
                    io.at_end(lane.end)
                terminal = shown and not tee and self._terminal[std]
                ours, theirs = self._terminal_pair(std, io) if terminal else _pipe()
                io.fds.append(theirs)
                shared = theirs if terminal else shared
                io.add_pump(Pump(ours, outputs, self._sinks[std] if shown else None))
        except BaseException:
            io.close()
            raise
        return io

    def _lane(self, std: Std, local_rank: int, rank: int, tee: bool) -> Lane:
        prefix = ""
        if tee:
            prefix = f"[{self._role}{local_rank}]:"
            if self._prefix:
                prefix = Template(self._prefix).safe_substitute(
                    role_name=self._role, rank=rank, local_rank=local_rank
                )
        if self._config.prefix:
            prefix = f"[rank{rank}]:"
        return Lane(self._sinks[std], STREAMS[std], prefix=prefix.encode(), alone=self._nproc == 1)

    def _terminal_pair(self, std: Std, io: RankIO) -> tuple[int, int]:
        ours, theirs = pty.openpty()
        for fd in (ours, theirs):
            os.set_inheritable(fd, False)
        # The caller's terminal turns newlines into what it needs; once is enough.
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        _copy_size(STREAMS[std], ours)
        self._masters.append(ours)
        io.at_end(lambda: self._masters.remove(ours))
        return ours, theirs

    def _resize(self) -> None:
        source = 1 if self._terminal[Std.OUT] else 2
        for master in self._masters:
            _copy_size(source, master)


def _pipe() -> tuple[int, int]:
    ours, theirs = os.pipe()
    with contextlib.suppress(OSError):  # the user's limit on pipe memory; the default size does as well
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return ours, theirs


def _stdin() -> int:
    try:
        return os.dup(0)
    except OSError:  # closed by the caller
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def _file_output(path: Path, io: RankIO, *, fresh: bool = True) -> Output:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
    fd = os.open(path, flags, 0o644)
    io.at_end(lambda: os.close(fd))

    def write(data: bytes) -> None:
        # A full disk costs the file, not the training; the console still has the line.
        with contextlib.suppress(OSError):
            os.write(fd, data)

    return write


def _filter_output(texts: tuple[str, ...], path: Path, io: RankIO) -> Output:
    """Lines with one of the texts, appended to a file that all ranks share."""
    write = _file_output(path, io, fresh=False)
    wanted = [text.encode() for text in texts]
    rest = b""

    def feed(data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-READ_BYTES:]
        for line in lines:
            if any(text in line for text in wanted):
                write(line + b"\n")

    return feed


def open_standard_streams() -> None:
    """A caller may have closed one of them: the next file that we open must not take its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
