"""Where an agent keeps things while it lives (run directory) and what outlives the job (state directory).

The run directory ``<base>/<job_id>/<node_id>`` is private (0700) and belongs to one live agent, proved by a
lock that the kernel drops when the agent dies, however it dies. The next agent of the same job and node
therefore takes over the directory of its predecessor, and in it the saver that still holds the newest
checkpoint.

The lock lies under the user's own base, wherever ``--run-dir`` is: two agents of one job on one machine get
different node ids from it, and the secret that they share on loopback lies beside it. A Unix socket's path
holds 107 bytes, so sockets lie in ``<base>/s/<short hash of the two ids>``, and under the user's own base
where a given one is too long.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aimaster.errors import AlreadyRunning, FolderUnusable, NoSpace, SetupError
from aimaster.ids import JobId, NodeId

AGENTS_PER_MACHINE_MAX = 64
"""How many agents of one job may share a machine (trials and tests) before it is called a mistake."""
STATES_KEPT_MAX = 50
"""Journals and logs of that many jobs are kept in the default state directory; the oldest go first."""
SOCKET_PATH_BYTES_MAX = 107
"""`sockaddr_un.sun_path` without its final zero (unix(7))."""
SOCKET_NAME_BYTES_MAX = 24
LOCK_NAME = "agent.lock"
ENDPOINT_FILE = "endpoint.json"
"""How `aimaster status` finds the master."""
RULES_FILE = "rules.yaml"
"""A job's own diagnosis rules, in its state directory."""
PROCESSES_FILE = "processes.json"
"""The node's processes, for when the master does not answer."""
JOB_FILES = frozenset({"secret"})
"""What the agents of a job on one machine share in ``<base>/<job_id>``; the last one removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """A locked run directory. `remove` it after a clean end, `release` it otherwise."""

    base: Path
    path: Path
    sockets: Path
    shared: Path
    """Folder of the job that all its agents on this machine share."""
    node: NodeId
    lock_fd: int

    def socket(self, name: str) -> Path:
        """Path of the Unix socket of that name, short enough to bind."""
        return self.sockets / f"{name}.sock"

    def write_json(self, name: str, content: object) -> None:
        """Replace a small file; readers find it whole or not at all."""
        draft = self.path / f".{name}.draft"
        draft.write_text(json.dumps(content))
        draft.replace(self.path / name)

    def release(self) -> None:
        """Give up the lock and leave the files to the next agent of this node."""
        os.close(self.lock_fd)

    def remove(self) -> None:
        """Take away what is ours, then the folders above it as far as nobody else uses them."""
        with _folder_lock(self.shared.parent):
            for folder in (self.sockets, self.path, self.shared / self.node):
                shutil.rmtree(folder, ignore_errors=True)
            self.release()
            for entry in self.shared.iterdir():
                _remove_if_abandoned(entry)
            if all(entry.name in JOB_FILES for entry in self.shared.iterdir()):
                shutil.rmtree(self.shared, ignore_errors=True)
            above = (self.sockets.parent, self.sockets.parent.parent, self.path.parent, self.base)
            for folder in (*above, self.shared.parent):
                with contextlib.suppress(OSError):  # not empty: another node or job still lives there
                    folder.rmdir()


def default_base(env: Mapping[str, str]) -> Path:
    """``$AIMASTER_RUN_DIR``, else a folder of this user in the runtime or temporary directory."""
    given = env.get("AIMASTER_RUN_DIR")
    return Path(given) if given else _own_base(env)


def default_state_dir(env: Mapping[str, str], job: JobId) -> Path:
    """``$XDG_STATE_HOME/aimaster/<job_id>``, with the XDG default ``~/.local/state``."""
    home = env.get("XDG_STATE_HOME")
    parent = Path(home) if home else Path(env.get("HOME") or tempfile.gettempdir()) / ".local" / "state"
    return parent / "aimaster" / job


def imports_cache(env: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/aimaster/imports``: what programs import, whatever job ran them, see `modules`."""
    home = env.get("XDG_CACHE_HOME")
    parent = Path(home) if home else Path(env.get("HOME") or tempfile.gettempdir()) / ".cache"
    return parent / "aimaster" / "imports"


