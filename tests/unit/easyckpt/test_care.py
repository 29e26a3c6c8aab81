"""Damage of every kind: found, named, another step offered, and mended where the right bytes are anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from easyckpt.errors import NothingToLoad
from easyckpt.keep import KeepLatest
from easyckpt.mend import MendKind, repair_steps
from easyckpt.paths import StepName, body_path, fragment_path, manifest_path, quarantine_path
from easyckpt.pins import pin, pinned_steps, unpin
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.saver.disk import Vault
from easyckpt.scrub import read_proofs, scrub
from easyckpt.storage import LocalStorage
from easyckpt.survey import HiddenReason, survey
from easyckpt.testing import SampleRun
from easyckpt.verify import verify_step
from easyckpt.why import explain_step

NAME = StepName(step=20, generation=1)


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    """Two nodes, steps 10 and 20."""
    run = SampleRun(storage=LocalStorage(tmp_path / "run"), nodes=2)
    run.begin(1)
    run.save(10)
    run.save(20, metrics={"loss": 1.0})
    return run


def path_of(run: SampleRun, path: str) -> Path:
    return Path(run.storage.where(path))


def body(run: SampleRun, rank: int = 1) -> Path:
    return path_of(run, body_path(NAME, node_rank=rank, rank=rank))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def tensor_byte(run: SampleRun) -> int:
    """A byte within the replicated matrix."""
    raw = body(run).read_bytes()
    return 8 + int.from_bytes(raw[:8], "little") + 100


def swap(a: Path, b: Path) -> None:
    mine = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(mine)


def hostile_header(run: SampleRun, change: Callable[[bytes], bytes]) -> None:
    """Another header of the same length."""
    raw = body(run).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = change(raw[8:end])
    assert len(header) == end - 8
    body(run).write_bytes(raw[:8] + header + raw[end:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is done to step 20, and what has to be said of it."""

    name: str
    do: Callable[[SampleRun], None]
    says: str
    alone: MendKind
    """What repair does of itself."""


def _a_longer_header(raw: bytes) -> bytes:
    return raw.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)


DAMAGES = (
    Damage(
        name="flipped byte of a replicated tensor",
        do=lambda run: flip(body(run), tensor_byte(run)),
        says="differ from their hash", alone=MendKind.BODY,
    ),
    Damage(
        name="flipped byte of a rank's own state",
        do=lambda run: flip(body(run), -60),
        says="differ from their hash", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="truncated body", do=lambda run: body(run).write_bytes(body(run).read_bytes()[:-4096]),
        says="has", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="missing body", do=lambda run: body(run).unlink(),
        says="is not there", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="swapped bodies", do=lambda run: swap(body(run, 0), body(run, 1)),
        says="", alone=MendKind.BODY,
    ),
    Damage(
        name="oversized header length",
        do=lambda run: body(run).write_bytes(b"\xff" * 8 + body(run).read_bytes()[8:]),
        says="header claims", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="overlapping offsets", do=lambda run: hostile_header(run, _a_longer_header),
        says="not sound", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="missing fragment", do=lambda run: path_of(run, fragment_path(NAME, node_rank=1)).unlink(),
        says="is not there", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="damaged fragment", do=lambda run: flip(path_of(run, fragment_path(NAME, node_rank=1)), 200),
        says="differs from what the manifest says", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="fragment that points outside",
        do=lambda run: path_of(run, fragment_path(NAME, node_rank=1)).write_text(
            path_of(run, fragment_path(NAME, node_rank=1)).read_text().replace("data/", "../../")
        ),
        says="differs from what the manifest says", alone=MendKind.SET_ASIDE,
    ),
    Damage(
        name="damaged manifest", do=lambda run: flip(path_of(run, manifest_path(NAME)), 200),
        says="", alone=MendKind.MANIFEST,
    ),
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_every_damage_is_found_named_and_dealt_with(run: SampleRun, damage: Damage, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.storage.where(), copy)
    damage.do(run)
    answer = explain_step(run.storage, 20)
    assert not answer.loadable
    assert any(damage.says in reason.detail for reason in answer.reasons)
    assert all(run.storage.where() in reason.where for reason in answer.reasons)
    assert answer.others == (10,)
    (ten,) = [item for item in survey(run.storage).visible if item.step == 10]
    assert verify_step(run.storage, ten.manifest).is_good, "the older step is unharmed"
    offered = {item.step for item in survey(run.storage).visible}
    verdicts = {verdict.name.step: verdict for verdict in scrub(run.storage, now_unix_s=2e9)}
    assert set(verdicts) == offered
    assert all(step == 10 or not verdict.is_good for step, verdict in verdicts.items())

    before = {path: path.read_bytes() for path in Path(run.storage.where()).rglob("*") if path.is_file()}
    planned = repair_steps(run.storage, dry_run=True)
    after = {path: path.read_bytes() for path in Path(run.storage.where()).rglob("*") if path.is_file()}
    assert after == before, "a dry run changes nothing"
    assert planned[-1].kind is damage.alone

    with_copy = tmp_path / "with copy"
    shutil.copytree(run.storage.where(), with_copy)
    done = repair_steps(LocalStorage(with_copy), [LocalStorage(copy)])
    assert done
    assert MendKind.SET_ASIDE not in {item.kind for item in done}
    check_good(LocalStorage(with_copy), 20)

    done = repair_steps(run.storage)
    assert done[-1].kind is damage.alone
    if damage.alone is MendKind.SET_ASIDE:
        check_set_aside(run)
    else:
        check_good(run.storage, 20)
    assert repair_steps(run.storage) == (), "nothing is left to do"


def check_good(storage: LocalStorage, step: int) -> None:
    item = survey(storage).find(step)
    assert item is not None
    verdict = verify_step(storage, item.manifest)
    assert verdict.is_good
    assert verdict.is_whole


def check_set_aside(run: SampleRun) -> None:
    found = survey(run.storage)
    assert [item.step for item in found.visible] == [10]
    (hidden,) = found.hidden
    assert (hidden.name, hidden.reason) == (NAME, HiddenReason.SET_ASIDE)
    assert run.storage.exists(quarantine_path(NAME))
    (reason,) = explain_step(run.storage, 20).reasons
    assert "easyckpt repair" in reason.detail


def test_what_was_set_aside_is_not_forgotten_until_it_is_left_behind(run: SampleRun) -> None:
    body(run).unlink()
    repair_steps(run.storage)
    assert any("set_aside" in lost for lost in Vault(run.storage.where()).look().lost)
    run.begin(2, resumed_step=10)
    (hidden,) = survey(run.storage).hidden
    assert hidden.reason is HiddenReason.FENCED
    assert Vault(run.storage.where()).look().lost == ()
    options = PruneOptions(grace_s=0.0, remains_grace_s=0.0)
    prune_report(run.storage, keep=KeepLatest(5), generation=2, now_unix_s=4e9, options=options)
    assert survey(run.storage).hidden == ()
    assert not run.storage.exists(quarantine_path(NAME))
    assert not path_of(run, body_path(NAME, node_rank=0, rank=0)).exists()


def test_the_only_step_set_aside_is_no_empty_folder(tmp_path: Path) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path))
    run.begin(1)
    run.save(20)
    path_of(run, body_path(NAME, node_rank=0, rank=0)).unlink()
    repair_steps(run.storage)
    assert survey(run.storage).visible == ()
    assert Vault(str(tmp_path)).look().lost, "a job must not begin from nothing here"


