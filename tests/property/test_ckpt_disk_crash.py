"""Dying at every operation: nothing that was promised is lost, nothing that is visible is wrong.

The durable write runs on a disk that forgets what was not synced; the commit protocol and retention run both
there and on a store that dies between its operations. What is enumerated is every operation; what is left by
the loss of power is none, all, or several random parts of what was waiting.
"""

from __future__ import annotations

import random

import pytest

from easyckpt.errors import StorageMissing
from easyckpt.keep import KeepLatest
from easyckpt.paths import StepName
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.storage import LocalStorage, MemoryStorage, Parts, Storage
from easyckpt.survey import survey, visible_steps
from easyckpt.testing import (
    Crash,
    CrashingPosix,
    CrashingStorage,
    PowerLoss,
    SampleRun,
    SimulatedDisk,
    crash_points,
)
from easyckpt.testing.crash import CrashPlan
from easyckpt.verify import verify_step

LOSSES = [(PowerLoss.NONE, 0), (PowerLoss.ALL, 0), *((PowerLoss.RANDOM, seed) for seed in range(6))]
loss = pytest.mark.parametrize(("what", "seed"), LOSSES, ids=lambda value: getattr(value, "value", value))

OLD, NEW = b"old " * 3000, b"new " * 5000


@loss
@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_an_object_is_old_or_new_and_lasting_once_written(
    what: PowerLoss, seed: int, if_absent: bool, there: bool
) -> None:
    if if_absent and there:
        return
    disk = SimulatedDisk()
    done = False

    def run(plan: CrashPlan) -> None:
        nonlocal disk, done
        disk, done = SimulatedDisk(), False
        if there:
            LocalStorage("/ckpt/run", posix=disk).write_durable("a/b/object", OLD)
        store = LocalStorage("/ckpt/run", posix=CrashingPosix(plan, disk))
        store.write_durable("a/b/object", NEW, if_absent=if_absent)
        done = True

    runs = 0
    for plan in crash_points(run):
        runs += 1
        disk.power_loss(what, random.Random(f"{seed} {plan.at}"))
        store = LocalStorage("/ckpt/run", posix=disk)
        try:
            seen: bytes | None = store.read("a/b/object")
        except StorageMissing:
            seen = None
        allowed = {NEW} if done else {NEW, OLD if there else None}
        assert seen in allowed, f"dying at {plan.at}: {plan.names[-3:]}"
        for entry in store.unfinished():
            store.delete(entry.path)
        store.write_durable("a/b/object", NEW)
        assert store.unfinished() == ()
        assert [entry.path for entry in store.list()] == ["a/b/object"]
    assert runs > 8, "the enumeration saw no operations"


@loss
def test_a_long_object_in_parts_is_old_or_new(what: PowerLoss, seed: int) -> None:
    """Room is reserved first, so that the file has its length long before it has its bytes."""
    old, new = b"o" * (1 << 20), b"n" * ((1 << 20) + 4097)
    disk = SimulatedDisk()
    done = False
    parts = Parts(bytes=256 << 10, check=lambda begin, part: None)

    def run(plan: CrashPlan) -> None:
        nonlocal disk, done
        disk, done = SimulatedDisk(), False
        LocalStorage("/ckpt", posix=disk).write_durable("a/body", old)
        store = LocalStorage("/ckpt", posix=CrashingPosix(plan, disk), lanes=1)
        store.write_durable("a/body", new, parts=parts)
        done = True

    runs = 0
    for plan in crash_points(run):
        runs += 1
        disk.power_loss(what, random.Random(f"{seed} {plan.at}"))
        seen = LocalStorage("/ckpt", posix=disk).read("a/body")
        assert seen in ({new} if done else {new, old}), f"dying at {plan.at}: {plan.names[-3:]}"
    assert "reserve" in plan.names
    assert runs > 14


def _check(storage: Storage, promised: dict[StepName, tuple[bytearray, ...]]) -> None:
    """I1 what is visible verifies, I2 what was promised is visible, I3 with the bytes that were written."""
    visible = {step.name: step for step in visible_steps(storage)}
    for step in visible.values():
        verdict = verify_step(storage, step.manifest)
        assert verdict.is_good, verdict
        assert verdict.is_whole
    assert promised.keys() <= visible.keys()
    for name, bodies in promised.items():
        for rank, body in enumerate(bodies):
            ref = visible[name].manifest.ref_of(rank)
            assert ref is not None
            path = ref.file.replace(".json", f"/rank{rank:05d}.safetensors")
            assert storage.read(path) == body


class Script:
    """A run with two lives and retention, noting what each call has promised when it returned."""

    def __init__(self) -> None:
        self.promised: dict[StepName, tuple[bytearray, ...]] = {}
        self.taken_back: set[StepName] = set()

    def play(self, storage: Storage, *, now_unix_s: float = 2e9) -> None:
        run = SampleRun(storage=storage, nodes=2, elements=64)
        run.begin(1)
        for step in (10, 20):
            self._save(run, step)
        run.begin(2, resumed_step=20)
        self._save(run, 25)
        # From here on steps 10 and 20 may be gone.
        for name in [StepName(step=10, generation=1), StepName(step=20, generation=1)]:
            self.promised.pop(name, None)
        options = PruneOptions(grace_s=0.0, remains_grace_s=0.0)
        prune_report(storage, keep=KeepLatest(1), generation=2, now_unix_s=now_unix_s, options=options)

    def _save(self, run: SampleRun, step: int) -> None:
        assert run.save(step).is_visible
        self.promised[StepName(step=step, generation=run.generation)] = run.bodies[step, run.generation]


