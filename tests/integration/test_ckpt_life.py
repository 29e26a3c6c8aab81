"""Lives of savers and workers: adoption, linger, the end that leaves nothing, and trouble that passes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest
import torch

from easyckpt.api import Checkpointer
from easyckpt.errors import (
    Misuse,
    ProtocolError,
    SaveAbandoned,
    SaveNotDone,
    SaverUnavailable,
    SaveTimeout,
    StaleGeneration,
)
from easyckpt.saver.client import SaverClient, spawn
from tests.ckpt_nodes import Nodes, make_nodes, process_is_gone, wait_until

WORKER = Path(__file__).with_name("ckpt_worker.py")
PATIENCE_S = 120
DRAINS_S = 60.0
"""Half of what a saver gives its last step, where it must not need it; usually it takes no second."""


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        yield made


def state(step: int, size: int = 3000) -> dict[str, Any]:
    return {"weight": torch.full((size,), float(step)), "step": step}


def one_rank(nodes: Nodes, **options: Any) -> Checkpointer:
    nodes.begin(1, [nodes.start()])
    (worker,) = nodes.workers(**options)
    assert worker.load(state(0)) is None
    return worker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_saver_that_is_left_alone_drains_and_leaves_nothing(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    with make_nodes(tmp_path, clean_env, linger_s=0.5) as nodes:
        worker = one_rank(nodes, disk_interval=1_000_000)
        worker.save(state(1), step=1, block=True).wait("durable", 60)
        worker.save(state(2), step=2, block=True).wait("memory", 60)
        (node,) = nodes.nodes
        nodes.drop_workers()
        assert node.owner is not None
        node.owner.close()
        assert node.process.process is not None
        assert node.process.process.wait(PATIENCE_S) == 0
        folder = Path(node.options.socket_path).parent
        assert list(folder.iterdir()) == []
        nodes.begin(1, [nodes.start()])
        (worker,) = nodes.workers()
        assert worker.load(state(0)) == 2


def test_a_step_that_one_rank_never_saved_does_not_keep_a_saver_that_is_left_alone(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    """Its partner's piece is sealed, and would be waited for as long as a save may take."""
    with make_nodes(tmp_path, clean_env, linger_s=0.5) as nodes:
        nodes.begin(1, [nodes.start()], ranks=2)
        workers = nodes.workers()
        for worker in workers:
            worker.load(state(0))
        saved = [worker.save(state(1), step=1) for worker in workers]
        for handle in saved:
            handle.wait("durable", 60)
        workers[0].save(state(2), step=2)
        workers[0].save(state(3), step=3, block=False)  # returns when step 2 was told to the saver
        (node,) = nodes.nodes
        nodes.drop_workers()
        assert node.owner is not None
        node.owner.close()
        assert node.process.process is not None
        assert node.process.process.wait(DRAINS_S) == 0


def test_a_rank_that_closes_waits_for_a_partner_that_has_yet_to_save_the_last_step(nodes: Nodes) -> None:
    nodes.begin(1, [nodes.start()], ranks=2)
    first, second = nodes.workers()
    nodes.load_together([first, second], [state(0), state(0)])
    for worker in (first, second):
        worker.save(state(1), step=1, block=True)
    with ThreadPoolExecutor(1) as pool:
        first.save(state(2), step=2, block=True)
        closing = pool.submit(first.close)
        with pytest.raises(FutureTimeout):
            closing.result(1.0)
        second.save(state(2), step=2, block=True).wait("durable", 60)
        second.close()
        closing.result(60)
    nodes.checkpointers.clear()


def test_an_owner_that_comes_back_adopts_the_saver_and_its_memory(nodes: Nodes) -> None:
    worker = one_rank(nodes, disk_interval=1_000_000)
    worker.save(state(1), step=1).wait("memory", 60)
    (node,) = nodes.nodes
    nodes.drop_workers()
    assert node.owner is not None
    node.owner.release()
    again = spawn(node.options)
    assert (again.adopted, again.pid) == (True, node.process.pid)
    node.owner = None
    nodes.begin(2, [node], progress=True)
    (worker,) = nodes.workers()
    assert worker.load(state(0)) == 1
    assert worker.restored_from == "memory"


