"""How often the failure detector is wrong: in virtual time, so figures are the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aimaster.core.detector import DetectorConfig
from aimaster.simulation.suspicion import CONDITIONS, Conditions, Wrong, judge

ADAPTIVE = DetectorConfig()
FIXED = replace(ADAPTIVE, deviations=0.0, stretch_max=1.0)
NAMED = {one.name: one for one in CONDITIONS}
USUAL = ("calm", "1 % loss", "late master: 12 times an hour, up to 8 s")
RAGGED = "always ragged: a pause of 1.5 s and more every second"
NODES, HOURS = 6, 1.0


def lives(config: DetectorConfig, conditions: Conditions) -> list[Wrong]:
    return [judge(config, conditions, hours=HOURS, seed=seed) for seed in range(NODES)]


@pytest.mark.parametrize("name", USUAL)
def test_where_things_are_usual_nobody_is_suspected(name: str) -> None:
    found = lives(ADAPTIVE, NAMED[name])
    assert [(one.suspected, one.given_up) for one in found] == [(0, 0)] * NODES


@pytest.mark.parametrize("name", USUAL[:2])
def test_a_node_that_is_gone_is_given_up_in_time(name: str) -> None:
    """The last look may come an interval late, and the last beat may have been under way."""
    for one in lives(ADAPTIVE, NAMED[name]):
        assert one.delay_s is not None
        assert ADAPTIVE.dead_s - 1.0 <= one.delay_s <= ADAPTIVE.dead_s + 2.0


def test_patience_grows_with_ragged_beats_and_has_an_end() -> None:
    """Both judge the same beats: fewer wrong verdicts, for a later right one."""
    ragged = NAMED[RAGGED]
    adaptive, fixed = lives(ADAPTIVE, ragged), lives(FIXED, ragged)
    assert sum(one.given_up for one in fixed) > 0
    assert sum(one.given_up for one in adaptive) * 2 < sum(one.given_up for one in fixed)
    assert sum(one.suspected for one in adaptive) * 2 < sum(one.suspected for one in fixed)
    assert max(one.delay_s or 0.0 for one in adaptive) <= ADAPTIVE.dead_s * ADAPTIVE.stretch_max + 2.0


def test_worse_conditions_are_seen_at_all() -> None:
    """A simulation in which nothing can be wrong would prove nothing."""
    assert sum(one.suspected for one in lives(ADAPTIVE, NAMED["20 % loss"])) > 0


def test_the_same_seed_is_the_same_life() -> None:
    for conditions in CONDITIONS:
        first, again = (judge(ADAPTIVE, conditions, hours=0.2, seed=1) for _ in range(2))
        assert first == again
    one, other = (judge(ADAPTIVE, NAMED[RAGGED], hours=0.2, seed=seed) for seed in (1, 2))
    assert one != other


def test_impossible_conditions_are_refused() -> None:
    for wrong in ({"loss": 1.0}, {"loss": -0.1}, {"pauses_per_hour": -1.0}, {"late_per_hour": -1.0}):
        with pytest.raises(ValueError, match="need 0 <= loss"):
            Conditions(name="wrong", **wrong)
