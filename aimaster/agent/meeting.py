"""How an agent comes to its master: hosts it, or connects to the one that is there.

An agent on the machine that the endpoint names tries to host. Where the port is taken, it may be by the
master of this very job that another agent of this machine started a moment ago, so the agent connects and
sees who answers; `MasterLink` tells a stranger from a master.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aimaster.agent.address import LOOPBACK
from aimaster.agent.ground import Ground, hosts_master
from aimaster.agent.hosting import MasterHost, MasterPlan
from aimaster.agent.rundir import ENDPOINT_FILE
from aimaster.agent.spoken import say
from aimaster.clock import Clock
from aimaster.config import RunConfig
from aimaster.errors import MasterLost, PortInUse
from aimaster.rpc.transport import Endpoint


class Meeting:
    """Finds the master, and keeps it alive if this agent hosts it."""

    def __init__(
        self, config: RunConfig, ground: Ground, *, clock: Clock, own: Callable[[int], None]
    ) -> None:
        self._config = config
        self._ground = ground
        self._clock = clock
        self._own = own
        self._host: MasterHost | None = None
        self.lost: asyncio.Future[MasterLost] = asyncio.get_running_loop().create_future()
        """Done when a hosted master cannot be kept alive."""

    @property
    def master_pid(self) -> int | None:
        """Of the master that this agent hosts."""
        return self._host.pid if self._host is not None else None

    async def find(self) -> Endpoint:
        """Where the master listens, after starting it if it is this agent's to start.

        Raises:
            SetupError: It is this agent's to start, and cannot be started.
        """
        endpoint = await self._find()
        self._write_endpoint(endpoint)
        return endpoint

    async def part(self, *, master_too: bool) -> None:
        """Let a hosted master end.

        Args:
            master_too: Whether to end it now; else it is waited for, since other agents say goodbye to it.
        """
        if self._host is None:
            return
        if master_too:
            await self._host.kill_now()
        else:
            await self._host.finish()

    async def _find(self) -> Endpoint:
        rendezvous = self._config.rendezvous
        if rendezvous.host is None:
            return Endpoint.parse(await self._start(f"{LOOPBACK}:0"))
        assert rendezvous.port is not None
        there = Endpoint(host=rendezvous.host, port=rendezvous.port)
        if hosts_master(rendezvous, self._config.nodes.node_rank):
            try:
                return Endpoint.parse(await self._start(str(there)))
            except PortInUse:
                # Another agent of this machine was first, or a stranger has the port: the link will tell.
                self._host = None
        return there

    async def _start(self, listen: str) -> str:
        config, ground = self._config, self._ground
        plan = MasterPlan(
            job=ground.identity.job,
            node=ground.identity.node,
            listen=listen,
            state_dir=ground.state_dir,
            secret_file=ground.secret_file,
            rendezvous=config.rendezvous,
            detector=config.detector,
            hangs=config.hangs,
            policy=config.restart.policy,
            watch=config.paths.watch,
        )
        self._host = MasterHost(plan, clock=self._clock, own=self._own, on_lost=self._on_lost)
        return await self._host.start()

    def _on_lost(self, error: MasterLost) -> None:
        say(str(error))
        if not self.lost.done():
            self.lost.set_result(error)

    def _write_endpoint(self, endpoint: Endpoint) -> None:
        ground = self._ground
        content = {
            "job_id": ground.identity.job,
            "node_id": ground.identity.node,
            "endpoint": str(endpoint),
            "secret_file": str(ground.secret_file) if ground.secret_file is not None else None,
        }
        ground.run_dir.write_json(ENDPOINT_FILE, content)
