"""Who am I, and where is my node's saver? Answered once, at the first load or save.

Three cases:

* An agent has started the saver and begun the generation: ``EASYCKPT_SAVER`` and ``EASYCKPT_GENERATION``
  say where and which.
* Another launcher has started several ranks (torchrun, mpirun, …): the first rank of each node starts the
  saver, or adopts the one that an earlier attempt left, and begins the next generation. Ranks learn of each
  other through the job's TCPStore, which every launcher has; that is a handful of small keys, once.
* One process alone: as above without a store. The saver belongs to the checkpoint folder, so that a rerun
  adopts it.

A rank variable that is missing where others are set is an error: nobody becomes rank 0 by accident.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyckpt.errors import Misuse, SaverUnavailable
from easyckpt.link import Seat
from easyckpt.saver.client import SaverClient, SaverOptions, spawn
from easyckpt.saver.protocol import Begin

__all__ = ["Mooring", "Placement", "moor", "read_placement"]

STORE_TIMEOUT_S = 300.0
LINGER_S = 60.0
SOCKET_PATH_BYTES_MAX = 107
"""What the kernel takes."""

_opened = 0
"""How often this process has moored: the store's keys differ each time, on all ranks alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the environment says of this process."""

    rank: int
    world_size: int
    saver: str = ""
    generation: int = 0
    job_id: str = ""
    store_host: str = ""
    store_port: int = 0
    attempt: str = ""


