"""Every reason has a sentence, with whatever facts there are."""

from __future__ import annotations

import pytest

from aimaster.core.commands import Reason
from aimaster.core.sentences import SENTENCE_CHARS_MAX, sentence


@pytest.mark.parametrize("reason", Reason)
def test_a_sentence_never_fails_and_never_shows_a_template(reason: Reason) -> None:
    text = sentence(reason, {})
    assert text
    assert not set("{}") & set(text)
    assert text.count("(") == text.count(")")


def test_facts_that_are_there_are_told() -> None:
    facts = {"rank": 3, "node": "n1", "signal": 9, "last_step": 70}
    assert sentence(Reason.WORKER_FAILED, facts) == "worker failed: rank 3 on n1 by signal 9 at step 70"
    facts = {"budget": "node_lost", "limit": 10, "window_s": 3600.0}
    text = sentence(Reason.BUDGET_SPENT, facts)
    assert text == "the restart budget is spent (node_lost: 10 allowed in 3600 s)"


def test_a_sentence_is_bounded() -> None:
    assert len(sentence(Reason.NODE_FAILED, {"node": "n", "what": "x" * 10_000})) == SENTENCE_CHARS_MAX
