"""The worker template: a process that has imported torch, proved that it may be forked, and waits to be.

It runs inside Python's own start, before the script (see `aimaster.agent.bootstrap.sitecustomize`), and is
one thread that reads orders from a control socket. For each order it forks once; that child forks every
worker and ends, so that the workers become children of the agent, which is a child subreaper. A worker
waits until that has happened, binds its life to the agent's, takes the standard streams, the environment
and the arguments that came with the order, and returns into the interpreter's start, which then runs the
script as ever.

What a fork inherits and a fresh process would not have is undone here: random state, environment,
descriptors, session. What cannot be undone is refused: the template says so, and the agent starts the
workers cold.

- It does not fork when CUDA is initialised, or when it has threads, children or sockets beyond those of
  ``import numpy, torch``.
- A canary fork runs a matrix product of torch and one of NumPy within `CANARY_S` (not counting the time
  that it waited for a processor): thread pools that do not survive a fork hang there and not in the training.
- Modules ahead of time are imported one by one. One that leaves a thread, a child or a socket behind, or
  reads a variable that differs between workers (``RANK``, …), taints itself and all that were importing it:
  the agent starts a template without them.

Known differences to a fresh process: all workers of one template share the seed of ``hash(str)``,
``/proc/PID/environ`` shows the template's environment, objects of the imported modules are exempt from
cyclic garbage collection (`gc.freeze`), which keeps their memory shared, and what those modules change in the
process (warning filters, variables, loggers) is there from the start and not from their import on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
import warnings
from typing import Any, NoReturn

from aimaster.agent import prctl
from aimaster.agent.importwatch import ImportWatch

HEADER = struct.Struct("<Q")
FDS_PER_MESSAGE_MAX = 250
CANARY_S = 2.0
CANARY_WALL_S_MAX = 20.0
CANARY_LOOK_S = 0.1
HEAD_START_S = 0.05
"""Of rank 0 over the others of its node. It opens the store at which they meet, and a rank that finds nobody
there yet asks again only after half a second (TCPStore's back-off, torch 2.13)."""
CANARY_SIZE = 192
FDS_PER_WORKER = 3


def main() -> bool:
    """Serve until the agent closes the control socket; returns in workers only.

    Returns:
        Whether the user's environment has a `sitecustomize` of its own, which is loaded by then.
    """
    control = socket.socket(fileno=int(os.environ.pop("AIMASTER_TEMPLATE")))
    os.set_inheritable(control.fileno(), False)
    config, _ = receive(control)
    _restore_pythonpath(config["pythonpath"])
    prctl.die_with_parent(config["agent_pid"])
    if config["probe"]:
        send(control, {"probe": True})
        os._exit(0)
    own_name = prctl.name()
    prctl.set_name("aimaster-templ")
    customised = _load_real_sitecustomize()
    started = set(sys.modules)
    before = dict(os.environ)
    answer = _import_ahead(config, control)
    if "unfit" not in answer:
        answer.update(_prove())
    send(control, answer)
    if "unfit" in answer or "tainted" in answer:
        os._exit(0)
    # What the imports have set, a worker would have set by importing.
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    imported.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    gc.collect()
    gc.freeze()
    while True:
        try:
            order, fds = receive(control)
        except EOFError:
            os._exit(0)
        if _serve(order, fds, control=control, started=started):
            os.environ.update(imported)
            prctl.set_name(own_name)
            _hook_in()
            return customised


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and the descriptors that came with it. Its text lies in a memory file: nothing blocks."""
    raw, fds, _, _ = socket.recv_fds(control, HEADER.size, FDS_PER_MESSAGE_MAX)
    if not raw:
        raise EOFError
    for fd in fds:
        os.set_inheritable(fd, False)
    (size,) = HEADER.unpack(raw)
    text = os.pread(fds[0], size, 0)
    os.close(fds[0])
    return json.loads(text), fds[1:]


def send(control: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message with descriptors; both directions use the same form."""
    text = json.dumps(message).encode()
    memory = os.memfd_create("aimaster-message", os.MFD_CLOEXEC)
    try:
        os.truncate(memory, len(text))
        os.pwrite(memory, text, 0)
        socket.send_fds(control, [HEADER.pack(len(text))], [memory, *fds])
    finally:
        os.close(memory)


def _restore_pythonpath(value: str | None) -> None:
    if value is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = value


def _load_real_sitecustomize() -> bool:
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        return False
    return True


def _import_ahead(config: dict[str, Any], control: socket.socket) -> dict[str, Any]:
    """Import torch, then what the last attempt had loaded; says what made this template unfit or tainted."""
    begin = time.monotonic()
    # Availability checks at import must not initialise CUDA. Workers get the user's own value back.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")
    try:
        importlib.import_module("torch")
    except ImportError as error:
        return {"unfit": f"torch cannot be imported ({error})"}
    base = inventory(control)
    if base["python_threads"] > 1 or base["children"] or base["sockets"]:
        return {"unfit": f"import torch left more than a process to fork behind: {base}"}
    watch = ImportWatch(frozenset(config["per_worker"]))
    tainted: dict[str, str] = {}
    with watch:
        for name in config["modules"]:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whoever needs it will see it
                tainted[name] = f"{name} cannot be imported ahead ({type(error).__name__})"
            now = inventory(control)
            if now != base:
                tainted[name] = f"{name} leaves something running: {_more(base, now)}"
                base = now
    tainted.update(watch.tainted)
    answer: dict[str, Any] = {"seconds": time.monotonic() - begin, "loaded": len(sys.modules)}
    if tainted:
        answer["tainted"] = tainted
    return answer


def _more(before: dict[str, int], after: dict[str, int]) -> str:
    return ", ".join(f"{key} {before[key]} → {after[key]}" for key in before if before[key] != after[key])


def inventory(control: socket.socket) -> dict[str, int]:
    """What a fork would not carry over, counted: threads, Python's own among them, children, sockets."""
    import threading

    sockets = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets += stat.S_ISSOCK(os.fstat(int(name)).st_mode) and int(name) != control.fileno()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": len(threading.enumerate()),
        "children": len(prctl.children(os.getpid())),
        "sockets": sockets,
    }


