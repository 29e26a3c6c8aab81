"""Storage in trouble, from a saver's side: training goes on, the trouble and its age show, and it passes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt.api import Checkpointer
from easyckpt.errors import Misuse, Unprotected
from easyckpt.storage import open_storage
from easyckpt.survey import survey
from tests.ckpt_nodes import Nodes, make_nodes, wait_until
from tests.runs import script, start_run, until
from tests.s3_server import SECRET, S3Server, s3_process, s3_server

__all__ = ["s3_process", "s3_server"]  # fixtures


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())} (needs root)")
    try:
        yield target
    finally:
        assert libc.umount2(os.fsencode(target), 2) == 0, os.strerror(ctypes.get_errno())


def fill(path: Path) -> None:
    """Write until nothing is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def state(step: int, size: int = 250_000) -> dict[str, object]:
    return {"weight": torch.full((size,), float(step)), "step": step}


def one_rank(nodes: Nodes, **options: object) -> Checkpointer:
    nodes.begin(1, [nodes.start()])
    (worker,) = nodes.workers(**options)
    return worker


def degraded(nodes: Nodes) -> str:
    return nodes.nodes[0].status().degraded or ""


def training_goes_on(worker: Checkpointer, steps: range) -> None:
    for step in steps:
        worker.save(state(step), step=step, block=True).wait("memory", 60)


def check_trouble_passes(
    nodes: Nodes, worker: Checkpointer, *, begin: Callable[[], object], end: Callable[[], object], says: str
) -> None:
    """Durable, then trouble: memory goes on and the trouble shows with its age; then durable again."""
    worker.save(state(1), step=1).wait("durable", 60)
    assert degraded(nodes) == ""
    begin()
    training_goes_on(worker, range(2, 5))
    wait_until(lambda: says in degraded(nodes), f"{says} shows")
    assert "step 1 is the newest durable, and none was added for" in degraded(nodes)
    training_goes_on(worker, range(5, 7))
    assert nodes.nodes[0].status().durable_step == 1
    end()
    worker.save(state(7), step=7, block=True).wait("durable", 60)
    assert degraded(nodes) == ""


@pytest.mark.slow
def test_s3_that_is_busy_for_a_while(nodes: Nodes, s3_server: S3Server) -> None:
    nodes.root = s3_server.url(f"runs/{uuid.uuid4().hex}")
    worker = one_rank(nodes)
    check_trouble_passes(
        nodes, worker, begin=lambda: s3_server.faults(refuse=-1), end=s3_server.faults, says="SlowDown"
    )
    assert survey(open_storage(nodes.root)).visible[0].step == 7
    assert SECRET not in nodes.log()
    nodes.begin(2, [nodes.start()])
    (worker,) = nodes.workers()
    found = state(0)
    assert worker.load(found) == 7
    assert worker.restored_from == "disk"
    assert torch.equal(found["weight"], state(7)["weight"])  # type: ignore[arg-type]


def test_a_full_disk_that_gets_room_again(nodes: Nodes, small_disk: Path) -> None:
    nodes.root = str(small_disk / "ckpt")
    filler = small_disk / "filler"
    worker = one_rank(nodes, keep=1)

    check_trouble_passes(nodes, worker, begin=lambda: fill(filler), end=filler.unlink, says="No space left")
    assert survey(open_storage(nodes.root)).visible[0].step == 7


@pytest.mark.slow
def test_unprotected_for_too_long_is_an_error_on_every_rank_at_the_same_step(
    nodes: Nodes, s3_server: S3Server
) -> None:
    nodes.root = s3_server.url(f"runs/{uuid.uuid4().hex}")
    nodes.begin(1, [nodes.start()], ranks=2)
    workers = nodes.workers(max_unprotected_s=3.0)
    for worker in workers:
        worker.save(state(1), step=1)
    wait_until(lambda: nodes.nodes[0].status().durable_step == 1, "step 1 is durable")
    s3_server.faults(refuse=-1)
    raised: dict[int, int] = {}
    said: set[str] = set()

    def save(step: int) -> None:
        for rank, worker in enumerate(workers):
            try:
                worker.save(state(step), step=step)
            except Unprotected as error:
                said.add(str(error))
                raised.setdefault(rank, step)

    step = 1
    while not raised:
        step += 1
        save(step)
        assert step < 10_000
    assert raised == {0: step, 1: step}
    assert all("became durable for" in text and "3 s are allowed" in text for text in said)
    s3_server.faults()
    wait_until(lambda: (nodes.nodes[0].status().durable_step or 0) > 1, "a step is durable again")
    raised.clear()
    save(step + 1)
    assert not raised


def test_what_to_keep_and_limits_that_make_no_sense(tmp_path: Path) -> None:
    class Mine:
        pass

    for options in (
        {"keep": 0}, {"keep": True}, {"keep": 2.0}, {"keep": Mine()}, {"max_unprotected_s": 0},
        {"max_unprotected_s": 60.0, "disk_interval": 60.0}, {"disk_interval": -1},
    ):  # fmt: skip
        with pytest.raises(Misuse):
            Checkpointer(tmp_path, **options)  # type: ignore[arg-type]


