"""Build DeepSpeed's C++ extensions ahead of time, so that no training pays for it.

DeepSpeed compiles on first use: its CPU communication op when the process group is made (about 45 s with g++)
and, for ``--offload``, its CPU Adam (about two minutes). A worker that is killed during a build leaves a lock
behind that makes every later one wait for ever, so it is built here, by one process that nobody kills.

torch keeps extensions in one folder per user. Two environments with a DeepSpeed each would build over the
other at every start, so each environment gets its own folder, unless ``TORCH_EXTENSIONS_DIR`` is set. The
same holds for ``ninja``, which torch calls at every start: another version of it takes what is there for
outdated, and builds anew. This environment's own one, which DeepSpeed brings, is taken, whoever starts it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
COMMUNICATION = Path("deepspeed_shm_comm", "deepspeed_shm_comm.so")


def extensions_dir() -> Path:
    """Where this environment's extensions lie."""
    return Path(os.environ.get(VARIABLE) or Path(sys.prefix, "torch_extensions"))


def environment() -> dict[str, str]:
    """What a process that builds or loads them needs, beside what it inherits."""
    scripts = sysconfig.get_path("scripts")
    found = [place for place in os.environ.get("PATH", os.defpath).split(os.pathsep) if place != scripts]
    return {VARIABLE: str(extensions_dir()), "PATH": os.pathsep.join([scripts, *found])}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the C++ extensions that the example uses.")
    parser.add_argument("--offload", action="store_true", help="also the CPU Adam that --offload trains with")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(environment())
    if not (shutil.which("g++") or os.environ.get("CXX")):
        print("build_ops: no C++ compiler found; install g++ (Debian: apt-get install g++)", file=sys.stderr)
        return 3
    from deepspeed.accelerator import get_accelerator

    builders = ["ShareMemCommBuilder"] + (["CPUAdamBuilder"] if arguments.offload else [])
    for name in builders:
        begin = time.monotonic()
        print(
            f"building DeepSpeed's {name.removesuffix('Builder')} (a minute or two, only the first time)",
            flush=True,
        )
        builder = get_accelerator().create_op_builder(name)
        if builder is None:
            print(
                f"build_ops: this DeepSpeed has no {name} for {get_accelerator().device_name()}",
                file=sys.stderr,
            )
            return 3
        builder.load(verbose=False)
        print(f"ready in {extensions_dir()} after {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
