"""The process that does a member's tests: torch is imported once, every test runs in a fork of it.

Orders come as JSON lines on stdin: ``{"do": "test", "id": n, "rank": r, "world": w, "at": "host:port" or "",
"address": own address, "deadline_s": s}``. Rank 0 of a test opens a store at a free port and says
``{"id": n, "at": "host:port"}``; everybody then says ``{"id": n, "result": {…}}``. One test at a time: an
order that comes while a test runs ends it in silence, since its outcome is known from the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sanitycheck.lifeline import die_with_parent

__all__ = ["BOOTSTRAP", "main"]

BOOTSTRAP = (
    "import json,sys;"
    "order=json.loads(open(0,'rb',buffering=0,closefd=False).readline());"
    "sys.path[:]=order['path'];"
    "from sanitycheck.group.worker import main;"
    "main(order)"
)
SIZES_BYTES = (64, 64 << 10, 1 << 20, 8 << 20)
REPEATS = 3
ENOUGH_S = 0.25
"""A size that took so long is the last: a slow link must not run into the deadline, which means broken, and
need not hold up the round; the next size is up to eight times as long."""
ORDERS_FD = 0
ORDER_BYTES_MAX = 1 << 16


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _interface(address: str) -> str:
    """The interface that has an address; gloo wants its name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return ""


def _exchange(torch: Any, world: int, rank: int) -> dict[str, Any]:
    """All-reduce in growing sizes; every value is compared with what must come out."""
    dist = torch.distributed
    latency_s, mb_s, wrong = 0.0, 0.0, 0
    for size in SIZES_BYTES:
        count = size // 4
        pattern = torch.arange(count, dtype=torch.float32).remainder(1009)
        want = pattern * world + 10_000.0 * sum(range(world))
        took = []
        for _ in range(REPEATS):
            mine = pattern + 10_000.0 * rank
            begin = time.perf_counter()
            dist.all_reduce(mine)
            took.append(time.perf_counter() - begin)
            wrong += int((mine != want).sum())
        if size == SIZES_BYTES[0]:
            latency_s = min(took)
        mb_s = size / min(took) / 1e6
        slowest = torch.tensor([min(took)])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if float(slowest) > ENOUGH_S:
            break
    return {"mb_s": round(mb_s, 3), "latency_s": round(latency_s, 6), "wrong": wrong}


def _test(torch: Any, order: Mapping[str, Any], say: Any) -> dict[str, Any]:
    rank, world = int(order["rank"]), int(order["world"])
    limit = timedelta(seconds=float(order["deadline_s"]))
    interface = _interface(order["address"])
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    dist = torch.distributed
    try:
        if rank == 0:
            store = dist.TCPStore(order["address"], 0, world, True, timeout=limit, wait_for_workers=False)
            say({"id": order["id"], "at": f"{order['address']}:{store.port}"})
        else:
            host, _, port = str(order["at"]).rpartition(":")
            # The store is open already. What the network refuses at once, torch would try until the deadline.
            socket.create_connection((host, int(port)), timeout=limit.total_seconds()).close()
            store = dist.TCPStore(host, int(port), world, False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        result = _exchange(torch, world, rank)
        dist.barrier()
    except (RuntimeError, ValueError, OSError) as error:  # what torch.distributed raises
        return {"problem": (str(error).splitlines() or [type(error).__name__])[0][:300]}
    return result


def _fork(torch: Any, order: Mapping[str, Any]) -> tuple[int, int]:
    """(pid, descriptor to read its messages from) of a child that does one test."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        return pid, read_fd
    die_with_parent()
    os.close(read_fd)

    def say(message: Mapping[str, Any]) -> None:
        os.write(write_fd, json.dumps(message).encode() + b"\n")

    try:
        result = _test(torch, order, say)
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            result = {"problem": repr(error)[:300]}
        say({"id": order["id"], "result": result})
        os._exit(0)


def _run(torch: Any, order: Mapping[str, Any]) -> None:
    """One test under its deadline; says its messages as they come, and a result unless it is called away."""
    pid, fd = _fork(torch, order)
    ends = time.monotonic() + float(order["deadline_s"])
    data, said, away = b"", False, False
    while not said:
        ready, _, _ = select.select([fd, ORDERS_FD], [], [], max(0.0, ends - time.monotonic()))
        if away := ORDERS_FD in ready:
            break
        part = os.read(fd, 1 << 16) if ready else b""
        if not part:
            break
        *lines, data = (data + part).split(b"\n")
        for line in lines:
            message = json.loads(line)
            said = said or "result" in message
            _say(message)
    os.close(fd)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not said and not away:
        _say({"id": order["id"], "result": {"problem": f"no answer within {order['deadline_s']:g} s"}})


def main(order: Mapping[str, Any]) -> None:
    """Serve orders until stdin ends."""
    die_with_parent(order["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch
        import torch.distributed
    except (ImportError, OSError) as error:
        _say({"ready": False, "problem": f"torch cannot be imported: {error}"[:300]})
        return
    _say({"ready": True})
    # Unbuffered, so that an order that has come is seen by `select` and not kept in a buffer.
    orders = os.fdopen(ORDERS_FD, "rb", buffering=0, closefd=False)
    while line := orders.readline(ORDER_BYTES_MAX):
        _run(torch, json.loads(line))