def claim_run_dir(base: Path, job: JobId, *, wanted: NodeId | None, env: Mapping[str, str]) -> RunDir:
    """Make and lock the run directory of this agent.

    Args:
        base: Folder of run directories (``--run-dir``, else `default_base`).
        job: The job.
        wanted: Node id that the user gave; None takes the first free one made of the host's name.
        env: For the default base, which holds the sockets where `base` is too long.

    Raises:
        AlreadyRunning: A live agent has the wanted place.
        FolderUnusable: The folder cannot be made, is not ours or cannot be written.
    """
    base = base.absolute()
    own = _own_base(env).absolute()
    make_private(base)
    make_private(own)
    with _folder_lock(own):
        for node in (wanted,) if wanted else _node_names():
            make_private(own / job / node)
            lock_fd = _try_lock(own / job / node / LOCK_NAME)
            if lock_fd is None:
                continue
            path, sockets = base / job / node, _socket_dir(base, job, node, env)
            make_private(path)
            make_private(sockets)
            return RunDir(base=base, path=path, sockets=sockets, shared=own / job, node=node, lock_fd=lock_fd)
    raise AlreadyRunning(
        f"a live agent of job {job} has the place of node {wanted or 'this host'}",
        where=str(own / job),
        next_step="give another --node-id or --rdzv-id, or end the other agent first",
    )


def make_private(path: Path) -> None:
    """Make a folder that only this user can enter, or check that an existing one is usable."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise folder_error(error, path) from error
    if owner != os.getuid():
        raise FolderUnusable(
            f"the folder belongs to user {owner}, not to {os.getuid()}",
            where=str(path),
            next_step="give a folder of your own with --run-dir or --state-dir",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise folder_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), path)


def folder_error(error: OSError, path: Path) -> SetupError:
    """The error of our tree that an operating-system error about a folder means."""
    kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else FolderUnusable
    return kind(
        f"cannot use the folder ({error.strerror})",
        where=str(path),
        next_step="free space there or give another folder with --run-dir or --state-dir"
        if kind is NoSpace
        else "check its permissions or give another folder with --run-dir or --state-dir",
        facts={"errno": error.errno},
    )


def prune_states(parent: Path, *, keep: Path) -> None:
    """Remove the state of the oldest jobs beyond `STATES_KEPT_MAX`; never that of `keep`."""
    with contextlib.suppress(OSError):
        folders = sorted(
            (p for p in parent.iterdir() if p.is_dir()),
            key=lambda p: p.stat().st_mtime,
        )
        for folder in folders[: max(0, len(folders) - STATES_KEPT_MAX)]:
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)


def _own_base(env: Mapping[str, str]) -> Path:
    parent = env.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / f"aimaster-{os.getuid()}"


def _node_names() -> Iterator[NodeId]:
    host = "".join(c if c.isalnum() or c in "-_." else "-" for c in os.uname().nodename) or "node"
    host = host if host[0].isalnum() else f"n{host}"
    yield NodeId(host)
    for number in range(2, AGENTS_PER_MACHINE_MAX + 1):
        yield NodeId(f"{host}-{number}")


def _try_lock(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise folder_error(error, path.parent) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _remove_if_abandoned(folder: Path) -> None:
    """Remove the lock of an agent that is dead and whose run directory is elsewhere."""
    if not folder.is_dir() or [entry.name for entry in folder.iterdir()] != [LOCK_NAME]:
        return
    lock_fd = _try_lock(folder / LOCK_NAME)
    if lock_fd is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_fd)


@contextlib.contextmanager
def _folder_lock(base: Path) -> Iterator[None]:
    """Nobody makes a run directory while another one is being removed, and the other way round."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _socket_dir(base: Path, job: JobId, node: NodeId, env: Mapping[str, str]) -> Path:
    name = hashlib.blake2s(f"{job}/{node}".encode(), digest_size=6).hexdigest()
    for parent in (base, _own_base(env)):
        folder = parent / "s" / name
        if len(os.fsencode(folder)) + 1 + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX:
            return folder
    raise FolderUnusable(
        "the path is too long for a Unix socket (107 bytes)",
        where=str(base),
        next_step="give a shorter --run-dir, or set XDG_RUNTIME_DIR to a shorter folder",
    )
