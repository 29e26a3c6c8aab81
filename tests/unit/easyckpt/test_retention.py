"""Retention: what policies keep, and that nothing goes that somebody may still need."""

from __future__ import annotations

import pytest

from easyckpt.errors import StaleGeneration
from easyckpt.keep import KeepAll, KeepAny, KeepBest, KeepEvery, KeepLatest, KeepPinned, KeepPolicy
from easyckpt.manifest import Manifest
from easyckpt.paths import StepName, manifest_path, tombstone_path
from easyckpt.retention import PruneOptions, PruneReport, RemovedKind, prune, prune_report
from easyckpt.storage import BytesSource, Entry, LocalStorage, MemoryStorage, Parts
from easyckpt.survey import HiddenReason, survey, visible_steps
from easyckpt.testing import SampleRun

NOW = 2e9


class Clock:
    """Wall time of a store, set by the test."""

    def __init__(self) -> None:
        self.now_s = NOW

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(clock: Clock) -> SampleRun:
    run = SampleRun(storage=MemoryStorage(wall_clock=clock), elements=64)
    run.begin(1)
    for step in (10, 20, 30, 40, 50):
        run.save(step, metrics={"loss": abs(step - 21.0)})
    return run


def go(run: SampleRun, keep: KeepPolicy, *, now_s: float = NOW, **options: object) -> PruneReport:
    fields = PruneOptions(**options)  # type: ignore[arg-type]
    return prune_report(run.storage, keep=keep, generation=run.generation, now_unix_s=now_s, options=fields)


def steps_of(run: SampleRun) -> list[int]:
    return [step.step for step in visible_steps(run.storage)]


def manifests(run: SampleRun) -> list[Manifest]:
    return [step.manifest for step in visible_steps(run.storage)]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepAll(), [50, 40, 30, 20, 10]),
        (KeepLatest(1), [50]),
        (KeepLatest(2), [50, 40]),
        (KeepLatest(99), [50, 40, 30, 20, 10]),
        (KeepEvery(20), [40, 20]),
        (KeepEvery(7), []),
        (KeepPinned(frozenset({10, 30, 31})), [30, 10]),
        (KeepBest("loss"), [20]),
        (KeepBest("loss", 2), [30, 20]),
        (KeepBest("loss", 1, largest=True), [50]),
        (KeepBest("accuracy"), []),
        (KeepAny((KeepLatest(1), KeepEvery(20), KeepPinned(frozenset({10})))), [50, 40, 20, 10]),
        (KeepAny(()), []),
    ],
)
def test_policies(run: SampleRun, policy: KeepPolicy, kept: list[int]) -> None:
    names = policy.keeps(manifests(run))
    assert sorted((name.step for name in names), reverse=True) == kept


def test_best_of_equals_is_the_newer_and_nan_is_never_best() -> None:
    run = SampleRun(storage=MemoryStorage(), elements=64)
    run.begin(1)
    for step, loss in ((1, 0.5), (2, 0.5), (3, float("nan"))):
        run.save(step, metrics={"loss": loss})
    assert [name.step for name in KeepBest("loss").keeps(manifests(run))] == [2]
    assert [name.step for name in KeepBest("loss", largest=True).keeps(manifests(run))] == [2]


def test_policies_refuse_nonsense() -> None:
    for make in (lambda: KeepLatest(0), lambda: KeepEvery(0), lambda: KeepBest("x", 0)):
        with pytest.raises(ValueError):
            make()


def test_a_step_is_hidden_first_and_its_bytes_go_after_the_grace_time(run: SampleRun) -> None:
    report = go(run, KeepLatest(2))
    assert [item.kind for item in report.removed] == [RemovedKind.TAKEN_BACK] * 3
    assert report.anchor == StepName(step=50, generation=1)
    assert [name.step for name in report.kept] == [50, 40]
    assert steps_of(run) == [50, 40]
    hidden = survey(run.storage).hidden
    assert {item.reason for item in hidden} == {HiddenReason.TAKEN_BACK}
    assert run.storage.list("data/g00000001/s000000000010/"), "the bytes are still there"
    assert go(run, KeepLatest(2), now_s=NOW + 59).removed == ()
    report = go(run, KeepLatest(2), now_s=NOW + 60)
    assert [item.kind for item in report.removed] == [RemovedKind.DELETED] * 3
    assert all(item.bytes > 8000 for item in report.removed)
    left = {entry.path.split("/")[2] for entry in run.storage.list("data/")}
    assert left == {"s000000000040", "s000000000050"}
    assert run.storage.list("tombstones/") == ()
    assert len(run.storage.list("manifests/")) == 2


