"""The failure detector, for any rhythm of beats, scans, delays and cuts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aimaster.core.detector import Detector
from aimaster.core.events import NodeDied
from aimaster.ids import Incarnation, NodeId

N = NodeId("n")
LIFE = Incarnation("1")
GAPS = st.lists(st.floats(0.01, 20.0), max_size=30)


def trained(gaps: list[float]) -> tuple[Detector, float]:
    detector = Detector()
    detector.watch(N, LIFE, 0.0)
    now = 0.0
    for gap in gaps:
        now += gap
        detector.heartbeat(N, LIFE, now)
    return detector, now


def worst(detector: Detector, now: float) -> int:
    """0 trusted, 1 suspect, 2 dead, after one look."""
    events = detector.scan(now)
    if not events:
        return 0
    return 2 if isinstance(events[-1], NodeDied) else 1


@given(GAPS, st.floats(0, 40), st.floats(0, 40), st.booleans())
def test_more_silence_never_makes_a_node_healthier(
    gaps: list[float], one: float, other: float, cut: bool
) -> None:
    less, more = sorted((one, other))
    verdicts = []
    for silence in (less, more):
        detector, now = trained(gaps)
        if cut:
            detector.connection_lost(N, LIFE)
        verdicts.append(worst(detector, now + silence))
    assert verdicts == sorted(verdicts)


@given(GAPS, st.floats(0, 40))
def test_a_second_witness_never_lengthens_a_suspicion(gaps: list[float], silence: float) -> None:
    alone, now = trained(gaps)
    helped, _ = trained(gaps)
    helped.connection_lost(N, LIFE)
    assert worst(helped, now + silence) >= worst(alone, now + silence)


@given(GAPS, st.lists(st.floats(0.01, 3.0), min_size=1, max_size=40))
def test_between_two_beats_a_verdict_only_gets_worse(gaps: list[float], looks: list[float]) -> None:
    detector, now = trained(gaps)
    said = []
    for look in looks:
        now += look
        said += [type(event).__name__ for event in detector.scan(now)]
    assert said in ([], ["NodeSuspected"], ["NodeSuspected", "NodeDied"], ["NodeDied"])


@given(GAPS, st.floats(0.1, 40), st.floats(0, 100))
def test_a_late_master_only_gives_more_patience(gaps: list[float], silence: float, late: float) -> None:
    judged, now = trained(gaps)
    excused, _ = trained(gaps)
    judged.scan(now)
    excused.scan(now)
    verdict = worst(judged, now + silence)
    events = excused.scan(now + silence, late_s=late)
    assert len(events) <= verdict
    assert not (verdict < 2 and any(isinstance(event, NodeDied) for event in events))


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.01, 2.0), st.floats(0, 3.0)), max_size=80))
def test_one_look_at_the_most_silent_finds_all(steps: list[tuple[int, float, float]]) -> None:
    """The scan stops at the first fresh node; looking at everyone separately must not find more."""
    together, apart = Detector(), [Detector() for _ in range(5)]
    for index in range(5):
        together.watch(NodeId(str(index)), LIFE, 0.0)
        apart[index].watch(NodeId(str(index)), LIFE, 0.0)
    now = 0.0
    for index, gap, late in steps:
        now += gap
        together.heartbeat(NodeId(str(index)), LIFE, now)
        apart[index].heartbeat(NodeId(str(index)), LIFE, now)
        found = {repr(event) for event in together.scan(now, late_s=late)}
        alone = {repr(event) for detector in apart for event in detector.scan(now, late_s=late)}
        assert found == alone
