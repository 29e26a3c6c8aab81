"""Node rank 0's side: who came, which pairs meet, what everybody is told at the end.

One thread and one loop over non-blocking reads. It decides nothing about nodes: pairs come from
:mod:`sanitycheck.localise`, verdicts from the checks. Whatever a member does or does not do, the lead ends by
itself: joining, reporting, every round and the whole have deadlines.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sanitycheck.checks.fleet import evidence_of, limits_of
from sanitycheck.errors import GroupError
from sanitycheck.facts.codec import encode
from sanitycheck.facts.fleet import AllFacts, GroupFacts, MeetingFacts, MemberFacts
from sanitycheck.group.wire import Lines, send_line
from sanitycheck.localise.search import conclude, plan

__all__ = ["Lead", "Schedule"]

TICK_S = 0.2
BACKLOG = 1024
STRANGERS_MAX = 4096
"""Connections that never became members, after which no more are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Deadlines of a group, in seconds."""

    join_s: float = 60.0
    report_s: float = 120.0
    round_s: float = 30.0
    whole_s: float = 900.0


@dataclass(slots=True, eq=False)
class _Member:
    sock: socket.socket
    lines: Lines = field(default_factory=Lines)
    rank: int = -1
    host: str = ""
    address: str = ""
    name: str = ""
    report: dict[str, Any] | None = None
    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: bool = False

    @property
    def is_member(self) -> bool:
        return self.rank >= 0 and not self.gone


class Lead(threading.Thread):
    """Opens the endpoint when made; start it, and join it after the member of this node is done."""

    def __init__(self, endpoint: tuple[str, int], *, nnodes: int, group: str, schedule: Schedule) -> None:
        super().__init__(name="sanitycheck-lead", daemon=True)
        self._nnodes = nnodes
        self._group = group
        self._schedule = schedule
        self._people: list[_Member] = []
        self._strangers = 0
        self._tests = 0
        self._halted = threading.Event()
        self._facts = GroupFacts(expected=nnodes, members=(), meetings=())
        self._server = _listen(endpoint)
        self._ends = time.monotonic() + schedule.whole_s

    def limit(self, *, pair_share: float, alone_share: float) -> None:
        """Set what counts as slow; before the thread starts."""
        self._facts = replace(self._facts, pair_share=pair_share, alone_share=alone_share)

    def stop(self) -> None:
        """End soon; members see their connection close."""
        self._halted.set()

    def run(self) -> None:
        """The whole life of a group."""
        try:
            self._wait(self._schedule.join_s, until=self._all_came)
            self._name_members()
            self._wait(self._schedule.report_s, until=self._all_reported)
            self._take_reports()
            while not self._over() and (
                pairs := plan(evidence_of(self._facts), limits=limits_of(self._facts))
            ):
                self._round(pairs)
            self._everybody()
            if self._over():
                self._facts = replace(self._facts, ended="its time was over")
            self._tell_all()
        finally:
            for member in self._people:
                member.sock.close()
            self._server.close()

    def _over(self) -> bool:
        return self._halted.is_set() or time.monotonic() >= self._ends

    # --- who is there -------------------------------------------------------------------------------------

    def _members(self) -> list[_Member]:
        return sorted((one for one in self._people if one.rank >= 0), key=lambda one: one.rank)

    def _all_came(self) -> bool:
        return len(self._members()) == self._nnodes

    def _all_reported(self) -> bool:
        return all(member.gone or member.report is not None for member in self._members())

    def _name_members(self) -> None:
        hosts = Counter(member.host for member in self._members())
        for member in self._members():
            member.name = member.host if hosts[member.host] == 1 else f"{member.host}#{member.rank}"
        ranks = {member.rank for member in self._members()}
        missing = tuple(rank for rank in range(self._nnodes) if rank not in ranks)
        self._facts = replace(self._facts, missing=missing)

    def _take_reports(self) -> None:
        members = []
        for member in self._members():
            report = member.report or {}
            alone = report.get("alone")
            members.append(
                MemberFacts(
                    name=member.name,
                    rank=member.rank,
                    alone=float(alone) if isinstance(alone, (int, float)) else None,
                    failed_alone=bool(report.get("blocking")),
                    left=member.gone or member.report is None,
                    versions={str(key): str(value) for key, value in report.get("versions", {}).items()},
                )
            )
        self._facts = replace(self._facts, members=tuple(members))

    # --- tests --------------------------------------------------------------------------------------------

    def _start(self, members: list[_Member]) -> int:
        """Order a test of several members; rank 0 of it first, the others when its store is open."""
        self._tests += 1
        self._order(members[0], self._tests, rank=0, world=len(members), at="")
        return self._tests

    def _order(self, member: _Member, number: int, *, rank: int, world: int, at: str) -> None:
        self._send(
            member,
            {
                "do": "test",
                "id": number,
                "rank": rank,
                "world": world,
                "at": at,
                "address": member.address,
                "deadline_s": self._schedule.round_s,
            },
        )

    def _run_tests(self, groups: list[list[_Member]]) -> list[list[dict[str, Any]]]:
        """Run disjoint tests side by side; the results of each, in order, ``{}`` where none came."""
        numbers = [self._start(group) for group in groups]
        opened: set[int] = set()

        def results(number: int, group: list[_Member]) -> list[dict[str, Any]]:
            return [one.said.get(number, {}).get("result") or {} for one in group]

        def done() -> bool:
            for number, group in zip(numbers, groups, strict=True):
                at = group[0].said.get(number, {}).get("at")
                if at and number not in opened:
                    opened.add(number)
                    for rank, member in enumerate(group[1:], start=1):
                        self._order(member, number, rank=rank, world=len(group), at=str(at))
            return all(
                any(one.gone for one in group) or self._complete(number, group, opened)
                for number, group in zip(numbers, groups, strict=True)
            )

        self._wait(2 * self._schedule.round_s, until=done)
        return [results(number, group) for number, group in zip(numbers, groups, strict=True)]

    def _complete(self, number: int, group: list[_Member], opened: set[int]) -> bool:
        """Whether the outcome is known: all have answered, or one has said what went wrong.

        The others of a test that went wrong may wait for that one until their deadline. Nobody waits for
        them: their next order ends it.
        """
        heard = [one.said.get(number, {}).get("result") for one in group]
        if any(answer and answer.get("problem") for answer in heard):
            return True
        # A store that could not be opened is the end of that test: the others were never asked.
        return all(heard) or (number not in opened and heard[0] is not None)

    def _round(self, pairs: tuple[tuple[str, str], ...]) -> None:
        by_name = {member.name: member for member in self._members()}
        groups = [[by_name[first], by_name[second]] for first, second in pairs]
        number = 1 + max((meeting.round for meeting in self._facts.meetings), default=-1)
        meetings = []
        for (first, second), answers in zip(pairs, self._run_tests(groups), strict=True):
            mb_s, problem = _verdict(answers)
            latencies = [float(answer.get("latency_s", 0.0)) for answer in answers]
            meetings.append(
                MeetingFacts(
                    first=first,
                    second=second,
                    round=number,
                    mb_s=mb_s,
                    latency_s=max(latencies, default=0.0),
                    problem=problem,
                )
            )
        self._facts = replace(self._facts, meetings=(*self._facts.meetings, *meetings))
        self._note_gone()

    def _everybody(self) -> None:
        """One test of all that are good; of a bad link one end stays out."""
        verdicts = conclude(evidence_of(self._facts), limits=limits_of(self._facts))
        out = {one.first for one in verdicts.nodes} | {one.second for one in verdicts.links}
        good = [one for one in self._members() if one.is_member and one.name not in out]
        if verdicts.common_cause or len(good) < 2 or self._over():
            return
        (answers,) = self._run_tests([good])
        mb_s, problem = _verdict(answers)
        self._facts = replace(self._facts, together=AllFacts(nodes=len(good), mb_s=mb_s, problem=problem))
        self._note_gone()

    def _note_gone(self) -> None:
        gone = {member.name for member in self._members() if member.gone}
        self._facts = replace(
            self._facts,
            members=tuple(replace(one, left=one.left or one.name in gone) for one in self._facts.members),
        )

    def _tell_all(self) -> None:
        for member in self._members():
            if member.is_member:
                self._send(member, {"do": "end", "facts": encode(replace(self._facts, me=member.name))})

    # --- the loop -----------------------------------------------------------------------------------------

    def _send(self, member: _Member, message: dict[str, Any]) -> None:
        try:
            send_line(member.sock, message)
        except OSError:
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        member.gone = True
        member.sock.close()
        if member.rank < 0:
            self._people.remove(member)

    def _wait(self, limit_s: float, *, until: Callable[[], bool]) -> None:
        """Serve until a condition holds, or time is over."""
        ends = min(self._ends, time.monotonic() + limit_s)
        while not until() and not self._halted.is_set() and time.monotonic() < ends:
            reading = [self._server, *(member.sock for member in self._people if not member.gone)]
            ready, _, _ = select.select(reading, [], [], TICK_S)
            for sock in ready:
                if sock is self._server:
                    self._accept()
                else:
                    self._read(next(one for one in self._people if one.sock is sock))

    def _accept(self) -> None:
        sock, _ = self._server.accept()
        self._strangers += 1
        if self._strangers > STRANGERS_MAX + self._nnodes:
            sock.close()
            return
        self._people.append(_Member(sock=sock))

    def _read(self, member: _Member) -> None:
        try:
            data = member.sock.recv(1 << 16)
            messages = member.lines.feed(data)
            if not data:
                raise ValueError("closed")
            for message in messages:
                self._hear(member, message)
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(member)

    def _hear(self, member: _Member, message: dict[str, Any]) -> None:
        if "hello" in message:
            hello = message["hello"]
            rank = int(hello["rank"])
            taken = {one.rank for one in self._members()}
            if hello["group"] != self._group or not 0 <= rank < self._nnodes or rank in taken:
                send_line(member.sock, {"do": "go", "why": "another group, or a rank that is taken"})
                raise ValueError("not of this group")
            member.rank, member.host = rank, str(hello["host"])[:128]
            member.address = str(hello["address"])[:64]
        elif member.rank < 0:
            raise ValueError("said something before hello")
        elif "report" in message:
            member.report = dict(message["report"])
        elif "id" in message:
            member.said.setdefault(int(message["id"]), {}).update(message)


def _listen(endpoint: tuple[str, int]) -> socket.socket:
    """A socket that listens on the endpoint's own address and on no other.

    Raises:
        GroupError: It is not an address of this node, or the port is taken.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, kind)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen(BACKLOG)
        except BaseException:
            server.close()
            raise
        return server
    except OSError as error:
        raise GroupError(f"{endpoint[0]}:{endpoint[1]}", problem=str(error)) from error


def _verdict(answers: list[dict[str, Any]]) -> tuple[float | None, str]:
    """(rate, "") of the slowest side, or (None, what went wrong first)."""
    for answer in answers:
        if answer.get("problem"):
            return None, str(answer["problem"])[:300]
        if answer.get("wrong"):
            return None, f"{answer['wrong']} values wrong"
    if not all("mb_s" in answer for answer in answers):
        return None, "no answer"
    return min(float(answer["mb_s"]) for answer in answers), ""
