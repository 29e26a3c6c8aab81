"""`aimaster explain`: one incident as a report; `aimaster events`: the journal, a line per event.

JSON has ``"schema": 1`` and is made of the same object as the text. Fields may be added; none changes its
meaning or goes away under that number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from aimaster.agent.rundir import RULES_FILE
from aimaster.cli.follow import follow
from aimaster.cli.journals import journal_path, read_entries
from aimaster.cli.story import Story, tell
from aimaster.core.diagnosis import Rule
from aimaster.core.sentences import sentence
from aimaster.errors import UsageError
from aimaster.journal.base import Entry
from aimaster.journal.codec import to_plain
from aimaster.journal.incidents import Incident, incidents
from aimaster.journal.times import spans
from aimaster.rules.table import load_rules

__all__ = ["explain", "follow_events", "show_events"]

SCHEMA = 1

Plain = dict[str, object]


def explain(
    number: int | None, *, state_dir: Path | None, job_id: str | None, rules: Path | None, as_json: bool
) -> str:
    """What `aimaster explain` prints: the newest incident, or the one of that number.

    Raises:
        AimasterError: there is no journal, no such incident, or the rules are wrong.
    """
    path = journal_path(state_dir, job_id)
    table = load_rules(rules if rules is not None else _own_rules(path))
    entries = read_entries(path)
    found = incidents(entries)
    if not found:
        if as_json:
            return json.dumps({"schema": SCHEMA, "journal": str(path), "incident": None}) + "\n"
        return f"no incident in {path}\n"
    chosen = found[-1] if number is None else _numbered(found, number)
    story = tell(chosen, table, spans(entries))
    if as_json:
        return json.dumps({"schema": SCHEMA, "journal": str(path), **plain(story)}, indent=2) + "\n"
    return "\n".join([*render(story), *_others(found, chosen, table)]) + "\n"


def show_events(*, state_dir: Path | None, job_id: str | None, last: int | None, as_json: bool) -> str:
    """What `aimaster events` prints.

    Raises:
        AimasterError: there is no journal.
    """
    _check_last(last)
    entries = read_entries(journal_path(state_dir, job_id))
    shown = entries if last is None else entries[-last:]
    return "".join(_line(entry, as_json=as_json) + "\n" for entry in shown)


def follow_events(*, state_dir: Path | None, job_id: str | None, last: int | None, as_json: bool) -> None:
    """Print the events, and those to come, until the job is over.

    Raises:
        AimasterError: there is no journal, or nobody writes it any more.
    """
    _check_last(last)

    def say(entry: Entry) -> None:
        print(_line(entry, as_json=as_json), flush=True)

    follow(journal_path(state_dir, job_id), last=last, say=say)


def _check_last(last: int | None) -> None:
    if last is not None and last < 1:
        raise UsageError("--last needs a number above 0")


def _line(entry: Entry, *, as_json: bool) -> str:
    return json.dumps(_event(entry)) if as_json else _event_line(entry)


def plain(story: Story) -> Plain:
    """The story as JSON."""
    incident = story.incident
    return {
        "incident": {
            "id": incident.id,
            "kind": incident.kind.value,
            "node": incident.node,
            "rank": incident.rank,
            "generation": incident.generation,
            "at_wall_s": incident.detected_wall_s,
            "last_step": incident.last_step,
            "resumed_step": incident.resumed_step,
            "restored_from": incident.restored_from,
            "recovered_s": incident.recovered_s,
            "ended_job": incident.ended_job,
            "hang": to_plain(incident.hang) if incident.hang else None,
        },
        "what": story.what,
        "who": story.who,
        "cause": story.cause,
        "rule": story.rule,
        "source": story.source,
        "blame": story.blame.value,
        "retry": story.retry.value if story.retry else None,
        "do": story.do,
        "evidence": list(story.evidence),
        "echoes": list(story.echoes),
        "decision": story.decision,
        "not_milder": story.not_milder,
        "not_harder": story.not_harder,
        "downtime": [{"phase": phase.name, "seconds": phase.seconds} for phase in story.downtime],
    }


def render(story: Story) -> list[str]:
    """The story as lines."""
    incident = story.incident
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.detected_wall_s))
    lines = [f"incident {incident.id} at {when}: {story.what}"]
    lines += _part("first", story.who)
    lines += _part("cause", story.cause)
    lines += _part("blame", story.blame.value)
    rule = f"{story.rule} ({story.source})" if story.rule else "none"
    lines += _part("rule", rule)
    lines += _part("evidence", *story.evidence)
    lines += _part("echoes", *story.echoes)
    lines += _part("decision", story.decision)
    lines += _part("not milder", story.not_milder)
    lines += _part("not harder", story.not_harder)
    lines += _part("downtime", *(f"{phase.name}: {phase.seconds:.2f} s" for phase in story.downtime))
    lines += _part("outcome", _outcome(incident))
    lines += _part("what to do", story.do)
    return lines


def _part(title: str, *lines: str) -> list[str]:
    given = [line for line in lines if line]
    if not given:
        return []
    return [f"  {title + ':':<12}{given[0]}", *(f"  {'':<12}{line}" for line in given[1:])]


def _outcome(incident: Incident) -> str:
    if incident.ended_job:
        return "the job is over"
    if incident.recovered_s is None:
        return "no new step yet"
    resumed = ""
    if incident.resumed_step is not None:
        resumed = f", resumed at step {incident.resumed_step} from {incident.restored_from or 'unknown'}"
    return f"first new step after {incident.recovered_s:.1f} s{resumed}"


def _others(found: Sequence[Incident], chosen: Incident, table: Sequence[Rule]) -> list[str]:
    """One line for each other incident, so that people know that there are some."""
    rest = [incident for incident in found if incident is not chosen]
    lines = [f"  {one.id}: {one.kind.value}, {tell(one, table).cause}" for one in rest]
    return ["", "other incidents (aimaster explain NUMBER):", *lines] if lines else []


def _numbered(found: Sequence[Incident], number: int) -> Incident:
    for incident in found:
        if incident.id == number:
            return incident
    raise UsageError(f"there is no incident {number}", where=f"the journal has 1 to {len(found)}")


def _own_rules(journal: Path) -> Path | None:
    own = journal.with_name(RULES_FILE)
    return own if own.is_file() else None


def _event(entry: Entry) -> Plain:
    record = entry.record
    return {
        "schema": SCHEMA,
        "seq": entry.seq,
        "epoch": entry.epoch,
        "at_s": record.at_s,
        "at_wall_s": record.wall_s,
        "event": to_plain(record.event),
        "reason": record.decision.reason.value,
        "sentence": sentence(record.decision.reason, record.decision.facts),
        "commands": [to_plain(command) for command in record.decision.commands],
    }


def _event_line(entry: Entry) -> str:
    record = entry.record
    when = time.strftime("%H:%M:%S", time.localtime(record.wall_s))
    event = type(record.event).__name__
    node = str(getattr(record.event, "node", "") or "-")
    said = sentence(record.decision.reason, record.decision.facts)
    return f"{entry.seq:>6}  {when}  {record.at_s:>9.2f}  {event:<15} {node:<12} {said}"