def read_placement(environment: Mapping[str, str]) -> Placement:
    """Read rank, world size and saver.

    Raises:
        Misuse: variables are missing or contradict each other.
    """
    names = ("RANK", "WORLD_SIZE")
    present = [name for name in names if environment.get(name)]
    saver = environment.get("EASYCKPT_SAVER", "")
    if not present and not saver:
        return Placement(rank=0, world_size=1)
    if len(present) < len(names):
        missing = [name for name in names if name not in present]
        raise Misuse(
            f"{', '.join(missing)} is not set, though this is one rank of several",
            hint="start with a launcher that sets it, or set it before easyckpt is used",
        )
    rank, world_size = (_number(environment, name) for name in names)
    if not 0 <= rank < world_size:
        raise Misuse(f"RANK={rank} is not within WORLD_SIZE={world_size}")
    if saver:
        return Placement(
            rank=rank,
            world_size=world_size,
            saver=saver,
            generation=_number(environment, "EASYCKPT_GENERATION"),
            job_id=environment.get("AIMASTER_JOB_ID", ""),
        )
    return Placement(
        rank=rank,
        world_size=world_size,
        job_id=environment.get("TORCHELASTIC_RUN_ID", ""),
        store_host=environment.get("MASTER_ADDR", ""),
        store_port=_number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else 0,
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise Misuse(f"{name}={text!r} is not a number")
    return int(text)


class Mooring:
    """A rank's seat, and the means to get the saver back if it is lost."""

    def __init__(
        self, seat: Seat, *, options: SaverOptions | None = None, begin: Begin | None = None
    ) -> None:
        self.seat = seat
        self._options = options
        self._begin = begin

    def revive(self) -> None:
        """Start the saver anew, if it is this rank that started it; else whoever did has to.

        Raises:
            EasyckptError: it cannot be started.
        """
        if self._options is None or self._begin is None:
            return
        spawn(self._options)
        with SaverClient(self._options.socket_path, job_id=self._options.job_id, role="visitor") as client:
            client.begin(self._begin)


def moor(root: str, environment: Mapping[str, str] | None = None) -> Mooring:
    """Find or start this node's saver, and this rank's seat at it.

    Args:
        root: the checkpoint folder, as an absolute path or a URL.
        environment: ``os.environ`` unless a test says otherwise.

    Raises:
        Misuse: the environment is incomplete.
        SaverUnavailable: the saver cannot be started, or the other ranks cannot be reached.
    """
    placement = read_placement(os.environ if environment is None else environment)
    if placement.saver:
        seat = Seat(
            socket_path=placement.saver,
            job_id=placement.job_id,
            generation=placement.generation,
            rank=placement.rank,
            world_size=placement.world_size,
        )
        return Mooring(seat)
    if placement.world_size == 1:
        return _moor_alone(root, placement)
    return _Gathering(placement).moor()


def _moor_alone(root: str, placement: Placement) -> Mooring:
    job_id, path = _left_by_more_ranks(placement) or ("alone", _socket_path(f"alone {root}"))
    options = SaverOptions(
        socket_path=path,
        job_id=job_id,
        node_id=socket.gethostname(),
        linger_s=LINGER_S,
        log_path=_log_path(path),
        detached=True,
    )
    found = spawn(options)
    with SaverClient(path, job_id=job_id, role="visitor") as client:
        generation = client.welcome.generation + 1
        begin = Begin(generation=generation, node_rank=0, nodes=1, first_rank=0, ranks=1, world_size=1)
        client.begin(begin)
    del found
    seat = Seat(socket_path=path, job_id=job_id, generation=generation, rank=placement.rank, world_size=1)
    return Mooring(seat, options=options, begin=begin)


def _left_by_more_ranks(placement: Placement) -> tuple[str, str] | None:
    """Job and socket of the saver that an earlier attempt of this launcher, with more ranks, has left."""
    if not placement.job_id:
        return None
    path = _socket_path(f"job {placement.job_id} {_launcher_identity()}")
    if not os.path.exists(path):
        return None
    try:
        with SaverClient(path, job_id=placement.job_id, role="visitor"):
            return placement.job_id, path
    except SaverUnavailable:
        return None


class _Gathering:
    """Several ranks find each other through the job's TCPStore."""

    def __init__(self, placement: Placement) -> None:
        global _opened
        _opened += 1
        self._me = placement
        self._prefix = f"easyckpt/{placement.attempt}/{_opened}"
        self._store = self._connect()

    def _connect(self) -> Any:
        from datetime import timedelta

        import torch.distributed as dist

        if not self._me.store_host or not self._me.store_port:
            raise Misuse("MASTER_ADDR and MASTER_PORT are not set, though this is one rank of several")
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                self._me.store_host,
                self._me.store_port,
                is_master=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
        except RuntimeError as error:
            raise SaverUnavailable(
                f"the ranks cannot find each other: {error}",
                where=f"{self._me.store_host}:{self._me.store_port}",
                hint="call torch.distributed.init_process_group() before the first load or save",
            ) from error

    def _set(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", json.dumps(value))

    def _get_all(self, keys: list[str]) -> list[Any]:
        try:
            return [
                json.loads(item) for item in self._store.multi_get([f"{self._prefix}/{key}" for key in keys])
            ]
        except RuntimeError as error:
            raise SaverUnavailable(
                f"not all ranks came to the first load or save: {error}",
                hint="every rank has to load and save",
            ) from error

    def moor(self) -> Mooring:
        me = self._me
        self._set(f"rank/{me.rank}", _node_name())
        names = self._get_all([f"rank/{rank}" for rank in range(me.world_size)])
        nodes = list(dict.fromkeys(names))
        node_rank = nodes.index(names[me.rank])
        ranks = [rank for rank, name in enumerate(names) if name == nodes[node_rank]]
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise Misuse(f"the ranks of this node are not in a row: {ranks}")
        first = ranks[0] == me.rank
        job_id = me.job_id or "job"
        if me.rank == 0:
            self._set("secret", secrets.token_hex(32))
        options: SaverOptions | None = None
        if first:
            options = self._start_saver(job_id, several=len(nodes) > 1, node_rank=node_rank)
        found = self._get_all([f"saver/{index}" for index in range(len(nodes))])
        generation = max(item["generation"] for item in found) + 1
        begin: Begin | None = None
        if options is not None:
            begin = Begin(
                generation=generation,
                node_rank=node_rank,
                nodes=len(nodes),
                first_rank=ranks[0],
                ranks=len(ranks),
                world_size=me.world_size,
                lead_address=found[0]["address"],
                secret=self._get_all(["secret"])[0].encode(),
            )
            with SaverClient(options.socket_path, job_id=job_id, role="visitor") as client:
                client.begin(begin)
        seat = Seat(
            socket_path=found[node_rank]["socket"],
            job_id=job_id,
            generation=generation,
            rank=me.rank,
            world_size=me.world_size,
        )
        return Mooring(seat, options=options, begin=begin)

    def _start_saver(self, job_id: str, *, several: bool, node_rank: int) -> SaverOptions:
        path = _socket_path(f"job {job_id} {_launcher_identity()}")
        options = SaverOptions(
            socket_path=path,
            job_id=job_id,
            node_id=socket.gethostname(),
            linger_s=LINGER_S,
            listen=f"{_own_address(self._me.store_host)}:0" if several else "",
            log_path=_log_path(path),
            detached=True,
        )
        spawn(options)
        with SaverClient(path, job_id=job_id, role="visitor") as client:
            welcome = client.welcome
        said = {"address": welcome.listen_address, "generation": welcome.generation, "socket": path}
        self._set(f"saver/{node_rank}", said)
        return options


def _socket_path(identity: str) -> str:
    """Where the saver of this name listens: in a folder that is this user's alone."""
    name = f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.sock"
    bases = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", "")]
    paths = [Path(base) / f"easyckpt-{os.getuid()}" / name for base in bases if base]
    path = next((item for item in paths if len(os.fsencode(item)) <= SOCKET_PATH_BYTES_MAX), None)
    if path is None:
        raise SaverUnavailable(
            f"a socket's path holds {SOCKET_PATH_BYTES_MAX} bytes, and this is longer",
            where=str(paths[0]),
            hint="set TMPDIR or XDG_RUNTIME_DIR to a folder with a shorter name",
        )
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise SaverUnavailable(
            f"no folder for its socket: {error.strerror}", where=str(folder), hint="set TMPDIR"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise Misuse(
            "this folder must belong to this user alone",
            where=str(folder),
            hint=f"rm -r {folder}, or set TMPDIR",
        )
    return str(path)


def _log_path(socket_path: str) -> str:
    return socket_path.removesuffix(".sock") + ".log"


def _launcher_identity() -> str:
    """The launcher's process on this node, the same for every attempt of a job and for no other job."""
    parent = os.getppid()
    try:
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(parent)
    return f"{parent} {fields[19]}"  # its start time, so that a number that is used again is another launcher


def _node_name() -> str:
    """Equal for the ranks of one node and for no others. Two launchers on one machine are two nodes."""
    return f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()} {_boot_id()}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _own_address(towards: str) -> str:
    """This machine's address on the way to another one; nothing is sent."""
    try:
        infos = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise SaverUnavailable(f"no way to the other ranks: {error}", where=towards) from error
    return f"[{host}]" if ":" in host else host
