"""The node agent: one process per node, owner of everything that runs for the job there.

```
ground (folders, secret) ─▶ template, saver, node check and master start side by side
      ─▶ link to the master ─▶ orders are carried out, facts and heartbeats go up
      ─▶ EndNode, a signal, or a master lost for too long ─▶ workers stopped, saver drained, all removed
```

One event loop in the main thread, which is the parent of every worker. What ends the agent is decided in one
place (`_live`); what must be cleared away is cleared in one place (`_leave`), whichever way it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from aimaster.agent.assignment import NodeIdentity
from aimaster.agent.check import check_node
from aimaster.agent.duties import Duties
from aimaster.agent.ending import Ending, durable_line, ending_of
from aimaster.agent.ground import Ground, prepare_ground
from aimaster.agent.lookout import Lookout
from aimaster.agent.meeting import Meeting
from aimaster.agent.outlook import look_out
from aimaster.agent.preemption import stop_and_persist
from aimaster.agent.reaper import Reaper
from aimaster.agent.recheck import Rechecks, Rules
from aimaster.agent.rundir import imports_cache
from aimaster.agent.signals import meaning, watch_signals
from aimaster.agent.spoken import say
from aimaster.agent.spy import Spy
from aimaster.agent.standing import Standing
from aimaster.agent.stdio import open_standard_streams
from aimaster.agent.sweep import sweep_command
from aimaster.agent.witness import ObservedClock, Witness
from aimaster.agent.workers import Workers
from aimaster.clock import SystemClock
from aimaster.config import CommandOn, ProgramKind, RunConfig
from aimaster.core.commands import EndNode, StartWorkers
from aimaster.core.events import NodeEvent, NodeLeft, StopKind, StopRequested
from aimaster.errors import AimasterError, Interrupted, MasterLost, MasterUnreachable, OwnBug, Preempted
from aimaster.integrations.easyckpt import NodeSaver, SaverPlan
from aimaster.rpc.client import LinkCallbacks, LinkState, MasterLink
from aimaster.rpc.transport import Endpoint

HOUSEKEEPING_S = 1.0
NOT_A_WORD = "what is there says nothing"
WAIT_SAID_AFTER_S = 5.0
"""A master that does not answer is waited for in silence for so long, then people are told."""
STOP_ANSWER_S = 10.0
"""How long the master may take to answer a request to stop before the agent stops by itself."""
GOODBYE_S = 5.0
"""How long the last facts may take to reach the master."""
DRAIN_S = 120.0
"""How long the saver may take to make its newest step durable when the job has finished."""
DRAIN_AFTER_STOP_S = 10.0
"""The same when somebody wants it to end."""


def run(config: RunConfig, *, rules: Rules) -> int:
    """Run this node's part of the job.

    Args:
        config: What the command line and the environment say.
        rules: Reads the rules of diagnosis, when a worker has failed.

    Returns:
        The exit code, see `aimaster.errors.EXIT_CODES`.

    Raises:
        AimasterError: What ended it before the master could; carries the exit code.
    """
    open_standard_streams()
    ground = prepare_ground(config, os.environ)
    return asyncio.run(_run(config, ground, rules))


async def _run(config: RunConfig, ground: Ground, rules: Rules) -> int:
    return await Agent(config, ground, rules).run()


class Agent:
    """One life of an agent."""

    def __init__(self, config: RunConfig, ground: Ground, rules: Rules) -> None:
        self._config = config
        self._ground = ground
        self._clock = SystemClock()
        self._reaper = Reaper(ground.run_dir.path)
        self._saver = NodeSaver(_saver_plan(config, ground), say=say, own=self._reaper.own)
        self._workers = Workers(
            config.program,
            _node_identity(config, ground),
            nproc=config.nodes.nproc,
            stdio=config.stdio,
            warm=config.warm,
            reaper=self._reaper,
            on_exit=lambda ended: self._duties.worker_ended(ended),
        )
        self._rechecks = Rechecks(config, ground.identity, rules=rules, report=self._report)
        self._duties = Duties(
            ground.identity,
            workers=self._workers,
            saver=self._saver,
            rechecks=self._rechecks,
            stop_grace_s=config.restart.shutdown_timeout_s,
            report=self._report,
            idle_on=self._is_idle_on,
        )
        self._meeting = Meeting(config, ground, clock=self._clock, own=self._reaper.own)
        self._lookout = Lookout(
            ground.identity,
            duties=self._duties,
            workers=self._workers,
            saver=self._saver,
            report=self._report,
        )
        spy = Spy(own=self._reaper.own, disown=self._reaper.disown)
        self._outlook = look_out(config, os.environ, spy)
        self._witness = Witness(
            self._workers.ranks, folder=ground.run_dir.path, spy=spy, clock=ObservedClock()
        )
        self._standing = Standing(
            config,
            ground,
            duties=self._duties,
            workers=self._workers,
            saver=self._saver,
            sights=(self._outlook, self._witness, self._rechecks),
            master_pid=lambda: self._meeting.master_pid,
        )
        self._endpoint: Endpoint | None = None
        self._link: MasterLink | None = None
        self._linking: asyncio.Task[None] | None = None
        self._asked_to_stop: asyncio.Future[AimasterError] = asyncio.get_running_loop().create_future()
        self._stop_signal: signal.Signals | None = None
        self._leaving = False

    async def run(self) -> int:
        """Live until the job needs this node no more; the exit code."""
        forget_signals = watch_signals(self._config.restart.signals_to_handle, self._on_signal)
        ending: Ending | None = None
        try:
            ending = ending_of(await self._live())
            return ending.exit_code
        except AimasterError as error:
            ending = Ending(exit_code=int(error.exit_code))
            raise
        finally:
            self._leaving = True
            await self._leave(ending or Ending(exit_code=int(OwnBug.exit_code)))
            forget_signals()

    async def _live(self) -> EndNode | AimasterError:
        """Start, work, and find out what ends it."""
        self._workers.prepare_template()
        say(str(self._outlook))
        starting = asyncio.create_task(self._start(), name="start")
        first: Endpoint | AimasterError = await self._first(starting, self._stopping())
        if not isinstance(first, Endpoint):
            return first
        self._endpoint = first
        self._link = link = self._make_link(first)
        # Not among the tasks that end together: the goodbye still needs it.
        self._linking = asyncio.create_task(link.run(), name="link")
        ended: EndNode | AimasterError = await self._first(
            asyncio.create_task(self._until_lost(link, self._linking), name="watch-link"),
            asyncio.create_task(self._duties.run(), name="duties"),
            asyncio.create_task(self._lookout.run(), name="lookout"),
            asyncio.create_task(self._witness.run(), name="witness"),
            asyncio.create_task(self._keep_house(), name="housekeeping"),
            asyncio.ensure_future(self._meeting.lost),
            self._stopping(),
        )
        return ended

    async def _start(self) -> Endpoint:
        """Check the node and find the master, side by side; a refusal ends the rest."""
        check = asyncio.create_task(check_node(self._config, self._ground.identity.node), name="check")
        others = [
            asyncio.create_task(self._meeting.find(), name="meeting"),
            asyncio.create_task(self._saver.start(), name="saver"),
        ]
        try:
            results = await asyncio.gather(check, *others)
        except BaseException:
            for task in (check, *others):
                task.cancel()
            await asyncio.gather(check, *others, return_exceptions=True)
            raise
        endpoint = results[1]
        assert isinstance(endpoint, Endpoint)
        return endpoint

    async def _first(self, *tasks: asyncio.Future[Any]) -> Any:
        """The result of whatever ends first; the others are cancelled."""
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # The master ---------------------------------------------------------------------------------------------

    def _make_link(self, endpoint: Endpoint) -> MasterLink:
        return MasterLink(
            endpoint,
            credentials=self._ground.credentials,
            identity=self._ground.identity,
            callbacks=LinkCallbacks(
                hello=self._standing.hello,
                heartbeat=self._standing.heartbeat,
                on_command=self._duties.give,
                on_state=self._on_link_state,
            ),
            clock=self._clock,
        )

    async def _until_lost(self, link: MasterLink, linking: asyncio.Task[None]) -> AimasterError:
        """The error that an agent without a master ends with; raises what the link was refused with."""
        begun = self._clock.monotonic()
        said = False
        while True:
            await asyncio.wait([linking], timeout=HOUSEKEEPING_S)
            if linking.done():
                linking.result()
                return OwnBug("the link to the master was closed while the job was under way")
            now = self._clock.monotonic()
            if link.welcome is None and not said and now - begun > WAIT_SAID_AFTER_S:
                say(f"waiting for the master at {self._endpoint}: {link.trouble or NOT_A_WORD}")
                said = True
            error = self._lost_for_good(link, now, begun)
            if error is not None:
                return error

    def _lost_for_good(self, link: MasterLink, now: float, begun: float) -> AimasterError | None:
        rendezvous = self._config.rendezvous
        where = str(self._endpoint)
        if link.welcome is None:
            if now - begun < rendezvous.join_timeout_s:
                return None
            return MasterUnreachable(
                f"the master did not answer within {rendezvous.join_timeout_s:g} s "
                f"({link.trouble or NOT_A_WORD})",
                where=where,
                next_step="start aimaster run on the node of --rdzv-endpoint, or correct the endpoint",
            )
        lost_since = link.lost_since
        if lost_since is None or now - lost_since < link.welcome.agent_orphan_timeout_s:
            return None
        return MasterLost(
            f"no master for {now - lost_since:.0f} s ({link.trouble}); the workers are stopped",
            where=where,
            next_step="start the job again with the same --rdzv-id: it continues from its newest checkpoint",
        )

    def _on_link_state(self, state: LinkState) -> None:
        if state is LinkState.LOST and self._link is not None:
            bound = self._link.welcome.agent_orphan_timeout_s if self._link.welcome else 0.0
            say(f"lost the master ({self._link.trouble}); workers go on, for {bound:g} s at most")

    def _report(self, event: NodeEvent) -> None:
        if self._link is not None:
            self._link.report(event)

    # The end ------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop_signal is not None:
            if number in (signal.SIGINT, signal.SIGTERM):
                self._end_at_once(number)
            return
        self._stop_signal = number
        if self._leaving:
            say(f"{number.name}: already leaving; a second one ends at once")
            return
        say(f"{number.name}: stopping the job; a second one ends at once")
        if self._link is None or self._link.connected_since is None:
            self._end_with(number, "no master to ask")
            return
        identity = self._ground.identity
        self._report(
            StopRequested(
                node=identity.node,
                incarnation=identity.incarnation,
                kind=meaning(number),
                signal=int(number),
            )
        )
        asyncio.get_running_loop().call_later(
            STOP_ANSWER_S, self._end_with, number, "the master has not answered"
        )

    def _end_at_once(self, number: signal.Signals) -> None:
        """Leave now: the kernel ends workers, template and master with us, and a saver sweeps up later."""
        say(f"{number.name} again: ending at once")
        kind = Interrupted if meaning(number) is StopKind.INTERRUPT else Preempted
        os._exit(int(kind.exit_code))

    def _end_with(self, number: signal.Signals, why: str) -> None:
        if not self._asked_to_stop.done():
            kind = Interrupted if meaning(number) is StopKind.INTERRUPT else Preempted
            self._asked_to_stop.set_result(kind(f"stopped by {number.name} ({why})"))

    def _stopping(self) -> asyncio.Future[AimasterError]:
        # Shielded, since losing a race must not cancel the one future that two phases wait for.
        return asyncio.shield(self._asked_to_stop)

    async def _leave(self, ending: Ending) -> None:
        """Stop and clear away whatever there is, as far as it goes; the exit code is decided already."""
        durable = None
        if ending.preempted:
            grace_s = self._config.restart.preemption_grace_s
            durable = await stop_and_persist(
                grace_s, stop=self._duties.stop_workers, persist=self._saver.persist_now
            )
        else:
            await self._duties.stop_workers()
        self._duties.close()
        await self._rechecks.close()
        if self._link is not None:
            await self._say_goodbye(self._link, ending.exit_code)
        saver_lingers = self._saver.holds_steps and not ending.clean
        if not saver_lingers:
            await self._saver.finish(DRAIN_S if ending.exit_code == 0 else DRAIN_AFTER_STOP_S)
        else:
            await self._saver.release()
        await self._meeting.part(master_too=self._link is None or self._link.lost_since is not None)
        if not await self._workers.close():
            say("some output of the workers could not be written: nobody reads it")
        if ending.sentence:
            say(ending.sentence)
        if ending.preempted:
            say(durable_line(durable))
        if not saver_lingers:
            self._ground.run_dir.remove()
        else:
            self._ground.run_dir.release()  # removed by the saver's last act, see `aimaster.agent.sweep`

    async def _say_goodbye(self, link: MasterLink, exit_code: int) -> None:
        assert self._linking is not None
        if link.connected_since is not None:
            await self._lookout.look_at_saver()
            identity = self._ground.identity
            link.report(NodeLeft(node=identity.node, incarnation=identity.incarnation, exit_code=exit_code))
            await link.flush(GOODBYE_S)
        await link.close()
        # However it ended was dealt with while it counted.
        await asyncio.gather(self._linking, return_exceptions=True)

    async def _keep_house(self) -> None:
        while True:
            self._workers.tick()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _is_idle_on(self, order: StartWorkers) -> bool:
        program = self._config.program
        alone = program.kind is ProgramKind.COMMAND and program.command_on is CommandOn.FIRST
        return alone and order.node_rank != 0


def _saver_plan(config: RunConfig, ground: Ground) -> SaverPlan:
    return SaverPlan(
        job=ground.identity.job,
        node=ground.identity.node,
        socket=ground.run_dir.socket("saver"),
        log=ground.run_dir.path / "saver.log",
        listen_host=ground.listen_host,
        advertise=ground.address,
        secret_file=ground.secret_file,
        linger_s=config.checkpoint.saver_linger_s,
        memory_limit_bytes=config.checkpoint.memory_limit_bytes,
        workers=config.nodes.nproc,
        own_world=config.restart.by_node,
        sweep=sweep_command(ground.run_dir),
    )


def _node_identity(config: RunConfig, ground: Ground) -> NodeIdentity:
    return NodeIdentity(
        job=ground.identity.job,
        node=ground.identity.node,
        run_id=config.rendezvous.run_id,
        run_dir=ground.run_dir.path,
        role=config.nodes.role,
        max_restarts=config.restart.max_restarts,
        own_world=config.restart.by_node,
        virtual_local_rank=config.nodes.virtual_local_rank,
        ckpt_dir=config.checkpoint.ckpt_dir,
        saver_socket=ground.run_dir.socket("saver"),
        loop_socket=ground.run_dir.socket("loop"),
        imports_dir=imports_cache(os.environ),
    )
