"""The commit protocol: exactly one wins, lives fence each other, and nothing incomplete becomes visible."""

from __future__ import annotations

import threading

import pytest

from easyckpt.commit import (
    CommitOutcome,
    CommitResult,
    commit_manifest,
    ensure_root,
    next_generation,
    record_generation,
)
from easyckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    Misuse,
    StaleGeneration,
    StorageFull,
    UnknownFormat,
)
from easyckpt.manifest import Manifest
from easyckpt.paths import LATEST_PATH, ROOT_PATH, StepName, generation_path, manifest_path
from easyckpt.records import GenerationRecord, LatestHint, RootRecord, Tombstone
from easyckpt.storage import MemoryStorage
from easyckpt.storage.base import BytesSource, Parts
from easyckpt.survey import HiddenReason, Life, decide, fenced_by, survey, visible_steps
from easyckpt.testing import SampleRun


def sample(**changes: object) -> SampleRun:
    run = SampleRun(storage=MemoryStorage(), nodes=2, ranks_per_node=2)
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def steps_of(run: SampleRun) -> list[tuple[int, int]]:
    return [(step.step, step.generation) for step in visible_steps(run.storage)]


def test_steps_are_offered_newest_first() -> None:
    run = sample()
    assert steps_of(run) == []
    run.begin(1)
    for step in (10, 30, 20):
        assert run.save(step).outcome is CommitOutcome.COMMITTED
    assert steps_of(run) == [(30, 1), (20, 1), (10, 1)]
    found = survey(run.storage)
    assert found.generation == 1
    assert found.find(20) is not None
    assert found.find(15) is None
    assert found.hidden == ()
    assert found.troubles == ()


def test_latest_is_a_hint_that_nobody_needs() -> None:
    run = sample()
    run.begin(1)
    run.save(10)
    hint = LatestHint.from_json(run.storage.read(LATEST_PATH), where="x")
    assert (hint.step, hint.manifest) == (10, manifest_path(StepName(step=10, generation=1)))
    stale = LatestHint(step=99, generation=1, manifest="manifests/gone.json")
    for raw in (stale.to_json(), b"garbage", b""):
        run.storage.write_durable(LATEST_PATH, raw)
        assert steps_of(run) == [(10, 1)]
    run.storage.delete(LATEST_PATH)
    assert steps_of(run) == [(10, 1)]


def test_a_hint_that_cannot_be_written_costs_nothing() -> None:
    class NoHint(MemoryStorage):
        def write_durable(
            self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
        ) -> None:
            if path == LATEST_PATH:
                raise StorageFull("no space", where=path)
            super().write_durable(path, data, if_absent=if_absent, parts=parts)

    run = sample(storage=NoHint())
    run.begin(1)
    result = run.save(10)
    assert result.outcome is CommitOutcome.COMMITTED
    assert "no space" in result.hint_error
    assert steps_of(run) == [(10, 1)]


def test_committing_again_is_fine_and_other_content_loses() -> None:
    run = sample()
    run.begin(1)
    refs = run.persist(10)
    manifest = run.manifest(10, refs)
    assert commit_manifest(run.storage, manifest).outcome is CommitOutcome.COMMITTED
    run.now_unix_s += 5
    assert commit_manifest(run.storage, run.manifest(10, refs)).outcome is CommitOutcome.ALREADY
    other = run.manifest(10, refs, metrics={"loss": 1.0})
    result = commit_manifest(run.storage, other)
    assert result.outcome is CommitOutcome.LOST
    assert not result.is_visible
    assert visible_steps(run.storage)[0].manifest == manifest