def test_policies_decide_what_stays_and_a_restart_changes_nothing(nodes: Nodes) -> None:
    keep = easyckpt.KeepLatest(1) | easyckpt.KeepEvery(4) | easyckpt.KeepBest("loss")
    (worker,) = [one_rank(nodes, keep=keep)]
    for step in range(1, 8):
        handle = worker.save(state(step, 100), step=step, block=True, metrics={"loss": abs(step - 3)})
        handle.wait("durable", 60)
    worker.close()
    (node,) = nodes.nodes
    assert node.owner is not None
    node.owner.shutdown()
    assert node.process.process is not None
    node.process.process.wait(60)
    store = open_storage(nodes.folder / "ckpt")
    assert [item.step for item in survey(store).visible] == [7, 4, 3]
    nodes.begin(1, [nodes.start()], progress=True)
    (worker,) = nodes.workers(keep=keep)
    assert worker.load(state(0, 100)) == 7
    worker.save(state(8, 100), step=8, metrics={"loss": 9.0}).wait("durable", 60)
    wait_until(lambda: [item.step for item in survey(store).visible] == [8, 4, 3], "7 is taken back")


TRAIN = """
import os, sys, time
import torch, easyckpt
model = torch.nn.Linear(30, 30)
state = {"model": model}
ck = easyckpt.Checkpointer(os.environ["EASYCKPT_DIR"], keep=1, disk_interval=1.0)
step = ck.load(state) or 0
while not os.path.exists(sys.argv[1]):
    step += 1
    ck.save(state, step=step)
    time.sleep(0.05)
ck.save(state, step=step + 1, block=True).wait("durable", timeout=100)
ck.close()
print("closed", flush=True)
"""


PATIENT = """
import pathlib, time
import torch, easyckpt
checkpointer = easyckpt.Checkpointer()
state = {"ballast": torch.zeros(500_000)}
checkpointer.load(state)
pathlib.Path("ready").touch()
while not pathlib.Path("full").exists():
    time.sleep(0.05)
checkpointer.save(state, step=1, block=True).wait("durable")
print("durable", flush=True)
checkpointer.close()
"""


@pytest.mark.slow
def test_whoever_waits_for_storage_is_seen_to_save_and_so_is_no_hang(
    small_disk: Path, tmp_path: Path
) -> None:
    run = start_run(tmp_path, "--ckpt-dir", small_disk / "ckpt", script(tmp_path, PATIENT))
    filler = small_disk / "filler"

    def phases() -> list[str]:
        return [rank["phase"] for node in run.status().get("nodes", ()) for rank in node["ranks"]]

    try:
        until((tmp_path / "ready").exists, "it has begun")
        fill(filler)
        (tmp_path / "full").touch()
        until(lambda: phases() == ["saving"], "it waits for storage")
    finally:
        filler.unlink(missing_ok=True)
        code = run.wait()
    assert (code, run.stdout) == (0, "durable\n"), run.stderr


@pytest.mark.slow
def test_a_job_whose_disk_is_full_trains_on_and_says_so(small_disk: Path, tmp_path: Path) -> None:
    program, stop, filler = script(tmp_path, TRAIN), tmp_path / "stop", small_disk / "filler"
    root = small_disk / "ckpt"
    run = start_run(
        tmp_path,
        "--standalone",
        "--nproc-per-node",
        "1",
        "--ckpt-dir",
        root,
        "--sanity-check",
        "off",
        program,
        stop,
    )
    store = open_storage(root)
    try:
        until(lambda: survey(store).visible, "a step is durable")
        fill(filler)
        shown = until(lambda: [text for text in [str(run.status())] if "No space left" in text], "it shows")
        assert "none was added for" in shown[0]
        filler.unlink()
        until(lambda: run.status() and "No space left" not in str(run.status()), "it is over")
    finally:
        filler.unlink(missing_ok=True)
        stop.touch()
        code = run.wait()
    assert code == 0, run.stderr
    assert "closed" in run.stdout
    assert "checkpoints are degraded" in run.stderr
    assert "no longer degraded" in run.stderr


def test_an_interval_is_kept_by_all_ranks_together(nodes: Nodes) -> None:
    nodes.begin(1, [nodes.start()], ranks=2)
    workers = nodes.workers(interval=3600.0)
    saved: dict[int, list[int]] = {0: [], 1: []}
    for step in range(1, 200):
        # Now the one rank asks first, now the other.
        for rank in (0, 1) if step % 2 else (1, 0):
            handle = workers[rank].save(state(step, 10), step=step)
            if not handle.skipped:
                saved[rank].append(step)
            else:
                assert handle.reason.startswith("not due: no step before")
    assert saved == {0: [1], 1: [1]}
    for worker in workers:
        handle = worker.save(state(200, 10), step=200, block=True)
    handle.wait("memory", 60)


def test_an_interval_in_steps_asks_nobody(nodes: Nodes) -> None:
    worker = one_rank(nodes, interval=5)
    handles = {step: worker.save(state(step, 10), step=step) for step in range(1, 5)}
    assert all(handle.reason == "not due: every 5 steps are saved" for handle in handles.values())
    worker.save(state(5, 10), step=5).wait("durable", 60)
    for bad in (0, -1, True, "often"):
        with pytest.raises(Misuse):
            Checkpointer(nodes.folder, interval=bad)  # type: ignore[arg-type]


def test_the_interval_that_loses_least_is_found(nodes: Nodes) -> None:
    worker = one_rank(nodes, interval="auto")
    assert not worker.save(state(1, 10), step=1).skipped
    assert worker.save(state(2, 10), step=2).skipped, "not every step is worth it"
    assert not worker.save(state(3, 10), step=3, block=True).skipped
