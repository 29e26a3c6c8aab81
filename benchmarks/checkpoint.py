"""Checkpoints side by side: what a save costs training, how soon it is safe, how fast it comes back.

    python benchmarks/checkpoint.py --gigabytes 1 --rounds 3 --json checkpoint.json

Every tool gets its own `torchrun` with the same training (`ckpt_rank.py`); the tools take turns,
round by round, so that a slow minute of the machine hurts all. What counts are the ratios: against
the asynchronous DCP of the same run, and against what the machine can do at all, measured in the
same run. A tool whose package is missing is named and left out; one that fails or hangs is shown as
that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tools import TOOLS
from launchers import end_on_sigterm
from rich.console import Console
from rich.table import Table

RANK = Path(__file__).resolve().with_name("ckpt_rank.py")
NEEDS = {"torchsnapshot": "torchsnapshot", "torch_checkpointing": "torch_checkpointing"}
"""Tool → the package that it is."""
WARM = 2
"""The first saves populate memory; they are judged apart."""
PEER = "dcp_async"
COLUMNS = {
    "call_s": "call",
    "lost_s": "lost per save",
    "first_lost_s": "lost by the first two",
    "memory_s": "in memory after",
    "durable_s": "durable after",
    "load_s": "load",
    "load_cold_s": "load, cold",
}
ERROR_LINES = 12


def run_tool(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    """One torchrun. Its result, or ``error``."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=options.folder) as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(options.ranks), str(RANK), "--tool", tool, "--folder", f"{folder}/out",
            "--gigabytes", str(options.gigabytes), "--tensors", str(options.tensors),
            "--saves", str(options.saves),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, error = process.communicate(timeout=options.limit_s)
        except subprocess.TimeoutExpired:
            return {"tool": tool, "error": f"not finished after {options.limit_s:.0f} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if process.returncode != 0 or not lines:
            said = [line for line in error.splitlines() if line.startswith("[rank")] or error.splitlines()
            return {"tool": tool, "error": "\n".join(said[-ERROR_LINES:])}
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def summary(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians over the rounds of one tool."""

    def over(value: Callable[[dict[str, Any]], float | None]) -> float | None:
        found = [one for one in map(value, runs) if one is not None]
        return statistics.median(found) if found else None

    def later(key: str) -> Callable[[dict[str, Any]], float]:
        return lambda run: statistics.median(save[key] for save in run["saves"][WARM:])

    def rate(run: dict[str, Any]) -> float:
        sealed = statistics.median(save["durable_s"] - save["memory_s"] for save in run["saves"][WARM:])
        return float(run["ranks"] * run["bytes_per_rank"] / max(sealed, 1e-9))

    return {
        "call_s": over(later("call_s")),
        "lost_s": over(later("lost_s")),
        "first_lost_s": over(lambda run: sum(save["lost_s"] for save in run["saves"][:WARM])),
        "memory_s": over(later("memory_s")),
        "durable_s": over(later("durable_s")),
        "sealed_to_durable_bytes_per_s": over(rate),
        "load_s": over(lambda run: run.get("load_s")),
        "load_cold_s": over(lambda run: run.get("load_cold_s")),
        "host_bytes_per_state_byte": over(
            lambda run: run["host_bytes"] / (run["ranks"] * run["bytes_per_rank"])
        ),
    }


def machine(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of what the machine can do, over all runs."""
    keys = runs[0]["limits"]
    return {key: statistics.median(run["limits"][key] for run in runs) for key in keys}


def judge(tools: dict[str, dict[str, Any]], limits: dict[str, float], run: dict[str, Any]) -> dict[str, Any]:
    """Our figures as ratios against the peer and the machine. Below 1 is better, except for rates."""
    ours, peer = tools.get("easyckpt"), tools.get(PEER)
    if ours is None:
        return {}
    size, ranks, tensors = limits["bytes"], run["ranks"], run["tensors_per_rank"]
    ratios: dict[str, float | None] = {
        "lost / (copy + digest + O_DIRECT write, processor time)": ours["lost_s"]
        / limits["copy_digest_write_cpu_s"],
        "first two lost / (populate twice + 0.5 s + 20 us per tensor)": ours["first_lost_s"]
        / (2 * limits["populate_s"] + 0.5 + 20e-6 * tensors),
        "sealed to durable, rate / O_DIRECT write": ours["sealed_to_durable_bytes_per_s"]
        / (ranks * size / limits["direct_write_s"]),
        "load from memory / (1.3 memcpy + digest)": _ratio(
            ours["load_s"], 1.3 * limits["memcpy_s"] + limits["digest_s"]
        ),
        "load from disk, rate / O_DIRECT read": _ratio(limits["direct_read_s"], ours["load_cold_s"]),
    }
    if peer is not None:
        ratios[f"lost / lost by {PEER}"] = _ratio(ours["lost_s"], peer["lost_s"])
    return ratios


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def show(report: dict[str, Any], console: Console) -> None:
    """The report as tables."""
    table = Table(
        title=f"{report['ranks']} ranks, {report['bytes_per_rank'] / 1e9:.2f} GB "
        f"in {report['tensors_per_rank']} tensors each"
    )
    table.add_column("tool")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for tool, found in report["tools"].items():
        table.add_row(tool, *(_seconds(found[key]) for key in COLUMNS))
    console.print(table)
    limits = report["machine"]
    console.print("the machine, all ranks at once: " + ", ".join(
        f"{key.removesuffix('_s').replace('_', ' ')} {value:.3f} s"
        for key, value in limits.items() if key != "bytes"))  # fmt: skip
    for name, value in report["ratios"].items():
        console.print(f"{name}: {'unknown' if value is None else f'{value:.3f}'}", highlight=False)
    for tool, why in report["left_out"].items():
        console.print(f"{tool}: {why}", highlight=False, markup=False)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", default=sorted(TOOLS), choices=sorted(TOOLS))
    parser.add_argument("--gigabytes", type=float, default=1.0, help="state of each rank")
    parser.add_argument("--tensors", type=int, default=16, help="parameters of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--saves", type=int, default=7, help=f"in each run; the first {WARM} are judged apart"
    )
    parser.add_argument("--folder", type=Path, default=Path("build"), help="on the disk that is measured")
    parser.add_argument("--limit_s", type=float, default=300.0, help="for one run of one tool")
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args()
    if options.saves <= WARM:
        parser.error(f"--saves must be more than {WARM}")
    end_on_sigterm()
    options.folder.mkdir(parents=True, exist_ok=True)
    need = (options.saves + 1) * options.ranks * options.gigabytes * 1e9
    if shutil.disk_usage(options.folder).free < need:
        print(
            f"checkpoint: {options.folder} has not the {need / 1e9:.0f} GB that this takes", file=sys.stderr
        )
        return 3
    left_out = {
        tool: f"{NEEDS[tool]} is not installed"
        for tool in options.tools
        if tool in NEEDS and importlib.util.find_spec(NEEDS[tool]) is None
    }
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in options.tools if tool not in left_out}
    for number in range(options.rounds):
        for tool in list(runs):
            print(f"round {number + 1} of {options.rounds}: {tool}", file=sys.stderr)
            found = run_tool(tool, options)
            if "error" in found:
                left_out[tool] = found["error"]
                del runs[tool]
            else:
                runs[tool].append(found)
    everything = [run for found in runs.values() for run in found]
    if not everything:
        print("checkpoint: no tool ran", file=sys.stderr)
        return 1
    report = {
        "schema": 1,
        "ranks": options.ranks,
        "bytes_per_rank": everything[0]["bytes_per_rank"],
        "tensors_per_rank": everything[0]["tensors_per_rank"],
        "rounds": options.rounds,
        "machine": machine(everything),
        "tools": {tool: summary(found) for tool, found in runs.items()},
        "left_out": left_out,
        "runs": runs,
    }
    report["ratios"] = judge(report["tools"], report["machine"], everything[0])
    show(report, Console(width=None if sys.stdout.isatty() else 140))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