def test_a_scrub_goes_through_all_in_turn_and_remembers(run: SampleRun) -> None:
    run.save(30)
    (first,) = scrub(run.storage, now_unix_s=1e9, byte_budget=1)
    (second,) = scrub(run.storage, now_unix_s=1e9 + 1, byte_budget=1)
    (third,) = scrub(run.storage, now_unix_s=1e9 + 2, byte_budget=1)
    (fourth,) = scrub(run.storage, now_unix_s=1e9 + 3, byte_budget=1)
    assert [verdict.name.step for verdict in (first, second, third, fourth)] == [30, 20, 10, 30]
    proofs = {name.step: proof for name, proof in read_proofs(run.storage).items()}
    assert {step: proof.unix_s for step, proof in proofs.items()} == {30: 1e9 + 3, 20: 1e9 + 1, 10: 1e9 + 2}
    flip(body(run), -60)
    scrub(run.storage, now_unix_s=2e9)
    assert read_proofs(run.storage)[NAME].verdict == "damaged"
    flip(path_of(run, "scrub.json"), 50)
    assert read_proofs(run.storage) == {}, "a damaged record is begun anew"
    assert len(scrub(run.storage, now_unix_s=2e9)) == 3
    assert len(read_proofs(run.storage)) == 3


def test_a_pinned_step_stays_whatever_the_policy_says(run: SampleRun) -> None:
    run.save(30)
    assert pin(run.storage, 10, note="the paper's", now_unix_s=1e9)
    assert not pin(run.storage, 10, note="again", now_unix_s=1e9)
    assert pinned_steps(run.storage) == {10}
    options = PruneOptions(grace_s=0.0)
    report = prune_report(run.storage, keep=KeepLatest(1), generation=1, now_unix_s=4e9, options=options)
    assert [name.step for name in report.kept] == [30, 10]
    with pytest.raises(NothingToLoad, match="not offered"):
        pin(run.storage, 20, note="", now_unix_s=1e9)
    assert pinned_steps(run.storage) == {10}
    assert unpin(run.storage, 10)
    assert not unpin(run.storage, 10)
    report = prune_report(run.storage, keep=KeepLatest(1), generation=1, now_unix_s=4e9, options=options)
    assert [name.step for name in report.kept] == [30]


def test_bytes_that_are_stored_once_for_several_ranks(tmp_path: Path) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path / "run"), nodes=2, shared=True)
    run.begin(1)
    run.save(10)
    run.save(20)
    copy = LocalStorage(tmp_path / "copy")
    shutil.copytree(run.storage.where(), copy.root)
    for rank in (0, 1):
        raw = body(run, rank).read_bytes()
        flip(body(run, rank), 8 + int.from_bytes(raw[:8], "little") + 8)
        done = repair_steps(run.storage, [copy])
        assert [(item.kind, item.where) for item in done] == [(MendKind.BODY, str(body(run, rank)))]
        check_good(LocalStorage(run.storage.where()), 20)
    body(run, 0).unlink()
    body(run, 1).unlink()
    assert [item.kind for item in repair_steps(run.storage, [copy])] == [MendKind.BODY] * 2
    check_good(LocalStorage(run.storage.where()), 20)
    body(run, 1).unlink()
    (aside,) = repair_steps(run.storage)
    assert aside.kind is MendKind.SET_ASIDE
    assert aside.detail == "nothing has the right bytes of ranks 1"
