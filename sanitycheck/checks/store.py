"""``store.*``: where checkpoints go."""

from __future__ import annotations

from typing import Any

from sanitycheck.facts.mounts import MountsFacts
from sanitycheck.facts.store import StoreFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import MIB, STORE_CHECKPOINTS_ROOM, STORE_WRITE_SLOW_MB_S

__all__ = ["judge_ckpt_path", "judge_mounts"]

_PROBLEMS = {
    "read_only": Reason.STORE_READ_ONLY,
    "no_space": Reason.STORE_FULL,
    "not_permitted": Reason.STORE_NOT_PERMITTED,
    "not_a_folder": Reason.STORE_NOT_A_FOLDER,
    "backend_missing": Reason.STORE_BACKEND_MISSING,
    "unreachable": Reason.STORE_UNREACHABLE,
    "differs": Reason.STORE_DIFFERS,
    "not_listed": Reason.STORE_NOT_LISTED,
}

SPEED_BYTES_MIN = 4 * MIB
"""A smaller payload measures the latency, not the rate."""


def judge_mounts(facts: MountsFacts, options: Options) -> tuple[Finding, ...]:
    """A dead mount that the run needs fails; another one is a warning, since only programs that touch it
    hang."""
    found: list[Finding] = []
    for mount in facts.mounts:
        named: dict[str, Any] = {
            "path": mount.path,
            "fstype": mount.fstype,
            "needed_for": mount.needed_for or "nothing in this run",
        }
        verdict = Verdict.FAIL if mount.needed_for else Verdict.WARN
        if mount.state == "hung":
            named["timeout_s"] = str(facts.timeout_s)
            found.append(Finding(verdict=verdict, reason=Reason.MOUNT_HUNG, subject=mount.path, facts=named))
        elif mount.state == "error":
            named["error"] = mount.error
            found.append(Finding(verdict=verdict, reason=Reason.MOUNT_ERROR, subject=mount.path, facts=named))
        elif mount.state == "not asked":
            found.append(
                Finding(
                    verdict=Verdict.UNKNOWN, reason=Reason.MOUNT_NOT_ASKED, subject=mount.path, facts=named
                )
            )
    if not facts.mounts:
        return (Finding(verdict=Verdict.SKIPPED, reason=Reason.NO_NETWORK_MOUNTS),)
    if not found:
        return (
            Finding(verdict=Verdict.PASS, reason=Reason.MOUNTS_ALIVE, facts={"count": len(facts.mounts)}),
        )
    return tuple(found)


def judge_ckpt_path(facts: StoreFacts, options: Options) -> tuple[Finding, ...]:
    """A store that cannot be used blocks: the first save would fail. A slow or tight one is a warning."""
    where = {"url": facts.url, "tried_at": facts.tried_at}
    found: list[Finding] = []
    if facts.problem:
        named: dict[str, Any] = {**where, "during": facts.during, "error": facts.error}
        reason = _PROBLEMS.get(facts.problem, Reason.STORE_UNREACHABLE)
        found.append(Finding(verdict=Verdict.FAIL, reason=reason, facts=named, blocking=True))
    if facts.left_behind:
        named = {**where, "path": facts.left_behind}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.STORE_LEFT_BEHIND, facts=named))
    if facts.problem:
        return tuple(found)
    found.extend(_judge_room(facts, options))
    measured = facts.payload_bytes >= SPEED_BYTES_MIN and facts.write_s > 0 and facts.read_s > 0
    rates: dict[str, float] = {}
    if measured:
        rates = {
            "write_mb_s": round(facts.payload_bytes / facts.write_s / 1e6, 1),
            "read_mb_s": round(facts.payload_bytes / facts.read_s / 1e6, 1),
        }
        if rates["write_mb_s"] < STORE_WRITE_SLOW_MB_S:
            named = {**where, **rates, "limit_mb_s": STORE_WRITE_SLOW_MB_S}
            found.append(Finding(verdict=Verdict.WARN, reason=Reason.STORE_SLOW, facts=named))
    if not found:
        room = {} if facts.free_bytes is None else {"free_bytes": facts.free_bytes}
        reason = Reason.STORE_MEASURED if measured else Reason.STORE
        found.append(Finding(verdict=Verdict.PASS, reason=reason, facts={**where, **rates, **room}))
    return tuple(found)


def _judge_room(facts: StoreFacts, options: Options) -> list[Finding]:
    if facts.free_bytes is None or not options.ckpt_bytes:
        return []
    named: dict[str, Any] = {
        "url": facts.url,
        "free_bytes": facts.free_bytes,
        "checkpoint_bytes": options.ckpt_bytes,
    }
    if facts.free_bytes < options.ckpt_bytes:
        return [Finding(verdict=Verdict.FAIL, reason=Reason.STORE_TIGHT, facts=named)]
    if facts.free_bytes < STORE_CHECKPOINTS_ROOM * options.ckpt_bytes:
        return [Finding(verdict=Verdict.WARN, reason=Reason.STORE_TIGHT, facts=named)]
    return []
