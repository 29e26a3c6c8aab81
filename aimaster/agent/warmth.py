"""Which template the next workers are forked from, if any, and why not.

The first template imports torch alone, at the agent's start. When the hook of a worker has written what its
script had loaded, a second one is made beside it, at a fraction of a processor so that the training does not
feel it, and takes the first one's place when it has proved itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aimaster.agent import assignment as words
from aimaster.agent import modules
from aimaster.agent.assignment import Assignment
from aimaster.agent.reaper import OWNER_VARIABLE, Reaper
from aimaster.agent.warm import Template, TemplatePlan, Unfit
from aimaster.config import ProgramConfig, ProgramKind
from aimaster.ids import Generation

FAILURES_MAX = 3
"""After so many templates that could not be made no more are tried."""
_ANY = Assignment(
    generation=Generation(0),
    attempt=0,
    node_rank=0,
    nodes=1,
    first_rank=0,
    world_size=1,
    master_addr="",
    master_port=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where lists of modules lie."""

    run_dir: Path
    """This agent's; the hook of its workers writes there."""
    memory: Path | None = None
    """What outlives the job; None keeps nothing."""


class Warmth:
    """Keeps a template ready. Use in the event loop of the main thread."""

    def __init__(
        self,
        program: ProgramConfig,
        python: str,
        *,
        common: Mapping[str, str],
        folders: Folders,
        reaper: Reaper,
        wanted: bool,
    ) -> None:
        self._reaper = reaper
        self._why_not = _why_never(program, wanted)
        self._plan = TemplatePlan(
            argv=tuple(words.argv(program, python, local_rank=0, assignment=_ANY)),
            env=common,
            per_worker=words.PER_WORKER,
            token=(OWNER_VARIABLE, reaper.worker_token),
            log=folders.run_dir / "template.log",
        )
        self._roots = modules.library_roots()
        self._list = folders.run_dir / modules.LIST_NAME
        self._memory = None
        if folders.memory is not None:
            named = (python, program.kind.value, program.target)
            self._memory = modules.memory_path(folders.memory, named)
            modules.recall(self._memory, self._list)
        self._list_seen = 0
        self._known: frozenset[str] = frozenset()
        self._template: Template | None = None
        self._making: asyncio.Task[None] | None = None
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """The template's process, if there is one."""
        return self._template.pid if self._template is not None and self._template.alive else None

    def expected(self) -> str:
        """What a start would be now."""
        return f"cold: {self._why_not}" if self._why_not else "warm"

    def begin(self, *, gentle: bool) -> None:
        """Make a template in the background, unless one is being made or none can be."""
        if self._why_not or self._failures >= FAILURES_MAX:
            return
        if self._making is None or self._making.done():
            self._making = asyncio.get_running_loop().create_task(self._make(gentle))

    def renew(self) -> None:
        """Make another template if the list of modules has grown, or the old one has ended."""
        if self._why_not or (self._making is not None and not self._making.done()):
            return
        try:
            changed = self._list.stat().st_mtime_ns
        except OSError:
            changed = 0
        grown = False
        if changed != self._list_seen:
            self._list_seen = changed
            names = modules.read_list(self._list, self._roots)
            grown = len(frozenset(names) - self._known) >= modules.GROWTH_MIN
            if grown and self._memory is not None:
                modules.remember(self._list, self._memory)
        if grown or (self._template is not None and not self._template.alive):
            self.begin(gentle=True)

    async def template(self) -> Template:
        """The template to fork from, waited for if the first one is being made.

        Raises:
            Unfit: There is none; the text says why.
        """
        if self._why_not:
            raise Unfit(self._why_not)
        if self._template is None or not self._template.alive:
            self.begin(gentle=False)
            if self._making is not None:
                await asyncio.wait([self._making])
        if self._template is None or not self._template.alive:
            raise Unfit(self._why_not or "the template has ended")
        return self._template

    async def close(self) -> None:
        """End the template, and one that is being made."""
        if self._making is not None:
            self._making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._making
        if self._template is not None:
            await self._template.close(self._reaper)
            self._template = None

    async def _make(self, gentle: bool) -> None:
        names = modules.read_list(self._list, self._roots)
        plan = TemplatePlan(
            argv=self._plan.argv,
            env=self._plan.env,
            per_worker=self._plan.per_worker,
            modules=names,
            token=self._plan.token,
            log=self._plan.log,
        )
        try:
            fresh = await Template.prepare(plan, self._reaper, gentle=gentle)
        except (Unfit, OSError) as reason:
            self._failures += 1
            if self._template is None:
                self._why_not = str(reason)
            return
        old, self._template = self._template, fresh
        self._known = frozenset(names)
        if old is not None:
            await old.close(self._reaper)


def _why_never(program: ProgramConfig, wanted: bool) -> str:
    if not wanted:
        return "switched off by --no-warm"
    if program.kind in (ProgramKind.NO_PYTHON, ProgramKind.COMMAND):
        return "the program is not started by our Python"
    if program.python is not None:
        return "PYTHON_EXEC names another interpreter"
    if program.kind is ProgramKind.SCRIPT and not program.target.endswith(".py"):
        return "the script is not a .py file"
    return ""
