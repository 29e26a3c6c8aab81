"""Saves whose copy goes on behind them: what is stored is what was there when `save` was called, or
nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.api import Checkpointer
from easyckpt.errors import SaveAbandoned
from easyckpt.overlap import fence, job, plan
from tests.ckpt_nodes import Nodes, make_nodes

WIDE = 512
"""A square matrix of this width takes 1 MiB: a few of them are more than is copied within `save`."""


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        made.begin(1, [made.start()])
        yield made


class Held:
    """Holds up every piece that is copied behind a save, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()
        real = plan._move

        def move(target: int, source: int, count: int) -> Callable[[], None]:
            piece = real(target, source, count)

            def held() -> None:
                self.reached.set()
                assert self.gate.wait(60)
                piece()

            return held

        monkeypatch.setattr(plan, "_move", move)

    def let_go(self) -> None:
        self.gate.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.let_go()


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(depth))
        self.norm = nn.BatchNorm1d(WIDE)
        self.register_buffer("average", torch.zeros(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.average.lerp_(self.layers[0].weight.detach(), 0.1)
        return self.norm(x)


def training(seed: int = 1) -> tuple[Net, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step() -> None:
        loss = net(torch.randn(8, WIDE)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return net, optimizer, step


def copy_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"m.{key}": value.clone() for key, value in net.state_dict().items()}
    for index, entries in enumerate(optimizer.state.values()):
        found.update({f"o.{index}.{key}": value.clone() for key, value in entries.items()})
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def loaded(nodes: Nodes, generation: int) -> tuple[int | None, dict[str, torch.Tensor]]:
    """What a fresh process would find."""
    nodes.begin(generation, nodes.nodes, progress=True)
    net, optimizer, _ = training(seed=9)
    (worker,) = nodes.workers()
    step = worker.load({"model": net, "optimizer": optimizer})
    return step, copy_of(net, optimizer)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_what_is_stored_is_what_was_there_at_the_call(nodes: Nodes, verify: Any) -> None:
    net, optimizer, step = training()
    (worker,) = nodes.workers(overlap=True, verify=verify)
    state = {"model": net, "optimizer": optimizer}
    assert worker.load(state) is None
    for number in range(1, 5):
        step()
        expected = copy_of(net, optimizer)
        handle = worker.save(state, step=number, block=True)
        step()  # forward changes buffers at once, the optimizer everything
        handle.wait("memory", 60)
    assert loaded(nodes, 2)[0] == 4
    assert same(loaded(nodes, 3)[1], expected)


def test_an_optimizer_step_waits_for_the_copy_and_helps(nodes: Nodes, held: Held) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    expected = copy_of(net, optimizer)
    handle = worker.save(state, step=1)
    assert held.reached.wait(60)
    assert handle.stage == "staging"
    net(torch.randn(8, WIDE)).sum().backward()
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    assert same({k: v for k, v in copy_of(net, optimizer).items() if "layers" in k or "o." in k},
                {k: v for k, v in expected.items() if "layers" in k or "o." in k})  # fmt: skip
    held.let_go()
    stepping.join(60)
    handle.wait("memory", 60)
    assert same(loaded(nodes, 2)[1], expected)


@pytest.mark.parametrize("what", ["module", "optimizer", "fence", "save", "load", "close"])
def test_whatever_would_change_the_state_waits(nodes: Nodes, held: Held, what: str) -> None:
    net, optimizer, step = training()
    step()
    other, other_optimizer, other_step = training(seed=2)
    other_step()
    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    expected = copy_of(net, optimizer)
    handle = worker.save(state, step=1)
    assert held.reached.wait(60)
    actions: dict[str, Callable[[], object]] = {
        "module": lambda: net.load_state_dict(other.state_dict()),
        "optimizer": lambda: optimizer.load_state_dict(other_optimizer.state_dict()),
        "fence": lambda: (easyckpt.fence(), [p.data.zero_() for p in net.parameters()]),
        "save": lambda: worker.save({"model": other, "optimizer": other_optimizer}, step=2),
        "load": lambda: worker.load({"model": other, "optimizer": other_optimizer}),
        "close": worker.close,
    }
    doing = threading.Thread(target=actions[what])
    doing.start()
    held.let_go()
    doing.join(60)
    assert not doing.is_alive()
    if what not in ("save", "close"):
        handle.wait("memory", 60)
    if what != "save":
        assert same(loaded(nodes, 2)[1], expected)


UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda weight: weight.add_(1.0),
    "through .data": lambda weight: weight.data.add_(1.0),
    "through numpy": lambda weight: weight.detach().numpy().__iadd__(1.0),
    "one element": lambda weight: weight[3, 3].add_(1.0),
}


@pytest.mark.parametrize("how", UPDATES)
def test_a_change_behind_the_call_gives_the_step_up_and_names_the_tensor(
    nodes: Nodes, held: Held, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    worker.save(state, step=1)
    held.let_go()
    easyckpt.fence()
    before = copy_of(net, optimizer)
    held.gate.clear()
    handle = worker.save(state, step=2, block=True)
    with torch.no_grad():
        UPDATES[how](net.layers[1].weight)
    held.let_go()
    with pytest.raises(SaveAbandoned, match=r"model\.layers\.1\.weight"):
        handle.wait("memory", 60)
    expected = copy_of(net, optimizer)
    again = worker.save(state, step=3, block=True)
    assert "model.layers.1.weight" in caplog.text
    with torch.no_grad():
        UPDATES[how](net.layers[1].weight)  # it is copied within save() from now on
    again.wait("memory", 60)
    assert loaded(nodes, 2)[0] == 3
    assert same(loaded(nodes, 3)[1], expected)
    assert not same(before, expected)


def test_full_proof_finds_the_smallest_change_that_a_sample_misses(nodes: Nodes, held: Held) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True, verify="full")
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    handle = worker.save(state, step=1)
    net.layers[2].weight.detach().numpy()[100, 77] += 1e-3
    held.let_go()
    with pytest.raises(SaveAbandoned, match=r"model\.layers\.2\.weight"):
        handle.wait("memory", 60)


def test_an_optimizer_within_backward_is_never_torn(nodes: Nodes) -> None:
    torch.manual_seed(1)
    net = Net()
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in net.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizers": list(optimizers.values())}
    worker.load(state)
    for number in range(1, 4):
        net(torch.randn(8, WIDE)).sum().backward()
        expected = {key: value.clone() for key, value in net.state_dict().items()}
        handle = worker.save(state, step=number, block=True)
        net(torch.randn(8, WIDE)).sum().backward()
        handle.wait("memory", 60)
    nodes.begin(2, nodes.nodes, progress=True)
    fresh = Net()
    again = {"model": fresh, "optimizers": [torch.optim.AdamW([p], lr=0.01) for p in fresh.parameters()]}
    (worker,) = nodes.workers()
    assert worker.load(again) == 3
    assert same(fresh.state_dict(), expected)


def test_a_closure_of_lbfgs_runs_behind_the_fence(nodes: Nodes) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDE, 3 * WIDE), nn.Tanh(), nn.Linear(3 * WIDE, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, history_size=2)
    x = torch.randn(16, WIDE)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    for number in range(1, 4):
        optimizer.step(closure)
        expected = {key: value.clone() for key, value in net.state_dict().items()}
        handle = worker.save(state, step=number, block=True)
        optimizer.step(closure)
        handle.wait("memory", 60)
    nodes.begin(2, nodes.nodes, progress=True)
    fresh = nn.Sequential(nn.Linear(WIDE, 3 * WIDE), nn.Tanh(), nn.Linear(3 * WIDE, 1))
    (worker,) = nodes.workers()
    assert worker.load({"model": fresh, "optimizer": torch.optim.LBFGS(fresh.parameters(), max_iter=3)}) == 3
    assert same(fresh.state_dict(), expected)


def test_a_piece_that_fails_gives_the_step_up(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: int, source: int, count: int) -> Callable[[], None]:
        def piece() -> None:
            raise MemoryError("no room")

        return piece

    monkeypatch.setattr(plan, "_move", broken)
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    handle = worker.save(state, step=1)
    with pytest.raises(SaveAbandoned, match="the copy failed: MemoryError: no room"):
        handle.wait("memory", 60)
    step()  # is not held up


def test_a_saver_that_dies_during_the_copy_costs_no_training(nodes: Nodes, held: Held) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    worker.save(state, step=1)
    assert held.reached.wait(60)
    nodes.nodes[0].kill()
    held.let_go()
    step()
    assert worker.save(state, step=2).stage == "failed"


def test_memory_descriptors_and_threads_stay_flat(nodes: Nodes) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True, disk_interval=1_000_000)
    state = {"model": net, "optimizer": optimizer, "rng": easyckpt.RNG(), "losses": [0.5] * 20}
    worker.load(state)

    def sizes() -> tuple[int, int, int, int]:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        mappings = sum("easyckpt-slot" in line for line in Path("/proc/self/maps").read_text().splitlines())
        threads = sum(thread.name == job.THREAD_NAME for thread in threading.enumerate())
        return descriptors, mappings, threads, nodes.nodes[0].status().slot_bytes

    def save(number: int) -> None:
        handle = worker.save(state, step=number, block=True)
        handle.wait("memory", 60)

    for number in range(1, 6):
        save(number)
    before, resident = sizes(), resident_bytes()
    for number in range(6, 206):
        save(number)
    assert sizes() == before
    assert before[1] <= 3  # two slots, and the private view of what was loaded
    assert resident_bytes() - resident < 16 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_child_of_a_fork_is_not_fenced(nodes: Nodes, held: Held) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=True)
    worker.load({"model": net, "optimizer": optimizer})
    worker.save({"model": net, "optimizer": optimizer}, step=1)
    assert held.reached.wait(60)
    pid = os.fork()
    if pid == 0:
        fence.fence()
        os._exit(7)
    held.let_go()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_copying_thread_ends_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.CopyThread, "IDLE_S", 0.01)
    thread = job.CopyThread()
    for _ in range(3):
        done = threading.Event()
        thread.submit(done.set)
        assert done.wait(60)
        ending = thread._thread
        if ending is not None:
            ending.join(60)
        assert thread._thread is None


def test_a_checkpointer_that_is_told_not_to_overlap_copies_within_save(nodes: Nodes) -> None:
    net, optimizer, step = training()
    step()
    (worker,) = nodes.workers(overlap=False)
    state = {"model": net, "optimizer": optimizer}
    worker.load(state)
    expected = copy_of(net, optimizer)
    handle = worker.save(state, step=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    handle.wait("memory", 60)
    assert same(loaded(nodes, 2)[1], expected)
    assert isinstance(worker, Checkpointer)
