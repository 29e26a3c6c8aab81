"""Makes `.venv` with everything that `make demo` and `make test` need. Run by the system's own Python.

Three things go before the installation, because each of them fails late and unkindly otherwise. The machine
is looked at as a whole: one message names all that is missing (without a C++ compiler DeepSpeed dies at
start, without Python's headers it cannot build). A stamp is compared, so that the second call takes no time.
And pip is asked what it would fetch: on x86-64 Linux a plain index brings the CUDA build of torch, gigabytes
of it, also to a machine without a GPU.

The file has to run on any Python from 3.6, since telling an old one apart is its first task.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, ".set-up-done")
OLDEST = (3, 10)
TORCH = "torch==2.13.0"
BUILD_TOOLS = ["setuptools>=77", "wheel", "ninja"]
INPUTS = ["constraints.txt", "pyproject.toml", "tools/set_up.py"]
HEAD_TIMEOUT_S = 10.0
CUDA_NAMES = ("nvidia-", "cuda-", "triton")

HOW_TO_AVOID_CUDA = """\
To fetch the much smaller CPU build, tell pip of PyTorch's index of CPU wheels; the installation page of
pytorch.org shows its address for "Compute Platform: CPU":
    PIP_EXTRA_INDEX_URL=<that address> make demo
or put a CPU wheel of {torch} into a folder:
    PIP_FIND_LINKS=<folder> make demo
To take the CUDA build all the same:
    ALLOW_CUDA=1 make demo
"""


def main():
    missing = look_at_machine()
    if missing:
        sys.stderr.write("This machine lacks what the set-up needs:\n")
        for line in missing:
            sys.stderr.write("  - " + line + "\n")
        sys.stderr.write(
            "On Debian or Ubuntu: apt-get install python3 python3-venv python3-dev g++ git make\n"
            "Another Python can be named: make PYTHON=python3.12 …\n"
        )
        return 3
    stamp = stamp_text()
    if stamp_is(stamp):
        return 0
    make_venv()
    if not cuda_is_fine():
        return 3
    install()
    step("building DeepSpeed's CPU communication op, once (about a minute)")
    run([python(), os.path.join("examples", "hello_deepspeed", "build_ops.py")], DS_ACCELERATOR="cpu")
    with open(STAMP, "w") as file:
        file.write(stamp)
    step("done")
    return 0


def look_at_machine():
    """Everything that is missing, as sentences."""
    missing = []
    if not sys.platform.startswith("linux"):
        missing.append("Linux (this is " + sys.platform + ")")
    if sys.version_info < OLDEST:
        missing.append(f"Python 3.10 or newer ({sys.executable} is {sys.version.split()[0]})")
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            missing.append("Python's module " + module)
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        missing.append("Python's headers (Python.h)")
    if not (os.environ.get("CXX") or shutil.which("g++")):
        missing.append("a C++ compiler (g++)")
    for tool in ("git", "make"):
        if not shutil.which(tool):
            missing.append(tool)
    return missing


def stamp_text():
    """Changes whenever the environment has to be made anew."""
    digest = hashlib.sha256(sys.version.encode())
    for name in INPUTS:
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def stamp_is(wanted):
    try:
        with open(STAMP) as file:
            return file.read() == wanted
    except OSError:
        return False


def make_venv():
    step("making .venv with " + sys.executable)
    if os.path.exists(STAMP):
        os.remove(STAMP)  # half an update is not a finished one
    if not os.path.exists(python()):
        run([sys.executable, "-m", "venv", VENV])


def cuda_is_fine():
    """Ask pip what torch would bring; say how large it is, and stop unless it is wanted."""
    installed = subprocess.call([python(), "-c", "import torch"], stderr=subprocess.DEVNULL) == 0
    if installed or os.environ.get("ALLOW_CUDA") == "1":
        return True
    step("asking pip which build of torch it would fetch")
    would = ask_pip(["--no-deps", TORCH])
    if not any(is_cuda(need) for item in would for need in item["metadata"].get("requires_dist", [])):
        return True
    would = ask_pip([TORCH])
    urls = [item["download_info"]["url"] for item in would]
    sizes = [size_of(url) for url in urls]
    known = sum(size for size in sizes if size)
    sys.stderr.write(
        "pip would fetch the CUDA build of {}: {} packages, {}{:.1f} GB to download.\n".format(
            TORCH, len(urls), "" if all(sizes) else "more than ", known / 1e9
        )
    )
    if os.path.exists("/proc/driver/nvidia"):
        sys.stderr.write("This machine has an NVIDIA driver, so that is what it needs; going on.\n")
        return True
    sys.stderr.write("This machine has no NVIDIA driver.\n" + HOW_TO_AVOID_CUDA.format(torch=TORCH))
    return False


def ask_pip(what):
    """pip's own report of what it would install; nothing is installed, only metadata is fetched."""
    command = [
        python(),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
    ]
    command += ["-c", os.path.join(ROOT, "constraints.txt")]
    done = subprocess.run(command + what, stdout=subprocess.PIPE, cwd=ROOT, check=False)
    if done.returncode:
        sys.stderr.write("pip cannot find " + TORCH + ": see its message above.\n")
        sys.exit(3)
    return json.loads(done.stdout.decode())["install"]


def is_cuda(requirement):
    return requirement.startswith(CUDA_NAMES)


def size_of(url):
    """Bytes behind a URL; 0 if the server does not say."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=HEAD_TIMEOUT_S) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def install():
    pip = [python(), "-m", "pip", "install", "-c", "constraints.txt"]
    step("installing torch")
    run([*pip, *BUILD_TOOLS, TORCH])
    step("installing DeepSpeed")
    run([*pip, "--no-build-isolation", "deepspeed"], DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    step("installing aimaster-ft with what the demo and the tests need")
    run([*pip, "--no-build-isolation", "-e", ".[dev,demo,huggingface,lightning,data]"])


def python():
    return os.path.join(VENV, "bin", "python")


def run(command, **variables):
    """Run a command of the set-up; its failure is the set-up's."""
    code = subprocess.call(command, cwd=ROOT, env=dict(os.environ, **variables))
    if code:
        sys.stderr.write("set-up: this command failed ({}): {}\n".format(code, " ".join(command)))
        sys.exit(3)


def step(text):
    sys.stdout.write("set-up: " + text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