def test_short_form(run: SampleRun) -> None:
    removed = prune(run.storage, keep=KeepLatest(4), generation=1, now_unix_s=NOW)
    assert [item.name for item in removed] == [StepName(step=10, generation=1)]


def test_a_dry_run_changes_nothing_and_says_the_same(run: SampleRun) -> None:
    before = {entry.path: run.storage.read(entry.path) for entry in run.storage.list()}
    dry = go(run, KeepLatest(2), dry_run=True)
    assert {entry.path: run.storage.read(entry.path) for entry in run.storage.list()} == before
    assert dry == go(run, KeepLatest(2))


def test_a_policy_that_keeps_nothing_keeps_the_newest_good_one(run: SampleRun) -> None:
    report = go(run, KeepAny(()), grace_s=0.0)
    assert steps_of(run) == [50]
    assert report.anchor == StepName(step=50, generation=1)
    assert go(run, KeepAny(()), grace_s=0.0).removed == ()


def damage(run: SampleRun, step: int) -> None:
    path = f"data/g00000001/s{step:012d}/node00000/rank00000.safetensors"
    raw = bytearray(run.storage.read(path))
    raw[-100] ^= 1
    run.storage.write_durable(path, raw)


def test_damaged_steps_are_no_reason_to_remove_older_ones(run: SampleRun) -> None:
    damage(run, 50)
    damage(run, 40)
    report = go(run, KeepLatest(1))
    assert report.anchor == StepName(step=30, generation=1)
    assert [name.step for name in report.damaged] == [50, 40]
    assert steps_of(run) == [50, 40, 30], "the damaged ones are not ours to judge; 30 is the last good one"


def test_with_nothing_good_nothing_goes(run: SampleRun) -> None:
    for step in (10, 20, 30, 40, 50):
        damage(run, step)
    report = go(run, KeepLatest(1), grace_s=0.0)
    assert report.removed == ()
    assert report.anchor is None
    assert len(steps_of(run)) == 5


def test_a_step_that_the_caller_has_proved_is_not_read_again(run: SampleRun) -> None:
    damage(run, 50)
    report = prune_report(
        run.storage, keep=KeepLatest(2), generation=1, now_unix_s=NOW,
        proved={StepName(step=50, generation=1)},
    )  # fmt: skip
    assert report.anchor == StepName(step=50, generation=1)
    assert report.damaged == ()


def test_only_the_current_generation_removes(run: SampleRun) -> None:
    successor = SampleRun(storage=run.storage, elements=64)
    successor.begin(2, resumed_step=50)
    with pytest.raises(StaleGeneration, match="not the current one"):
        go(run, KeepLatest(1))
    with pytest.raises(StaleGeneration):
        prune(MemoryStorage(), keep=KeepLatest(1), generation=1, now_unix_s=NOW)
    assert len(steps_of(run)) == 5
    assert len(go(successor, KeepLatest(2)).removed) == 3


def test_a_life_that_is_replaced_in_the_middle_stops(clock: Clock) -> None:
    class Replaced(MemoryStorage):
        def write_durable(
            self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
        ) -> None:
            super().write_durable(path, data, if_absent=if_absent, parts=parts)
            if path == tombstone_path(StepName(step=10, generation=1), by_generation=1):
                SampleRun(storage=self, elements=64).begin(2, resumed_step=30)

    run = SampleRun(storage=Replaced(wall_clock=clock), elements=64)
    run.begin(1)
    for step in (10, 20, 30, 40):
        run.save(step)
    with pytest.raises(StaleGeneration):
        go(run, KeepLatest(1), grace_s=0.0)
    assert steps_of(run) == [30, 20, 10], "its one tombstone counts for nothing: step 40, the reason, is lost"


@pytest.mark.parametrize(("folder", "grace_s"), [("manifests/", 0.0), ("tombstones/", 60.0)])
def test_a_listing_that_retention_overtakes_is_taken_anew(clock: Clock, folder: str, grace_s: float) -> None:
    """All that was listed goes before it is read, or before the tombstones are: the newer step counts."""
    overtaken: list[str] = []

    class Slow(MemoryStorage):
        def list(self, prefix: str = "") -> tuple[Entry, ...]:
            seen = super().list(prefix)
            if prefix == folder and overtaken == ["soon"]:
                overtaken.append("now")
                run.save(20)
                go(run, KeepLatest(1), grace_s=grace_s)
                return seen if grace_s == 0 else super().list(prefix)
            return seen

    run = SampleRun(storage=Slow(wall_clock=clock), elements=64)
    run.begin(1)
    run.save(10)
    overtaken.append("soon")
    assert steps_of(run) == [20]
    assert overtaken == ["soon", "now"]


