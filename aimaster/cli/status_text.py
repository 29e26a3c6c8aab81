"""The picture of `aimaster status` as text: plain lines and columns, no colour, no redraw."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["headline", "render"]

Plain = dict[str, Any]
"""The JSON object of `aimaster status`; its schema is in `aimaster.cli.status`."""

ERROR_CHARS_SHOWN = 100
INCIDENTS_SHOWN = 20
_TIERS = (("memory", "in memory"), ("durable", "durable"))


def render(picture: Plain) -> str:
    """The whole picture, a final line break included."""
    parts = [
        _head(picture),
        _table(
            ["node", "state", "node_rank", "heartbeat", "ranks"], [_node_row(one) for one in picture["nodes"]]
        ),
        _table(["role", "pid", "node", "rank"], [_process_row(one) for one in picture["processes"]]),
        [line for one in picture["incidents"][-INCIDENTS_SHOWN:] for line in _incident(one)],
        _budgets(picture["budgets"]),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def headline(picture: Plain) -> str:
    """The job in one line, for logs."""
    if picture["source"] != "master":
        return f"job {picture['job_id']}: unknown, since no master answers"
    steps = picture["steps"]
    parts = [
        f"job {picture['job_id']}: {picture['phase']}, generation {picture['generation']}, "
        f"{len(picture['nodes'])} nodes"
    ]
    if picture["waiting_for"]:
        parts.append(f"waiting for {picture['waiting_for']}")
    if steps["memory"] is not None or steps["durable"] is not None:
        parts.append(f"step {_or_dash(steps['memory'])} in memory, {_or_dash(steps['durable'])} durable")
    if picture["incidents"]:
        parts.append(_incident(picture["incidents"][-1])[0])
    return "; ".join(parts)


def _head(picture: Plain) -> list[str]:
    if picture["source"] != "master":
        return [
            f"job {picture['job_id']}: unknown, since no master answers",
            *(f"  {line}" for line in str(picture["trouble"]).splitlines()),
            "This is what the agents of this machine have written down:",
        ]
    steps, master = picture["steps"], picture["master"]
    lines = [
        f"job {picture['job_id']}: {picture['phase']}, generation {picture['generation']}, "
        f"attempt {picture['attempt']}, {picture['world_size']} ranks"
    ]
    if picture["waiting_for"]:
        lines.append(f"waiting for {picture['waiting_for']}")
    ages = picture.get("step_age_s", {})
    memory, durable = (f"{_or_dash(steps[tier])} {where}{_age(ages.get(tier))}" for tier, where in _TIERS)
    lines.append(f"checkpoint step: {memory}, {durable}")
    where = f"on {master['node']}" if master["node"] else "on its own"
    lines.append(f"master: pid {master['pid']} {where}, life {master['epoch']}")
    if picture.get("hang"):
        lines.append(_hang(picture["hang"]))
    if picture.get("slow"):
        lines.append(_slow(picture["slow"]))
    if picture.get("goodput") and picture["goodput"]["goodput"] is not None:
        lines.append(_goodput(picture["goodput"]))
    return lines


def _age(age_s: float | None) -> str:
    return "" if age_s is None else f" ({age_s:.0f} s ago)"


def _hang(hang: Plain) -> str:
    """The limits in force, in one line."""
    if not hang["enabled"]:
        return "hang detection: off"
    busy = (
        f"{hang['busy_s']:.0f} s where one looks at work"
        if hang["busy_s"]
        else "no limit for work before a step"
    )
    line = (
        f"hang detection: no step for {hang['stopped_s']:.0f} s where a rank is stopped, "
        f"{hang['stuck_s']:.0f} s where waiting cannot end, {busy}"
    )
    return f"{line}; no verdict now: {hang['blind']}" if hang["blind"] else line


def _slow(slow: Plain) -> str:
    """For whom the others wait, in one line."""
    starved = slow["awake"] - slow["running"]
    return (
        f"slow: the others wait for {'ranks' if len(slow['ranks']) > 1 else 'rank'} "
        f"{', '.join(map(str, slow['ranks']))} on {slow['node']}, busy {slow['awake']:.0%} of the time "
        f"({starved:.0%} waiting for a processor), the others {slow['others_awake']:.0%}"
    )


def _goodput(times: Plain) -> str:
    """Where the wall time went, largest part first, in one line."""
    parts = sorted(times["phases"].items(), key=lambda part: -part[1])
    shown = ", ".join(
        f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in parts if seconds >= 0.05
    )
    return f"goodput: {times['goodput']:.1%} of {times['wall_s']:.1f} s" + (f" ({shown})" if shown else "")


def _node_row(node: Plain) -> list[str]:
    age_s = node.get("heartbeat_age_s")
    notes = "; ".join(node.get("notes", ()))
    ranks = ", ".join(_rank(one) for one in node.get("ranks", ()))
    return [
        node["node"],
        node["state"] if node.get("connected", True) else f"{node['state']}, not connected",
        _or_dash(node.get("node_rank")),
        "-" if age_s is None else f"{age_s:.1f} s ago",
        "; ".join(part for part in (ranks, notes) if part),
    ]


def _rank(one: Plain) -> str:
    """One rank's place: the training's own step where it is known."""
    step = one["steps"] if one["saved_step"] is None else one["saved_step"]
    kind = "steps" if one["saved_step"] is None else "step"
    return f"rank {_or_dash(one['rank'])}: {one['phase']}, {kind} {step}"


def _process_row(process: Plain) -> list[str]:
    return [process["role"], str(process["pid"]), process["node"] or "-", _or_dash(process["rank"])]


def _incident(one: Plain) -> list[str]:
    what = one["kind"].replace("_", " ")
    who = f"node {one['node']}" + ("" if one["rank"] is None else f", rank {one['rank']}")
    when = time.strftime("%H:%M:%S", time.localtime(one["at_wall_s"]))
    if one["recovered_s"] is None:
        outcome = "no new step yet"
    else:
        outcome = f"first new step after {one['recovered_s']:.1f} s"
        if one["resumed_step"] is not None:
            outcome += f", resumed at step {one['resumed_step']} from {one['restored_from'] or 'unknown'}"
    lines = [f"incident {one['id']} at {when}: {what} ({who}); {outcome}"]
    error = one["error"].strip().splitlines()
    return lines + ([f"  {error[-1][:ERROR_CHARS_SHOWN]}"] if error else [])


def _budgets(budgets: list[Plain]) -> list[str]:
    used = [f"{one['cause']} {one['used']} of {one['limit']}" for one in budgets if one["used"]]
    return [f"budget used: {', '.join(used)}"] if used else []


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    cells = [titles, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