def test_shutdown_makes_the_newest_step_durable_first(nodes: Nodes) -> None:
    worker = one_rank(nodes, disk_interval=1_000_000)
    worker.save(state(1), step=1, block=True).wait("durable", 60)
    worker.save(state(2), step=2, block=True).wait("memory", 60)
    (node,) = nodes.nodes
    assert node.status().durable_step == 1
    assert node.owner is not None
    node.owner.shutdown()
    assert node.process.process is not None
    node.process.process.wait(PATIENCE_S)
    nodes.begin(1, [nodes.start()])
    (worker,) = nodes.workers()
    assert worker.load(state(0)) == 2


def test_persist_now_is_for_the_moment_before_the_end(nodes: Nodes) -> None:
    worker = one_rank(nodes, disk_interval=1_000_000)
    for step in (1, 2):
        worker.save(state(step), step=step, block=True).wait("memory", 60)
    (node,) = nodes.nodes
    assert node.owner is not None
    closed = node.owner.persist_now(60)
    assert (closed.memory_step, closed.durable_step, closed.degraded) == (2, 2, "")


def test_a_saver_of_another_job_is_not_used(nodes: Nodes) -> None:
    node = nodes.start()
    with pytest.raises(ProtocolError, match="the saver of job test-job"):
        SaverClient(node.options.socket_path, job_id="other")


def test_an_older_generation_cannot_begin(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(2, [node])
    with pytest.raises(StaleGeneration):
        nodes.begin(1, [node])
    nodes.begin(2, [node])  # the same again is fine


def test_several_nodes_need_an_address_and_a_secret(nodes: Nodes) -> None:
    with pytest.raises(ProtocolError, match="--listen and --secret-file"):
        nodes.begin(1, [nodes.start(), nodes.start()])


def test_a_stranger_on_the_port_gets_nothing_and_harms_nothing(nodes: Nodes) -> None:
    node = nodes.start(tcp=True)
    nodes.begin(1, [node])
    host, port = node.address.split(":")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 100, bytes(200)):
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            received = b""
            with contextlib.suppress(OSError):  # it hangs up on unread rubbish
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(4096):
                    received += part
            assert len(received) <= 48  # the greeting and nothing else
    (worker,) = nodes.workers()
    worker.load(state(0))
    worker.save(state(1), step=1).wait("memory", 60)