def test_tombstones_without_effect_do_not_lead_to_deletion(run: SampleRun) -> None:
    go(run, KeepLatest(1))
    successor = SampleRun(storage=run.storage, elements=64)
    successor.begin(2, resumed_step=20)
    assert steps_of(run) == [20, 10]
    report = go(successor, KeepAll(), now_s=NOW + 1000)
    assert report.removed == ()
    successor.save(25)
    assert steps_of(run) == [25, 20, 10]


def test_steps_that_were_left_behind_go_after_a_longer_time(run: SampleRun) -> None:
    successor = SampleRun(storage=run.storage, elements=64)
    successor.begin(2, resumed_step=30)
    successor.save(35)
    assert go(successor, KeepAll(), now_s=NOW + 3599).removed == ()
    report = go(successor, KeepAll(), now_s=NOW + 3600)
    assert [(item.kind, item.name.step if item.name else None) for item in report.removed] == [
        (RemovedKind.LEFT_BEHIND, 50),
        (RemovedKind.LEFT_BEHIND, 40),
    ]
    assert steps_of(run) == [35, 30, 20, 10]
    assert {entry.path.split("/")[2] for entry in run.storage.list("data/g00000001/")} == {
        "s000000000010",
        "s000000000020",
        "s000000000030",
    }


def test_what_a_new_beginning_hides_is_never_removed_by_itself(run: SampleRun) -> None:
    fresh = SampleRun(storage=run.storage, elements=64)
    fresh.begin(2, resumed_step=None)
    fresh.save(5)
    fresh.save(6)
    go(fresh, KeepLatest(1), now_s=NOW + 1e6, grace_s=0.0)
    assert steps_of(run) == [6]
    assert len(run.storage.list("data/g00000001/")) == 10


def test_data_that_was_never_committed_goes_when_it_is_old(run: SampleRun, clock: Clock) -> None:
    run.persist(45)
    run.persist(60)
    successor = SampleRun(storage=run.storage, elements=64)
    successor.begin(2, resumed_step=50)
    successor.persist(55)
    successor.save(57)
    successor.persist(60)
    clock.now_s = NOW + 3000
    successor.persist(56)
    report = go(successor, KeepAll(), now_s=NOW + 3600)
    gone = {item.name for item in report.removed}
    assert {item.kind for item in report.removed} == {RemovedKind.NEVER_COMMITTED}
    assert gone == {
        StepName(step=45, generation=1),
        StepName(step=60, generation=1),
        StepName(step=55, generation=2),
    }, "60 of generation 2 may be on its way, and 56 is too young"
    assert go(successor, KeepAll(), now_s=NOW + 3601).removed == ()


def test_damaged_manifests_and_their_data_are_left_to_people(run: SampleRun) -> None:
    path = manifest_path(StepName(step=10, generation=1))
    run.storage.write_durable(path, b"{}")
    go(run, KeepLatest(1), now_s=NOW + 1e6, grace_s=0.0)
    assert run.storage.exists(path)
    assert run.storage.list("data/g00000001/s000000000010/")


def test_unfinished_writes_and_strange_files_in_a_real_folder(tmp_path: object) -> None:
    storage = LocalStorage(f"{tmp_path}/run")
    run = SampleRun(storage=storage, elements=64)
    run.begin(1)
    for step in (10, 20):
        run.save(step)
    folder = f"{storage.root}/data/g00000001/s000000000010"
    for name in (f"{folder}/.new-0123456789abcdef-x.json", f"{folder}/my notes.txt", f"{folder}/extra.txt"):
        with open(name, "w") as file:
            file.write("x")
    assert len(storage.unfinished()) == 1
    assert go(run, KeepLatest(2), now_s=0.0).removed == (), "younger than an hour, by any clock"
    report = go(run, KeepLatest(1), now_s=1e11, grace_s=0.0)
    kinds = [item.kind for item in report.removed]
    assert kinds == [RemovedKind.TAKEN_BACK, RemovedKind.DELETED, RemovedKind.UNFINISHED]
    assert storage.unfinished() == ()
    left = [entry.path for entry in storage.list("data/g00000001/s000000000010/")]
    assert left == ["data/g00000001/s000000000010/extra.txt"], "only what bears our names is ever deleted"