@loss
def test_commit_and_retention_survive_power_loss_at_every_operation(what: PowerLoss, seed: int) -> None:
    disk, script = SimulatedDisk(), Script()

    def run(plan: CrashPlan) -> None:
        nonlocal disk, script
        disk, script = SimulatedDisk(), Script()
        script.play(LocalStorage("/ckpt", posix=CrashingPosix(plan, disk)))

    # Every operation for the two extremes, every seventh for the random ones: some 450 operations each.
    stride = 1 if what is not PowerLoss.RANDOM else 7
    runs = 0
    for at in range(seed % stride, 100_000, stride):
        plan = CrashPlan(at=at)
        died = True
        try:
            run(plan)
            died = False
        except Crash:
            pass
        runs += 1
        disk.power_loss(what, random.Random(f"{seed} {at}"))
        storage = LocalStorage("/ckpt", posix=disk)
        _check(storage, script.promised)
        if not died:
            break
    assert runs > 20


def test_the_next_life_finishes_what_was_cut_off() -> None:
    """After a crash at any store operation a new life resumes, saves, prunes, and leaves no remains."""
    inner = MemoryStorage()

    def run(plan: CrashPlan) -> None:
        nonlocal inner
        inner = MemoryStorage()
        Script().play(CrashingStorage(inner, plan))

    for _plan in crash_points(run):
        found = survey(inner)
        resumed = found.visible[0].step if found.visible else None
        again = SampleRun(storage=inner, nodes=2, elements=64)
        again.begin(found.generation + 1, resumed_step=resumed)
        assert again.save(100).is_visible
        options = PruneOptions(grace_s=0.0, remains_grace_s=0.0)
        for _ in range(2):
            prune_report(
                inner, keep=KeepLatest(1), generation=again.generation, now_unix_s=4e9, options=options
            )
        _check(inner, {StepName(step=100, generation=again.generation): again.bodies[100, again.generation]})
        assert [step.step for step in visible_steps(inner)] == [100]
        left = [
            entry.path for entry in inner.list() if entry.path.startswith(("data/", "manifests/", "tomb"))
        ]
        assert len(left) == 2 * 2 + 1, left


def test_repeating_every_call_changes_nothing() -> None:
    storage = MemoryStorage()
    run = SampleRun(storage=storage, nodes=2)
    for _ in range(2):
        run.begin(1)
        for step in (10, 20):
            run.save(step)
    before = {entry.path: storage.read(entry.path) for entry in storage.list()}
    again = SampleRun(storage=storage, nodes=2)
    again.begin(1)
    for step in (10, 20):
        again.save(step)
    assert {entry.path: storage.read(entry.path) for entry in storage.list()} == before


def test_prune_needs_a_good_newer_step_at_every_crash() -> None:
    """With the newest step damaged, no crash of retention costs the older one."""
    inner = MemoryStorage()
    bodies: tuple[bytearray, ...] = ()

    def run(plan: CrashPlan) -> None:
        nonlocal inner, bodies
        inner = MemoryStorage()
        sample = SampleRun(storage=inner, elements=64)
        sample.begin(1)
        for step in (10, 20, 30):
            sample.save(step)
        bodies = sample.bodies[20, 1]
        path = "data/g00000001/s000000000030/node00000/rank00000.safetensors"
        damaged = bytearray(inner.read(path))
        damaged[-5000] ^= 1
        inner.write_durable(path, damaged)
        options = PruneOptions(grace_s=0.0)
        store = CrashingStorage(inner, plan)
        report = prune_report(store, keep=KeepLatest(1), generation=1, now_unix_s=4e9, options=options)
        assert report.damaged == (StepName(step=30, generation=1),)
        assert report.anchor == StepName(step=20, generation=1)

    for _plan in crash_points(run):
        good = {step.step: verify_step(inner, step.manifest).is_good for step in visible_steps(inner)}
        assert good[20]
        assert not good[30]
        assert inner.read("data/g00000001/s000000000020/node00000/rank00000.safetensors") == bodies[0]


def test_an_error_is_no_crash() -> None:
    """What a store refuses surfaces as an error of the tree, and leaves what is visible in order."""

    class Refusing(CrashingStorage):
        def write_durable(
            self, path: str, data: object, *, if_absent: bool = False, parts: Parts | None = None
        ) -> None:
            try:
                super().write_durable(path, data, if_absent=if_absent, parts=parts)  # type: ignore[arg-type]
            except Crash as crash:
                raise StorageMissing("refused", where=path) from crash

        def delete(self, path: str) -> None:
            try:
                super().delete(path)
            except Crash as crash:
                raise StorageMissing("refused", where=path) from crash

    for at in range(200):
        inner = MemoryStorage()
        script = Script()
        plan = CrashPlan(at=at)
        refused = False
        try:
            script.play(Refusing(inner, plan))
        except StorageMissing:
            refused = True
        _check(inner, script.promised)
        if not refused and plan.count < at:
            return
    raise AssertionError("it never got through")
