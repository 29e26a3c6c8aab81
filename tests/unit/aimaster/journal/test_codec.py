"""Text that is not what it should be is named, never half-understood."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aimaster.core.commands import Decision, Reason
from aimaster.core.events import NodeDied, StopKind, StopRequested
from aimaster.ids import Incarnation, NodeId
from aimaster.journal.codec import decode_decision, decode_event, decode_policy, encode
from aimaster.journal.errors import JournalCorrupt

DIED = NodeDied(node=NodeId("a"), incarnation=Incarnation("1"), silent_s=6.5)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(encode(DIED)), **fields})


def test_the_form_is_what_the_documentation_says() -> None:
    assert json.loads(encode(DIED)).items() >= {
        ("is", "NodeDied"),
        ("node", "a"),
        ("incarnation", "1"),
        ("silent_s", 6.5),
    }
    assert "\n" not in encode(DIED)
    stop = StopRequested(node=NodeId("a"), incarnation=Incarnation("1"), kind=StopKind.PREEMPTION, signal=15)
    assert json.loads(encode(stop))["kind"] == "preemption"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "an object was expected"),
        ("{}", "not a known Event"),
        (changed(**{"is": "Path"}), "not a known Event"),
        (changed(**{"is": "Prepare"}), "not a known Event"),
        (changed(**{"is": ["NodeDied"]}), "not a known Event"),
        (changed(silent_s="6"), "NodeDied.silent_s"),
        (changed(silent_s=True), "NodeDied.silent_s"),
        (changed(silent_s=float("inf")), "NodeDied.silent_s"),
        (changed(silent_s=None), "NodeDied.silent_s"),
        (changed(node=3), "NodeDied.node"),
        (changed(more=3), "unknown fields 'more'"),
        ('{"is":"NodeDied","node":"a"}', "missing"),
        (
            '{"is":"StopRequested","node":"a","incarnation":"1","kind":"x","signal":1}',
            "StopRequested.kind",
        ),
        (
            '{"is":"JobDeclared","job":"j","min_nodes":0,"max_nodes":1,"max_restarts":null}',
            "1 <= min_nodes",
        ),
    ],
)
def test_what_does_not_fit_is_named(text: str, what: str) -> None:
    with pytest.raises(JournalCorrupt, match=what):
        decode_event(text)


def test_a_field_with_a_default_may_be_missing() -> None:
    text = '{"is":"NodeJoined","node":"a","incarnation":"1","address":"x","workers":2}'
    assert decode_event(text).saver_address == ""  # type: ignore[attr-defined]


def test_numbers_in_facts_keep_their_type() -> None:
    decision = Decision(commands=(), reason=Reason.PROGRESS, facts={"a": 1, "b": 1.0, "c": "1"})
    back = decode_decision(encode(decision)).facts
    assert [(name, type(value)) for name, value in back.items()] == [("a", int), ("b", float), ("c", str)]


def test_only_what_the_core_knows_is_written() -> None:
    with pytest.raises(TypeError, match="cannot hold"):
        encode(object())
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(NodeDied(node=NodeId("a"), incarnation=Incarnation("1"), silent_s=float("nan")))


def test_a_policy_is_no_event() -> None:
    with pytest.raises(JournalCorrupt, match="not a known Policy"):
        decode_policy(encode(DIED))
