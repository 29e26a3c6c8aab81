"""One master and very many agents, over real gRPC: how long a heartbeat waits for its answer, and its cost.

    python -m benchmarks.master_scale --agents 4000 --period 5 --seconds 60 --json
    python -m benchmarks.master_scale --agents 4000 --period 5 --seconds 60 --burst fail:1000

The master is the program that leads real jobs, in a process of its own. Agents are simulated, but their
connections are not: each has its own, says hello, beats with the progress of its workers, and answers the
commands of a start as a real one does. They live in a few client processes; measuring begins when all of them
train. In the middle of the time a burst may come:

* ``fail:N``: N agents report a failed worker within a second, each with 1 MB of error text, of which an agent
  sends what the wire allows; then the whole job starts anew;
* ``reconnect:N``: N agents lose their connection and come back at once.

The last line is one JSON object: `agents`, `beats`, `p50_ms`, `p99_ms` and `max_ms` of the answers, `cores`
(processor time of the master / time) and `rss_mb` of the master, `errors` (sessions that ended untold),
`recovered_s` (from the burst until all agents train again).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.scale_agents import CLIENTS, JOB, raise_open_files


def _start_master(folder: Path, period_s: float) -> tuple[subprocess.Popen[bytes], str]:
    reader, writer = os.pipe()
    command = [
        *(sys.executable, "-m", "aimaster.master", "--job-id", JOB, "--listen", "127.0.0.1:0"),
        *("--state-dir", str(folder), "--insecure", "--ready-fd", str(writer)),
        *("--heartbeat-interval", f"{period_s:g}", "--suspect-after", f"{3 * period_s:g}"),
        *("--dead-after", f"{6 * period_s:g}", "--last-call", "1"),
    ]
    with open(folder / "log", "wb") as log:
        master = subprocess.Popen(command, pass_fds=(writer,), stdout=log, stderr=log)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        word = json.loads(pipe.readline() or "{}")
    if "endpoint" not in word:
        raise RuntimeError(f"the master did not start: {word}\n{(folder / 'log').read_text()[-2000:]}")
    return master, word["endpoint"]


def _start_client(number: int, options: argparse.Namespace, endpoint: str) -> subprocess.Popen[str]:
    words = [endpoint, *map(str, (options.agents, options.period, options.workers, number))]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale_agents", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def _tell_all(clients: list[subprocess.Popen[str]], word: str) -> None:
    for one in clients:
        assert one.stdin is not None
        one.stdin.write(f"{word}\n")
        one.stdin.flush()


def _hear_all(clients: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    said = []
    for one in clients:
        pipe: IO[str] | None = one.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise RuntimeError("a client process has ended")
        said.append(json.loads(line))
    return said


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    kind, _, count = options.burst.partition(":")
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        master, endpoint = _start_master(Path(folder), options.period)
        clients = [_start_client(number, options, endpoint) for number in range(CLIENTS)]
        try:
            begin = time.monotonic()
            _tell_all(clients, "wait")
            _hear_all(clients)
            started_s = time.monotonic() - begin
            process = psutil.Process(master.pid)
            time.sleep(options.period)  # what the start itself was like is another question
            _tell_all(clients, "measure")
            before, begin = sum(process.cpu_times()[:2]), time.monotonic()
            recovered_s = None
            if kind:
                time.sleep(options.seconds / 2)
                struck = time.monotonic()
                _tell_all(clients, f"{kind} {count}")
                _tell_all(clients, "wait")
                _hear_all(clients)
                recovered_s = round(time.monotonic() - struck, 2)
            time.sleep(max(0.0, begin + options.seconds - time.monotonic()))
            elapsed = time.monotonic() - begin
            cores = (sum(process.cpu_times()[:2]) - before) / elapsed
            rss = process.memory_info().rss
            _tell_all(clients, "report")
            said = _hear_all(clients)
        finally:
            for one in clients:
                one.terminate()
            master.terminate()
            for ended in (*clients, master):
                ended.wait(30)
    answers = sorted(1000 * answer for line in said for answer in line["answers_s"])
    if not answers:
        raise RuntimeError("no heartbeat was answered")
    return {
        "agents": options.agents,
        "period_s": options.period,
        "seconds": round(elapsed, 1),
        "beats": len(answers),
        "p50_ms": round(statistics.median(answers), 2),
        "p99_ms": round(answers[int(0.99 * (len(answers) - 1))], 2),
        "max_ms": round(answers[-1], 2),
        "cores": round(cores, 3),
        "rss_mb": round(rss / 1e6, 1),
        "started_s": round(started_s, 1),
        "errors": sum(line["errors"] for line in said),
        "trouble": next((line["trouble"] for line in said if line["trouble"]), ""),
        "burst": options.burst,
        "recovered_s": recovered_s,
    }


def _burst(text: str) -> str:
    kind, _, count = text.partition(":")
    if text and (kind not in ("fail", "reconnect") or not count.isdigit()):
        raise argparse.ArgumentTypeError("fail:N or reconnect:N")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--period", type=float, default=5.0, help="seconds between heartbeats of one agent")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--workers", type=int, default=8, help="ranks of one agent")
    parser.add_argument("--burst", type=_burst, default="", metavar="fail:N|reconnect:N")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    raise_open_files()
    found = measure(options)
    if not options.json:
        for name, value in found.items():
            print(f"{name:12} {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
