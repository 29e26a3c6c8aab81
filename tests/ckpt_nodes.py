"""Savers as nodes: real saver processes here, and checkpointers of any rank in the test's own process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from easyckpt.api import Checkpointer
from easyckpt.saver.client import SaverClient, SaverOptions, SaverProcess, SaverStatus, spawn
from easyckpt.saver.protocol import Begin

SECRET = b"a secret of the tests, long enough"
PATIENCE_S = 60.0


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Poll for something that has no signal."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)


@dataclass
class Node:
    """One saver process, as one node has it."""

    options: SaverOptions
    process: SaverProcess
    owner: SaverClient | None = None
    begun: Begin | None = None

    @property
    def address(self) -> str:
        return self.process.listen_address

    def begin(self, place: Begin) -> None:
        """As an agent does it."""
        if self.owner is None:
            self.owner = SaverClient(self.options.socket_path, job_id=self.options.job_id)
        self.begun = place
        self.owner.begin(place)

    def status(self) -> SaverStatus:
        assert self.owner is not None
        return self.owner.status()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.owner is not None:
            self.owner.close()
            self.owner = None
        process = self.process.process
        if process is not None:
            process.kill()
            process.wait(PATIENCE_S)

    def restart(self) -> None:
        """A saver in the place of one that was killed, at the same address."""
        options = SaverOptions(
            **{
                **{name: getattr(self.options, name) for name in SaverOptions.__slots__},
                "listen": self.address,
            }
        )
        self.options = options
        self.process = spawn(options)

    def is_alive(self) -> bool:
        process = self.process.process
        return process is not None and process.poll() is None


@dataclass
class Nodes:
    """Nodes with one or more ranks each. Generation and ranks are set by `begin`."""

    folder: Path
    env: pytest.MonkeyPatch
    linger_s: float = 60.0
    memory_limit: int | None = None
    root: str = ""
    """Where checkpoints go; a folder below `folder` if it is empty."""
    nodes: list[Node] = field(default_factory=list)
    checkpointers: list[Checkpointer] = field(default_factory=list)
    started: list[Node] = field(default_factory=list)

    def start(self, *, tcp: bool = False) -> Node:
        """One more saver process; it has no place yet."""
        number = len(self.started)
        secret = self.folder / "secret"
        secret.write_bytes(SECRET)
        options = SaverOptions(
            socket_path=str(self.folder / f"n{number}" / "s"),
            job_id="test-job",
            node_id=f"n{number}",
            linger_s=self.linger_s,
            listen="127.0.0.1:0" if tcp else "",
            secret_file=str(secret),
            memory_limit=self.memory_limit,
            headroom=64 << 20,
            log_path=str(self.folder / f"n{number}.log"),
        )
        node = Node(options=options, process=spawn(options))
        self.started.append(node)
        return node

    def begin(
        self,
        generation: int,
        nodes: list[Node],
        *,
        ranks: int = 1,
        progress: bool = False,
        life: str = "",
        replicas: int = 1,
        restore_below: int | None = None,
    ) -> None:
        """A generation of these nodes, in this order, with ``ranks`` ranks each."""
        self.nodes = nodes
        for node_rank, node in enumerate(nodes):
            place = Begin(
                generation=generation,
                node_rank=node_rank,
                nodes=len(nodes),
                first_rank=node_rank * ranks,
                ranks=ranks,
                world_size=len(nodes) * ranks,
                lead_address=nodes[0].address,
                progress_expected=progress,
                life=life,
                replicas=replicas,
                restore_below=restore_below,
            )
            node.begin(place)

    def checkpointer(self, rank: int, **options: object) -> Checkpointer:
        """A checkpointer as a worker of this rank would make it."""
        node = next(
            node
            for node in self.nodes
            if node.begun is not None
            and node.begun.first_rank <= rank < node.begun.first_rank + node.begun.ranks
        )
        assert node.begun is not None
        self.env.setenv("EASYCKPT_SAVER", node.options.socket_path)
        self.env.setenv("EASYCKPT_GENERATION", str(node.begun.generation))
        self.env.setenv("AIMASTER_JOB_ID", node.options.job_id)
        self.env.setenv("RANK", str(rank))
        self.env.setenv("WORLD_SIZE", str(node.begun.world_size))
        made = Checkpointer(self.root or self.folder / "ckpt", **options)  # type: ignore[arg-type]
        self.checkpointers.append(made)
        return made

    def workers(self, **options: object) -> list[Checkpointer]:
        """One checkpointer for each rank; those of before are dropped, as when their processes end."""
        self.drop_workers()
        begun = self.nodes[0].begun
        assert begun is not None
        return [self.checkpointer(rank, **options) for rank in range(begun.world_size)]

    def load_together(
        self, workers: list[Checkpointer], states: list[dict[str, Any]], **options: Any
    ) -> list[int | None]:
        """Every rank's load at once, as ranks do it."""
        with ThreadPoolExecutor(len(workers)) as pool:
            loads = [
                pool.submit(worker.load, state, **options)
                for worker, state in zip(workers, states, strict=True)
            ]
            return [load.result(PATIENCE_S) for load in loads]

    def drop_workers(self) -> None:
        """End the connections of all checkpointers without a goodbye, as a kill does."""
        for made in self.checkpointers:
            made.__exit__(RuntimeError, RuntimeError("killed"), None)
        self.checkpointers.clear()

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        self.drop_workers()
        for node in self.started:
            node.kill()


@contextmanager
def make_nodes(folder: Path, env: pytest.MonkeyPatch, **options: object) -> Iterator[Nodes]:
    """Nodes that are all gone at the end."""
    nodes = Nodes(folder=folder, env=env, **options)  # type: ignore[arg-type]
    try:
        yield nodes
    finally:
        nodes.close()


def process_is_gone(pid: int) -> bool:
    """Whether no process has this number, not even as a zombie of another parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
