"""The failure detector by numbers; all time is given."""

from __future__ import annotations

from typing import Any

import pytest

from aimaster.core.detector import Detector, DetectorConfig
from aimaster.core.events import NodeDied, NodeSuspected
from aimaster.ids import Incarnation, NodeId

N = NodeId("n")
LIFE = Incarnation("1")


def steady(*, beats: int = 20, interval_s: float = 1.0) -> tuple[Detector, float]:
    """A detector that has heard so many beats of one node, and when the last was."""
    detector = Detector()
    detector.watch(N, LIFE, 0.0)
    now = 0.0
    for _ in range(beats):
        now += interval_s
        detector.heartbeat(N, LIFE, now)
        assert detector.scan(now) == ()
    return detector, now


def verdicts(
    detector: Detector, now: float, *, seconds: float, late_s: float = 0.0
) -> list[tuple[str, float]]:
    """What it says while nothing is heard, and after how long."""
    found = []
    for tick in range(1, int(seconds * 10) + 1):
        for event in detector.scan(now + tick / 10, late_s=late_s):
            found.append((type(event).__name__, tick / 10))
    return found


def test_a_steady_node_is_suspect_after_3_and_dead_after_6_seconds() -> None:
    detector, now = steady()
    found = verdicts(detector, now, seconds=10)
    assert found == [
        (NodeSuspected.__name__, pytest.approx(3.0, abs=0.11)),
        (NodeDied.__name__, pytest.approx(6.0, abs=0.11)),
    ]
    assert len(detector) == 0


def test_a_node_that_never_beats_dies_as_well() -> None:
    detector = Detector()
    detector.watch(N, LIFE, 100.0)
    assert [name for name, _ in verdicts(detector, 100.0, seconds=10)] == ["NodeSuspected", "NodeDied"]


def test_a_suspect_that_is_heard_again_is_trusted_and_given_more_patience() -> None:
    detector, now = steady()
    verdicts(detector, now, seconds=5)
    recovered = detector.heartbeat(N, LIFE, now + 5)
    assert recovered is not None
    assert recovered.silent_s == pytest.approx(5.0)
    assert detector.heartbeat(N, LIFE, now + 5.5) is None
    ((_, suspect_s), (_, dead_s)) = verdicts(detector, now + 5.5, seconds=30)
    assert 3.0 < suspect_s <= 9.0
    assert suspect_s < dead_s <= 18.0


def test_nobody_becomes_immortal() -> None:
    detector = Detector()
    detector.watch(N, LIFE, 0.0)
    now = 0.0
    for beat in range(100):
        now += 0.1 if beat % 2 else 15.0
        detector.heartbeat(N, LIFE, now)
    ((_, suspect_s), (_, dead_s)) = verdicts(detector, now, seconds=60)
    assert (suspect_s, dead_s) == (pytest.approx(9.0, abs=0.11), pytest.approx(18.0, abs=0.11))


def test_a_broken_connection_is_no_death_but_shortens_the_wait() -> None:
    detector, now = steady()
    detector.connection_lost(N, LIFE)
    assert detector.scan(now) == ()
    ((_, suspect_s), (_, dead_s)) = verdicts(detector, now, seconds=10)
    assert (suspect_s, dead_s) == (pytest.approx(1.8, abs=0.11), pytest.approx(3.6, abs=0.11))


def test_a_beat_after_a_broken_connection_restores_patience() -> None:
    detector, now = steady()
    detector.connection_lost(N, LIFE)
    detector.heartbeat(N, LIFE, now + 1.0)
    assert verdicts(detector, now + 1.0, seconds=2.5) == []


def test_time_in_which_the_master_was_away_is_not_held_against_anybody() -> None:
    detector, now = steady()
    # It could not look for a minute; the beats of that time are still unread.
    assert detector.scan(now + 60.0, late_s=59.0) == ()
    assert [name for name, _ in verdicts(detector, now + 60.0, seconds=10)] == ["NodeSuspected", "NodeDied"]


def test_lateness_is_excused_once_and_never_more_than_has_passed() -> None:
    detector, now = steady()
    detector.scan(now + 1.0, late_s=1e9)
    silence = detector.silence_s(N, now + 1.0)
    assert silence is not None
    assert 0.0 <= silence <= 1.0
    # Heard within the excused time is heard just now, not in the future.
    detector.heartbeat(N, LIFE, now + 1.5)
    detector.scan(now + 2.0, late_s=1.0)
    assert detector.silence_s(N, now + 4.0) == pytest.approx(2.0)


def test_a_new_life_inherits_nothing_and_an_old_one_counts_for_nothing() -> None:
    detector, now = steady()
    verdicts(detector, now, seconds=4)
    detector.watch(N, Incarnation("2"), now + 4)
    assert detector.heartbeat(N, LIFE, now + 5) is None
    assert not detector.watches(N, LIFE)
    assert detector.silence_s(N, now + 6) == pytest.approx(2.0)
    detector.connection_lost(N, LIFE)
    assert detector.scan(now + 6.5) == ()


def test_one_that_left_is_not_missed() -> None:
    detector, now = steady()
    detector.forget(N)
    assert verdicts(detector, now, seconds=30) == []
    assert detector.heartbeat(N, LIFE, now) is None


def test_a_scan_of_ten_thousand_healthy_nodes_looks_at_none_of_them() -> None:
    detector = Detector()
    looked_at = 0
    judge = detector._judge

    def counting(*args: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return judge(*args)

    detector._judge = counting  # type: ignore[method-assign]
    for index in range(10_000):
        detector.watch(NodeId(f"n{index}"), LIFE, 0.0)
    for index in range(10_000):
        detector.heartbeat(NodeId(f"n{index}"), LIFE, 1.0 + index / 100_000)
    assert detector.scan(2.0) == ()
    assert looked_at == 0
    for index in range(1, 10_000):
        detector.heartbeat(NodeId(f"n{index}"), LIFE, 4.0)
    assert [event.node for event in detector.scan(4.5)] == ["n0"]
    assert looked_at == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"suspect_s": 0.5},
        {"dead_s": 2.0},
        {"connection_lost_factor": 0.0},
        {"connection_lost_factor": 1.1},
        {"stretch_max": 0.5},
        {"deviations": -1.0},
    ],
)
def test_times_that_depend_on_each_other_are_checked_together(broken: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        DetectorConfig(**broken)