def _prove() -> dict[str, str]:
    """Fork a canary; an empty answer is a proof."""
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return {"unfit": "CUDA was initialised by an import"}
    alive, held = os.pipe()
    pid = _fork()
    if pid == 0:
        _sing()
    os.close(held)
    begin = time.monotonic()
    wall = 0.0
    while wall - _waited_for_cpu(pid) < CANARY_S and wall < CANARY_WALL_S_MAX:
        if select.select([alive], [], [], CANARY_LOOK_S)[0]:  # the canary's end has closed its pipe
            status = os.waitpid(pid, 0)[1]
            os.close(alive)
            return {} if status == 0 else {"unfit": f"the canary fork ended with wait status {status}"}
        wall = time.monotonic() - begin
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"unfit": f"the canary fork did not finish a matrix product within {wall:.1f} s"}


def _sing() -> NoReturn:
    try:
        torch = sys.modules["torch"]
        a = torch.ones(CANARY_SIZE, CANARY_SIZE)
        good = float((a @ a)[0, 0]) == CANARY_SIZE
        if "numpy" in sys.modules:
            b = sys.modules["numpy"].ones((CANARY_SIZE, CANARY_SIZE))
            good = good and float((b @ b)[0, 0]) == CANARY_SIZE
        os._exit(0 if good else 1)
    finally:
        os._exit(2)