def test_of_two_committers_exactly_one_wins() -> None:
    for turn in range(5):
        run = sample()
        run.begin(1)
        refs = run.persist(10)
        barrier = threading.Barrier(6)
        results: list[CommitResult] = []

        def commit(
            number: int,
            run: SampleRun = run,
            refs: tuple = refs,
            barrier: threading.Barrier = barrier,
            results: list[CommitResult] = results,
        ) -> None:
            manifest = run.manifest(10, refs, metrics={"writer": float(number % 2)})
            barrier.wait(timeout=60)
            results.append(commit_manifest(run.storage, manifest))

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        outcomes = [result.outcome for result in results]
        assert outcomes.count(CommitOutcome.COMMITTED) == 1, turn
        assert outcomes.count(CommitOutcome.ALREADY) == 2
        assert outcomes.count(CommitOutcome.LOST) == 3


def test_a_zombie_beyond_the_new_lifes_step_is_fenced() -> None:
    run = sample()
    run.begin(1)
    for step in (10, 20, 30):
        run.save(step)
    zombie_refs = run.persist(40)
    zombie = run.manifest(40, zombie_refs)
    late_refs = run.persist(15)
    late = run.manifest(15, late_refs)
    run.begin(2, resumed_step=20)
    assert steps_of(run) == [(20, 1), (10, 1)], "30 belongs to a past that was left behind"
    result = commit_manifest(run.storage, zombie)
    assert (result.outcome, result.fenced_by) == (CommitOutcome.FENCED, 2)
    assert not run.storage.exists(manifest_path(zombie.name))
    assert commit_manifest(run.storage, late).outcome is CommitOutcome.COMMITTED, "within what is shared"
    run.save(25)
    assert steps_of(run) == [(25, 2), (20, 1), (15, 1), (10, 1)]
    hidden = survey(run.storage).hidden
    assert [(item.name.step, item.reason, item.by_generation) for item in hidden] == [
        (30, HiddenReason.FENCED, 2)
    ]
    assert "resumed from step 20" in hidden[0].detail


def test_a_zombie_that_slips_through_the_check_is_still_not_seen() -> None:
    """The new life's record appears after the zombie looked, and before it wrote."""

    class Late(MemoryStorage):
        def write_durable(
            self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
        ) -> None:
            if path == manifest_path(StepName(step=40, generation=1)):
                successor.begin(2, resumed_step=20)
            super().write_durable(path, data, if_absent=if_absent, parts=parts)

    run = sample(storage=Late())
    successor = sample(storage=run.storage)
    run.begin(1)
    run.save(20)
    result = run.save(40)
    assert (result.outcome, result.fenced_by) == (CommitOutcome.FENCED, 2)
    assert run.storage.exists(manifest_path(StepName(step=40, generation=1)))
    assert steps_of(run) == [(20, 1)]


def test_a_life_that_began_anew_fences_everything_older() -> None:
    run = sample()
    run.begin(1)
    run.save(1000)
    run.begin(2, resumed_step=None)
    assert steps_of(run) == []
    run.save(10)
    assert steps_of(run) == [(10, 2)]
    assert "began anew" in survey(run.storage).hidden[0].detail


def test_every_newer_life_has_its_say() -> None:
    lives = (
        Life(generation=1, known=True),
        Life(generation=2, known=True, resumed_step=50),
        Life(generation=3, known=True, resumed_step=80),
        Life(generation=4, known=True, resumed_step=60),
    )

    def fence(step: int, generation: int) -> int | None:
        life = fenced_by(StepName(step=step, generation=generation), lives)
        return None if life is None else life.generation

    assert fence(50, 1) is None
    assert fence(51, 1) == 2
    assert fence(60, 2) is None
    assert fence(61, 2) == 4
    assert fence(81, 2) == 3
    assert fence(60, 3) is None
    assert fence(70, 3) == 4
    assert fence(1000, 4) is None


def test_the_same_step_of_two_lives_is_offered_from_the_newer_first() -> None:
    run = sample()
    run.begin(1)
    run.save(20)
    run.begin(2, resumed_step=20)
    run.save(20, seed=5)
    assert steps_of(run) == [(20, 2), (20, 1)]
    newest = survey(run.storage).find(20)
    assert newest is not None
    assert newest.generation == 2


