"""A store that lists late what it gives out by name: nothing wrong is offered, and the newest step is
found."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from easyckpt.commit import CommitOutcome, commit_manifest, next_generation
from easyckpt.errors import StaleGeneration
from easyckpt.keep import KeepLatest
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.storage import BytesSource, Entry, MemoryStorage, Parts
from easyckpt.survey import survey
from easyckpt.testing import SampleRun
from easyckpt.verify import verify_step


@dataclass
class LateListing(MemoryStorage):
    """Listings show what was there ``lag`` changes ago; names are always up to date."""

    lag: int = 5
    history: list[tuple[Entry, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        self.history.append(super().list())
        super().write_durable(path, data, if_absent=if_absent, parts=parts)

    def delete(self, path: str) -> None:
        self.history.append(super().list())
        super().delete(path)

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        then = self.history[-self.lag] if len(self.history) >= self.lag else ()
        return tuple(entry for entry in then if entry.path.startswith(prefix))

    def settle(self) -> None:
        """Listings catch up."""
        for _ in range(self.lag):
            self.history.append(super().list())


def test_the_newest_step_is_found_before_it_is_listed() -> None:
    run = SampleRun(storage=LateListing())
    run.begin(1)
    run.save(10)
    assert [item.step for item in survey(run.storage).visible] == [10]
    run.save(20)
    found = survey(run.storage).visible
    assert found[0].step == 20
    assert verify_step(run.storage, found[0].manifest).is_good


def test_a_life_that_is_not_listed_yet_fences_all_the_same() -> None:
    storage = LateListing(lag=50)
    old = SampleRun(storage=storage)
    old.begin(1)
    old.save(10)
    assert next_generation(storage) == 2
    new = SampleRun(storage=storage)
    new.begin(2, resumed_step=10)
    assert next_generation(storage) == 3
    refs = old.persist(20)
    assert commit_manifest(storage, old.manifest(20, refs)).outcome is CommitOutcome.FENCED
    with pytest.raises(StaleGeneration):
        prune_report(storage, keep=KeepLatest(1), generation=1, now_unix_s=2e9)
    storage.settle()
    assert [item.step for item in survey(storage).visible] == [10]


def test_deleted_steps_that_are_still_listed_harm_nobody() -> None:
    storage = LateListing(lag=1)
    run = SampleRun(storage=storage)
    run.begin(1)
    for step in (10, 20, 30):
        run.save(step)
    storage.settle()
    storage.lag = 200
    options = PruneOptions(grace_s=0.0)
    for _ in range(3):
        prune_report(storage, keep=KeepLatest(1), generation=1, now_unix_s=4e9, options=options)
    storage.lag = 1
    storage.settle()
    prune_report(storage, keep=KeepLatest(1), generation=1, now_unix_s=4e9, options=options)
    storage.lag = 4
    assert 30 in [item.step for item in survey(storage).visible]
    storage.settle()
    (last,) = survey(storage).visible
    assert verify_step(storage, last.manifest).is_good