def _waited_for_cpu(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _fork() -> int:
    # Python 3.12 warns where a process has threads; ours are the pools that the canary has tried.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(order: dict[str, Any], fds: list[int], *, control: socket.socket, started: set[str]) -> bool:
    """Carry out one order; returns True in a worker, False in the template."""
    reason = _refusal(order, started)
    if reason is not None:
        send(control, {"refused": reason})
        _close(fds)
        return False
    said, say = os.pipe()
    ready, go = os.pipe()
    middle = _fork()
    if middle == 0:
        mine = _fork_workers(order["workers"], say)
        if mine is None:
            os._exit(0)
        for fd in (said, say, go):
            os.close(fd)
        control.close()
        _become_worker(order, mine, fds=fds, ready=ready)
        return True
    os.close(say)
    os.close(ready)
    _close(fds)
    os.waitpid(middle, 0)
    text = _read_all(said)
    os.close(said)
    pids = [int(word) for word in text.split()]
    # The workers are the agent's children now. Without their byte they end: all start, or none.
    whole = len(pids) == len(order["workers"])
    if whole:
        with contextlib.suppress(BrokenPipeError):
            os.write(go, b"g" * len(pids))
    os.close(go)
    send(control, {"pids": pids} if whole else {"pids": pids, "failed": "fork failed"})
    return False


def _refusal(order: dict[str, Any], started: set[str]) -> str | None:
    if sys.modules["torch"].cuda.is_initialized():
        return "CUDA is initialised in the template"
    folder = order["script_dir"]
    if folder is None:
        return None
    try:
        beside = set(os.listdir(folder or "."))
    except OSError:
        return None
    loaded = {name.partition(".")[0] for name in sys.modules} - started
    for name in sorted(loaded):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        package = os.path.join(folder, name, "__init__.py")
        hides = f"{name}.py" in beside or (name in beside and os.path.exists(package))
        if hides and not os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep):
            return f"{name} beside the script hides a module that the template has imported"
    return None


def _fork_workers(workers: list[dict[str, Any]], say: int) -> int | None:
    """Fork every worker; returns its index in a worker, None in the process that forked them."""
    for index in range(len(workers)):
        try:
            pid = _fork()
        except OSError:
            return None
        if pid == 0:
            return index
        os.write(say, b"%d " % pid)
    return None


def _become_worker(order: dict[str, Any], index: int, *, fds: list[int], ready: int) -> None:
    """Turn this fork into what a fresh process would be at this point of its start."""
    os.setsid()
    if os.read(ready, 1) != b"g":
        os._exit(0)
    os.close(ready)
    prctl.die_with_parent(order["agent_pid"])
    ranks = [worker["env"].get("RANK") for worker in order["workers"]]
    if "0" in ranks and ranks[index] != "0":
        time.sleep(HEAD_START_S)
    worker = order["workers"][index]
    for target, fd in enumerate(fds[FDS_PER_WORKER * index : FDS_PER_WORKER * (index + 1)]):
        os.dup2(fd, target, inheritable=True)
    _close(fds)
    for key in list(os.environ):
        if key not in worker["env"]:
            del os.environ[key]
    os.environ.update(worker["env"])
    sys.argv[1:] = worker["args"]
    if len(worker["args"]) and hasattr(sys, "orig_argv"):
        sys.orig_argv[-len(worker["args"]) :] = worker["args"]
    _reseed()


def _hook_in() -> None:
    """Forget the agent's modules, and let the hook in as ``import torch`` would have."""
    from aimaster.worker import hook

    for name in [name for name in sys.modules if name.startswith("aimaster.agent")]:
        del sys.modules[name]
    vars(sys.modules["aimaster"]).pop("agent", None)
    importlib.invalidate_caches()
    hook.autoload()


def _reseed() -> None:
    """Draw and read anew what a fresh process does at its start. (`random` does so after every fork.)"""
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading: Any = sys.modules.get("threading")
    if threading is not None and hasattr(threading.current_thread(), "_set_native_id"):
        threading.current_thread()._set_native_id()  # Python 3.11 leaves the parent's there
    logging: Any = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "_startTime"):
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