def test_a_damaged_record_of_a_life_is_read_from_its_manifests() -> None:
    run = sample()
    run.begin(1)
    for step in (10, 20, 30):
        run.save(step)
    run.begin(2, resumed_step=20)
    run.save(25)
    run.storage.write_durable(generation_path(2), b"damaged")
    found = survey(run.storage)
    assert steps_of(run) == [(25, 2), (20, 1), (10, 1)]
    assert [trouble.path for trouble in found.troubles] == [generation_path(2)]


def test_a_damaged_record_without_manifests_holds_older_lives_back() -> None:
    run = sample()
    run.begin(1)
    run.save(10)
    run.begin(2, resumed_step=10)
    run.storage.write_durable(generation_path(2), b"damaged")
    found = survey(run.storage)
    assert found.visible == ()
    assert [item.reason for item in found.hidden] == [HiddenReason.FENCE_UNREADABLE]
    assert "generation 2" in found.hidden[0].detail
    run.begin(3, resumed_step=10)
    assert survey(run.storage).visible == (), "generation 2 may have left step 10 behind"
    run.save(20)
    assert steps_of(run) == [(20, 3)]


def test_damaged_manifests_hide_themselves_only() -> None:
    run = sample()
    run.begin(1)
    for step in (10, 20, 30, 40, 50):
        run.save(step)
    names = [StepName(step=step, generation=1) for step in (20, 30, 40, 50)]
    run.storage.write_durable(manifest_path(names[0]), b"{}")
    run.storage.write_durable(manifest_path(names[1]), run.storage.read(manifest_path(names[2])))
    text = run.storage.read(manifest_path(names[3]))
    run.storage.write_durable(manifest_path(names[3]), text[: len(text) // 2])
    assert steps_of(run) == [(40, 1), (10, 1)]
    hidden = {item.name.step: item for item in survey(run.storage).hidden}
    assert {step: item.reason for step, item in hidden.items()} == dict.fromkeys(
        (20, 30, 50), HiddenReason.CORRUPT
    )
    assert "named like step 30" in hidden[30].detail


def test_another_runs_files_are_told_apart() -> None:
    theirs = sample(run_id="theirs")
    theirs.begin(1)
    theirs.save(99)
    run = sample(run_id="ours")
    run.begin(1)
    run.save(10)
    for path in (manifest_path(StepName(step=99, generation=1)), generation_path(1)):
        target = path if path.startswith("manifests") else generation_path(7)
        raw = theirs.storage.read(path)
        run.storage.write_durable(target, raw)
    found = survey(run.storage)
    assert steps_of(run) == [(10, 1)]
    assert [item.reason for item in found.hidden] == [HiddenReason.OTHER_RUN]
    assert "theirs" in found.troubles[0].detail


def test_the_folder_belongs_to_who_came_first() -> None:
    storage = MemoryStorage()
    records = [RootRecord(run_id=f"run{number}", created_unix_s=0.0, software="") for number in range(8)]
    found: list[str] = []
    barrier = threading.Barrier(8)

    def claim(record: RootRecord) -> None:
        barrier.wait(timeout=60)
        found.append(ensure_root(storage, record).run_id)

    threads = [threading.Thread(target=claim, args=(record,)) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_folder_whose_identity_is_damaged_says_so() -> None:
    run = sample()
    run.begin(1)
    run.storage.write_durable(ROOT_PATH, b"{}")
    with pytest.raises(CorruptCheckpoint, match=r"easyckpt\.json"):
        visible_steps(run.storage)
    run.storage.write_durable(ROOT_PATH, LatestHint(step=1, generation=1, manifest="m").to_json())
    with pytest.raises(UnknownFormat):
        run.save(10)


def record(generation: int, *, life: str = "a", resumed_step: int | None = None) -> GenerationRecord:
    return GenerationRecord(
        run_id="sample-run", generation=generation, resumed_step=resumed_step, world_size=4, life=life,
        created_unix_s=0.0, software="",
    )  # fmt: skip


def test_a_generations_number_is_taken_once() -> None:
    run = sample()
    run.begin(1)
    assert next_generation(run.storage) == 2
    record_generation(run.storage, record(5))
    record_generation(run.storage, record(5))
    assert next_generation(run.storage) == 6
    with pytest.raises(StaleGeneration, match="another life"):
        record_generation(run.storage, record(5, life="b"))
    with pytest.raises(StaleGeneration, match="another life"):
        record_generation(run.storage, record(5, resumed_step=3))
    with pytest.raises(StaleGeneration, match="replaced by 5"):
        record_generation(run.storage, record(4))
    assert next_generation(MemoryStorage()) == 1


def test_what_a_commit_needs_first() -> None:
    run = sample()
    with pytest.raises(Misuse, match="no identity"):
        record_generation(run.storage, record(1))
    run.begin(1)
    refs = run.persist(10)
    foreign = sample(run_id="other", generation=1).manifest(10, refs)
    with pytest.raises(Misuse, match="belongs to run sample-run"):
        commit_manifest(run.storage, foreign)
    run.resumed_step = 5
    with pytest.raises(Misuse, match="its record says None"):
        commit_manifest(run.storage, run.manifest(10, refs))
    run.resumed_step, run.generation = None, 2
    with pytest.raises(Misuse, match="no record"):
        commit_manifest(run.storage, run.manifest(10, run.persist(10)))
    assert steps_of(run) == []


@pytest.mark.parametrize(
    "what", ["fragment", "body", "short body", "changed fragment", "fragment of another step"]
)
def test_nothing_incomplete_is_committed(what: str) -> None:
    run = sample()
    run.begin(1)
    run.save(5)
    refs = run.persist(10)
    manifest = run.manifest(10, refs)
    body = refs[1].file.replace(".json", "/rank00003.safetensors")
    if what == "fragment":
        run.storage.delete(refs[1].file)
    elif what == "body":
        run.storage.delete(body)
    elif what == "short body":
        run.storage.write_durable(body, run.storage.read(body)[:-1])
    elif what == "changed fragment":
        run.storage.write_durable(refs[1].file, run.storage.read(refs[1].file) + b" ")
    else:
        run.storage.write_durable(refs[1].file, run.storage.read(run.persist(11)[1].file))
    kind = (
        CorruptCheckpoint
        if what in ("changed fragment", "fragment of another step")
        else IncompleteCheckpoint
    )
    with pytest.raises(kind) as caught:
        commit_manifest(run.storage, manifest)
    assert "node00001" in str(caught.value)
    assert steps_of(run) == [(5, 1)]


# ----- tombstones, by the pure rule -----


def manifest_of(step: int, generation: int) -> Manifest:
    run = sample(generation=generation)
    return run.manifest(step, run.persist(step))


def tombstone(step: int, *, by: int, anchor: int) -> Tombstone:
    return Tombstone(
        run_id="sample-run", step=step, generation=1, by_generation=by, anchor_step=anchor,
        anchor_generation=1, created_unix_s=0.0,
    )  # fmt: skip


def test_a_tombstone_takes_back_and_a_zombies_does_not() -> None:
    manifests = {StepName(step=step, generation=1): manifest_of(step, 1) for step in (10, 20, 30)}
    first = Life(generation=1, known=True)
    stones = [tombstone(10, by=1, anchor=30)]
    visible, hidden = decide(manifests, (first,), stones)
    assert [step.step for step in visible] == [30, 20]
    assert [(item.name.step, item.reason) for item in hidden] == [(10, HiddenReason.TAKEN_BACK)]
    second = Life(generation=2, known=True, resumed_step=20)
    visible, hidden = decide(manifests, (first, second), stones)
    assert [step.step for step in visible] == [20, 10], "step 30, the reason, is lost: 10 is back"
    assert [item.reason for item in hidden] == [HiddenReason.FENCED]
    visible, _ = decide(manifests, (first, second), [tombstone(10, by=2, anchor=20)])
    assert [step.step for step in visible] == [20]
