"""Whether a broken attempt is followed by another one: budgets, brakes, and what they cost.

`judge` is a pure function of the policy, the history and one failure. Its answers, strictest first:

- *The same error at the same step, twice in a row*: the retry confirmed it; more retries burn machines (20).
  But where the retry broke within a few steps of the checkpoint that it resumed from, that checkpoint may be
  what breaks it: it is set aside first, and one more attempt begins from an older one (`History.below`).
- *No progress*: three attempts in a row got no further (21). Further means a newer committed checkpoint step;
  in a job without checkpoints, more steps than any attempt before, or ten minutes of steps.
  An attempt that a lost node ended is not held against the script: it can only prove progress.
- *The cap* of ``--max-restarts`` (21; 20 where the cap is 0, since the first failure then speaks for itself).
- *The budget of the cause* in a rolling window (21). Several losses before workers start again are one
  charge: a rack that goes is one misfortune, not thirty. Waiting for capacity is never charged.

A wrong stop costs more than a wrong restart, so the defaults are generous and every bound has a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from aimaster.core.commands import Facts, Reason

EXIT_USER_ERROR = 20
EXIT_BUDGET = 21
EXIT_NO_NODES = 22
EXIT_PREEMPTED = 10
EXIT_INTERRUPTED = 130


class Cause(Enum):
    """What a charge is for."""

    WORKER_FAILED = "worker_failed"
    WORKERS_HUNG = "workers_hung"
    NODE_LOST = "node_lost"  # died, left or restarted while its workers ran
    NODE_FAILED = "node_failed"  # could not start, or was lost or late while preparing


_OF_THE_SCRIPT = frozenset({Cause.WORKER_FAILED, Cause.WORKERS_HUNG})
"""Causes that are held against the script when an attempt gets no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many charges of one cause fit into a rolling window."""

    limit: int
    per_node: float = 0.0
    """Added to the limit for each node of the job's maximum."""
    window_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.limit < 0 or self.per_node < 0 or self.window_s <= 0:
            raise ValueError(f"a budget needs limits of 0 or more and a window above 0, got {self}")

    def limit_for(self, max_nodes: int) -> int:
        """The limit in a job of that size."""
        return self.limit + int(self.per_node * max_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the machine waits for what."""

    join_s: float = 600.0
    """For the first generation to have enough nodes (torchrun: ``join_timeout``)."""
    last_call_s: float = 30.0
    """For more nodes than the minimum, before the first generation (torchrun: ``last_call_timeout``)."""
    regroup_s: float = 3.0
    """The same before later generations: replacements that come together start together."""
    prepare_s: float = 120.0
    """For a member to stop its old workers and prove them gone."""
    start_s: float = 120.0
    """For a member to start its workers."""
    drain_s: float = 60.0
    """For everyone to end."""
    replacement_s: float = 600.0
    """For a replacement when there are fewer nodes than the minimum; 0 ends the job at once."""

    def __post_init__(self) -> None:
        if min(self.join_s, self.prepare_s, self.start_s, self.drain_s) <= 0:
            raise ValueError(f"join_s, prepare_s, start_s and drain_s must be above 0, got {self}")
        if min(self.last_call_s, self.regroup_s, self.replacement_s) < 0:
            raise ValueError(f"last_call_s, regroup_s and replacement_s must not be negative, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is tolerated. Written into the journal, so that a replay judges as the original did."""

    worker_failures: Budget = field(default_factory=lambda: Budget(limit=10))
    node_losses: Budget = field(default_factory=lambda: Budget(limit=10, per_node=0.1))
    node_failures: Budget = field(default_factory=lambda: Budget(limit=10, per_node=1.0))
    hangs: Budget = field(default_factory=lambda: Budget(limit=10))
    fruitless_attempts_max: int = 3
    """Attempts in a row that get no further before the job is stopped."""
    early_steps: int = 10
    """An attempt that breaks within so many steps of its checkpoint casts doubt on that checkpoint."""
    set_aside_max: int = 1
    """How often checkpoints are set aside, each time older ones, before an attempt gets further."""
    fruitful_s: float = 600.0
    """Without checkpoints, an attempt that made steps for so long got further."""
    node_strikes_max: int = 2
    """How often in a row a node may fail to prepare or start before it is set aside."""
    common_cause_nodes_min: int = 3
    """So many nodes with the same fault are no coincidence: it is not held against any of them."""
    common_cause_window_s: float = 300.0
    """Within which time."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.fruitless_attempts_max < 1 or self.node_strikes_max < 1:
            raise ValueError("fruitless_attempts_max and node_strikes_max must be at least 1")
        if self.early_steps < 0 or self.set_aside_max < 0:
            raise ValueError("early_steps and set_aside_max must not be negative")
        if self.common_cause_nodes_min < 2 or self.common_cause_window_s < 0:
            raise ValueError(
                "common_cause_nodes_min must be at least 2 and common_cause_window_s not negative, got "
                f"{self.common_cause_nodes_min} and {self.common_cause_window_s}"
            )

    def budget(self, cause: Cause) -> Budget:
        """The budget that a cause is charged to."""
        return {
            Cause.WORKER_FAILED: self.worker_failures,
            Cause.WORKERS_HUNG: self.hangs,
            Cause.NODE_LOST: self.node_losses,
            Cause.NODE_FAILED: self.node_failures,
        }[cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One entry of the history."""

    cause: Cause
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended a generation, or one preparation of it, and how far its attempt had come."""

    cause: Cause
    attempted: bool
    """Whether workers had been started: only then a restart is counted and progress is weighed."""
    at_s: float
    step: int | None = None
    """Last step that the failing rank was seen to finish."""
    error_digest: str = ""
    committed: int | None = None
    """Newest committed checkpoint step of the job, in any tier."""
    attempt_step: int | None = None
    """Newest step seen in this attempt."""
    stepped_s: float = 0.0
    """Time since this attempt's first step."""
    resumed: int | None = None
    """Checkpoint step that this attempt began from, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that earlier failures left behind. Bounded: charges leave with their window or above the limit."""

    charges: tuple[Charge, ...] = ()
    restarts: int = 0
    fruitless: int = 0
    best_committed: int | None = None
    best_step: int | None = None
    last_error: tuple[str, int | None] | None = None
    doubted: int | None = None
    """Checkpoint step that the last attempt resumed from and broke soon after."""
    below: int | None = None
    """Checkpoints from this step on are set aside."""
    set_aside: int = 0
    """How often that was done since an attempt last got further."""

    def used(self, cause: Cause, *, now: float, window_s: float) -> int:
        """Charges of that cause that are still in the window."""
        return sum(1 for c in self.charges if c.cause is cause and c.at_s > now - window_s)

    def canonical(self) -> str:
        """All of it in one line, for the digest."""
        charges = tuple((c.cause.value, c.at_s) for c in self.charges)
        line = (charges, self.restarts, self.fruitless, self.best_committed, self.best_step, self.last_error)
        doubts = (self.doubted, self.below, self.set_aside)
        return repr(line if doubts == (None, None, 0) else (*line, *doubts))


NO_HISTORY = History()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer: go on, or end with a code and why. `history` holds in both cases."""

    history: History
    exit_code: int | None
    """None: go on."""
    reason: Reason | None
    facts: Facts


def judge(
    policy: Policy, history: History, *, failure: Failure, max_nodes: int, max_restarts: int | None
) -> Judgement:
    """Charge one failure and say whether the job goes on."""
    charged = _charge(policy, history, failure, max_nodes=max_nodes)
    if not failure.attempted:
        return _judge_budget(policy, charged, failure, max_nodes=max_nodes)
    charged = _weigh_progress(policy, charged, failure)
    charged = _doubt(policy, history, charged, failure)
    if failure.cause is Cause.WORKER_FAILED:
        error = (failure.error_digest, failure.step) if failure.error_digest else None
        charged = replace(charged, last_error=error)
        if _same(history, failure) and max_restarts != 0 and charged.set_aside <= history.set_aside:
            step = {} if failure.step is None else {"step": failure.step}
            return _end(charged, EXIT_USER_ERROR, Reason.SAME_ERROR_TWICE, **step)
    if failure.cause in _OF_THE_SCRIPT and charged.fruitless >= policy.fruitless_attempts_max:
        return _end(charged, EXIT_BUDGET, Reason.NO_PROGRESS, attempts=charged.fruitless)
    if max_restarts is not None and history.restarts >= max_restarts:
        user = max_restarts == 0 and failure.cause is Cause.WORKER_FAILED
        code = EXIT_USER_ERROR if user else EXIT_BUDGET
        return _end(charged, code, Reason.BUDGET_SPENT, budget="max_restarts", limit=max_restarts)
    return _judge_budget(
        policy, replace(charged, restarts=history.restarts + 1), failure, max_nodes=max_nodes
    )


def _judge_budget(policy: Policy, history: History, failure: Failure, *, max_nodes: int) -> Judgement:
    budget = policy.budget(failure.cause)
    limit = budget.limit_for(max_nodes)
    used = history.used(failure.cause, now=failure.at_s, window_s=budget.window_s)
    if used > limit:
        name = failure.cause.value
        return _end(
            history, EXIT_BUDGET, Reason.BUDGET_SPENT, budget=name, limit=limit, window_s=budget.window_s
        )
    facts: dict[str, int | float | str] = {"budget": failure.cause.value, "used": used, "limit": limit}
    if history.below is not None:
        facts["below"] = history.below
    return Judgement(history=history, exit_code=None, reason=None, facts=facts)


def _charge(policy: Policy, history: History, failure: Failure, *, max_nodes: int) -> History:
    """Add the charge and drop what no longer counts, so that a history stays small for ever."""
    kept: list[Charge] = []
    for cause in Cause:
        budget = policy.budget(cause)
        inside = [c for c in history.charges if c.cause is cause and c.at_s > failure.at_s - budget.window_s]
        kept += inside[-(budget.limit_for(max_nodes) + 1) :]
    kept.append(Charge(cause=failure.cause, at_s=failure.at_s))
    return replace(history, charges=tuple(sorted(kept, key=lambda c: (c.at_s, c.cause.value))))


def _doubt(policy: Policy, before: History, history: History, failure: Failure) -> History:
    """Whether the checkpoint that the attempt resumed from is to blame.

    Its bytes were proved, so another copy of the same step is no better. Nor is a step just before it, most
    likely: what broke within a few steps is given a few steps.

    Args:
        policy: how much is tolerated.
        before: what earlier failures left behind.
        history: the same with the progress of this failure weighed.
        failure: what ended the attempt.
    """
    if failure.cause not in _OF_THE_SCRIPT:
        return history
    resumed, reached = failure.resumed, _newest(failure.step, failure.attempt_step)
    if resumed is None or (reached is not None and reached - resumed > policy.early_steps):
        if history.fruitless == 0:  # it got away, and further than any before
            return replace(history, doubted=None, below=None, set_aside=0)
        return replace(history, doubted=None)
    digest, error = failure.error_digest, before.last_error
    alike = bool(digest) and error is not None and error[0] == digest
    doubted = before.doubted
    again = doubted is not None and (
        doubted == resumed or (alike and 0 <= resumed - doubted <= policy.early_steps)
    )
    if (again or _same(before, failure)) and history.set_aside < policy.set_aside_max:
        below = max(1, resumed - policy.early_steps + 1)
        return replace(history, doubted=None, below=below, set_aside=history.set_aside + 1)
    return replace(history, doubted=resumed)


def _same(before: History, failure: Failure) -> bool:
    """Whether it is the same error at the same step as the one before."""
    ours = failure.cause is Cause.WORKER_FAILED and bool(failure.error_digest)
    return ours and before.last_error == (failure.error_digest, failure.step)


def _weigh_progress(policy: Policy, history: History, failure: Failure) -> History:
    """Whether the attempt that ended got further than those before it."""
    if failure.committed is not None:
        further = history.best_committed is None or failure.committed > history.best_committed
    else:
        stepped = failure.attempt_step is not None
        more = stepped and (history.best_step is None or (failure.attempt_step or 0) > history.best_step)
        further = more or (stepped and failure.stepped_s >= policy.fruitful_s)
    fruitless = history.fruitless
    if further:
        fruitless = 0
    elif failure.cause in _OF_THE_SCRIPT:
        fruitless += 1
    return replace(
        history,
        fruitless=fruitless,
        best_committed=_newest(history.best_committed, failure.committed),
        best_step=_newest(history.best_step, failure.attempt_step),
    )


def _newest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)


def _end(history: History, code: int, reason: Reason, **facts: int | float | str) -> Judgement:
    return Judgement(history=history, exit_code=code, reason=reason, facts=facts)