def test_no_memory_is_an_error_in_the_handle_on_every_rank_and_older_steps_stay(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    with make_nodes(tmp_path, clean_env, memory_limit=1 << 20) as nodes:
        nodes.begin(1, [nodes.start()], ranks=2)
        workers = nodes.workers()
        for worker in workers:
            worker.load(state(0))
        for worker in workers:
            handle = worker.save(state(1), step=1)
        handle.wait("durable", 60)
        large = workers[0].save(state(2, size=500_000), step=2, block=True)
        other = workers[1].save(state(2), step=2, block=True)
        for handle in (large, other):
            with pytest.raises(SaveAbandoned, match=r"rank 0: a checkpoint slot .*memory limit"):
                handle.wait("memory", 60)
        nodes.begin(2, nodes.nodes, ranks=2, progress=True)
        assert [worker.load(state(0)) for worker in nodes.workers()] == [1, 1]


def test_trouble_with_storage_shows_and_passes(nodes: Nodes) -> None:
    blocker = nodes.folder / "ckpt"
    worker = one_rank(nodes)
    (node,) = nodes.nodes
    wait_until(lambda: any(blocker.glob("generations/*.json")), "the life of this run is recorded")
    aside = nodes.folder / "aside"
    blocker.rename(aside)
    blocker.write_text("a file where the folder should be")
    handle = worker.save(state(1), step=1)
    handle.wait("memory", 60)
    wait_until(lambda: node.status().degraded is not None, "degraded")
    assert node.status().durable_step is None
    with pytest.raises(SaveTimeout, match="Not a directory"):
        handle.wait("durable", 0.5)
    worker.save(state(2), step=2, block=True).wait("memory", 60)
    blocker.unlink()
    aside.rename(blocker)
    wait_until(lambda: node.status().durable_step == 2, "durable when the folder is back")
    assert node.status().degraded is None


def test_close_says_what_was_lost(nodes: Nodes) -> None:
    worker = one_rank(nodes)
    root = nodes.folder / "ckpt"
    wait_until(lambda: any(root.glob("generations/*.json")), "the life of this run is recorded")
    root.rename(nodes.folder / "aside")
    root.write_text("")
    worker.save(state(1), step=1).wait("memory", 60)
    with pytest.raises(SaveNotDone, match="step 1 was saved in memory, and no step is durable"):
        worker.close(timeout=30)
    with pytest.raises(Misuse, match="closed"):
        worker.save(state(2), step=2)
    root.unlink()


def test_a_saver_that_dies_costs_no_training(nodes: Nodes) -> None:
    worker = one_rank(nodes)
    (node,) = nodes.nodes
    worker.save(state(1), step=1, block=True).wait("durable", 60)
    node.kill()
    handle = worker.save(state(2), step=2)
    assert handle.stage == "failed"
    with pytest.raises(SaverUnavailable):
        handle.wait("memory", 1)
    node.restart()
    node.begin(node.begun)  # type: ignore[arg-type]
    saved = []

    def saves_again() -> bool:
        saved.append(worker.save(state(3 + len(saved)), step=3 + len(saved)))
        return saved[-1].stage != "failed"

    wait_until(saves_again, "the saver is found again")
    saved[-1].wait("durable", 60)


def test_a_lead_that_dies_is_told_everything_again(nodes: Nodes) -> None:
    first, second = nodes.start(tcp=True), nodes.start(tcp=True)
    nodes.begin(1, [first, second])
    workers = nodes.workers()
    for worker in workers:
        worker.load(state(0))
    for worker in workers:
        handle = worker.save(state(1), step=1, block=True)
    handle.wait("replicated", 60)
    first.kill()
    first.restart()
    first.begin(first.begun)  # type: ignore[arg-type]
    step = 1

    def both_save() -> bool:
        nonlocal step
        step += 1
        handles = [worker.save(state(step), step=step) for worker in workers]
        if any(handle.stage in ("failed", "skipped", "abandoned") for handle in handles):
            return False
        for handle in handles:
            handle.wait("durable", 60)
        return True

    wait_until(both_save, "a step that all ranks have saved with the new lead")
    nodes.begin(2, [first, second], progress=True)
    assert [worker.load(state(0)) for worker in nodes.workers()] == [step, step]


def test_a_fork_cannot_use_the_checkpointer(nodes: Nodes) -> None:
    worker = one_rank(nodes)
    pid = os.fork()
    if pid == 0:
        try:
            worker.save(state(1), step=1)
        except Misuse:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    worker.save(state(1), step=1).wait("memory", 60)


def run_ranks(
    tmp: Path, *, world: int, steps: int, log: str, options: tuple[str, ...] = (), attempt: int = 0
) -> list[int]:
    """Start ranks as a launcher does and wait for them; their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(world):
        ours = {
            **environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        command = [sys.executable, str(WORKER), str(tmp / "ckpt"), str(steps), str(tmp / log)]
        more = [item for item in options if not item.startswith("kill=") or rank == world - 1]
        started.append(
            subprocess.Popen([*command, *more, *(["store=1"] if world > 1 else [])],
                             env=ours if world > 1 else environment)
        )  # fmt: skip
    codes = [
        process.wait(PATIENCE_S) if index == world - 1 else None for index, process in enumerate(started)
    ]
    for index, process in enumerate(started[:-1]):
        if codes[-1] != 0:
            process.kill()
        codes[index] = process.wait(PATIENCE_S)
    return [code if code is not None else -1 for code in codes]


@pytest.mark.slow
def test_one_process_alone_goes_on_bit_equal_after_a_kill_and_leaves_nothing(tmp_path: Path) -> None:
    plain, killed = tmp_path / "a", tmp_path / "b"
    plain.mkdir()
    killed.mkdir()
    assert run_ranks(plain, world=1, steps=8, log="log", options=("block=1",)) == [0]
    assert run_ranks(killed, world=1, steps=8, log="log", options=("block=1", "kill=5")) == [-9]
    assert run_ranks(killed, world=1, steps=8, log="log", options=("block=1",)) == [0]
    expected = {line["step"]: line["loss"] for line in lines(plain / "log") if line["event"] == "step"}
    found = lines(killed / "log")
    assert all(line["loss"] == expected[line["step"]] for line in found if line["event"] == "step")
    loaded = [line for line in found if line["event"] == "loaded"]
    assert [(line["step"], line["tier"]) for line in loaded] == [(0, None), (4, "memory")]
    one, two = (next(x for x in lines(p / "log") if x["event"] == "end") for p in (plain, killed))
    assert one["digest"] == two["digest"]
    assert one["draw"] == two["draw"]
    for folder in (plain, killed):
        sockets = folder / f"easyckpt-{os.getuid()}"
        wait_until(
            lambda sockets=sockets: not list(sockets.iterdir()), "the saver has ended and left nothing"
        )


@pytest.mark.slow
def test_ranks_of_any_launcher_find_each_other_and_the_saver_of_before(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, world=2, steps=6, log="log", options=("block=1", "kill=4"))[1] == -9
    assert run_ranks(tmp_path, world=2, steps=6, log="log", options=("block=1",), attempt=1) == [0, 0]
    loaded = [line for line in lines(tmp_path / "log") if line["event"] == "loaded"]
    assert [line["step"] for line in loaded] == [0, 0, 3, 3]
    assert {line["tier"] for line in loaded[2:]} == {"memory"}
    assert [line["generation"] for line in loaded] == [1, 1, 2, 2]
    sockets = tmp_path / f"easyckpt-{os.getuid()}"
    wait_until(lambda: not list(sockets.iterdir()), "the saver has ended and left nothing")


@pytest.mark.slow
def test_ranks_that_open_again_right_after_they_closed_are_served(tmp_path: Path) -> None:
    """The saver is just ending then. A clean end has given its memory back, so that storage has the steps."""
    assert run_ranks(tmp_path, world=2, steps=8, log="log", options=("block=1", "again=4")) == [0, 0]
    again = [(line["step"], line["tier"]) for line in lines(tmp_path / "log") if line["event"] == "again"]
    assert again == [(8, "disk")] * 8


def test_a_second_run_in_the_same_folder_takes_over_and_the_first_is_told(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    clean_env.setenv("TMPDIR", str(tmp_path))
    clean_env.setattr("tempfile.tempdir", None)
    first = Checkpointer(tmp_path / "ckpt")
    assert first.load(state(0)) is None
    first.save(state(1), step=1).wait("durable", 60)
    second = Checkpointer(tmp_path / "ckpt")
    assert second.load(state(0)) == 1
    with pytest.raises(StaleGeneration):
        first.save(state(2), step=2)
    assert second._mooring is not None
    with SaverClient(second._mooring.seat.socket_path, job_id="alone", role="visitor") as client:
        pid = client.welcome.pid
    with pytest.raises(StaleGeneration):
        first.close()
    second.close()
    wait_until(lambda: process_is_gone(pid), "the saver ends at once when all ranks have closed")


def test_a_worker_that_dies_while_it_waits_holds_nothing_up(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    """Also the saver's own end: a question that nobody waits for any more must not keep it."""
    with make_nodes(tmp_path, clean_env, linger_s=0.5) as nodes:
        nodes.begin(1, [nodes.start()], ranks=2)
        workers = nodes.workers()
        for worker in workers:
            worker.load(state(0))
        workers[0].save(state(1), step=1)
        pid = os.fork()
        if pid == 0:  # asks for a slot that is not free, with a connection of its own, and waits
            again = nodes.checkpointer(0)
            again._continuing = True
            again.save(state(2), step=2, block=True)
            os._exit(1)
        (node,) = nodes.nodes
        wait_until(lambda: node.status().ranks_open == 3, "the child is connected")
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        wait_until(lambda: node.status().ranks_open == 2, "its session is over")
        workers[1].save(state(1), step=1).wait("durable", 60)
        nodes.drop_workers()
        assert node.owner is not None
        node.owner.close()
        assert node.process.process is not None
        assert node.process.process.wait(PATIENCE_S) == 0
